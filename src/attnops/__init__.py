"""attnops: pluggable attention for JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from attnops._version import __version__

if TYPE_CHECKING:
    from attnops.dispatch.attention import OperationImpl
    from attnops.dispatch.call import Call
    from attnops.dispatch.explain import Explanation, explain
    from attnops.dispatch.forwards import forward_for
    from attnops.dispatch.limits import Limits
    from attnops.dispatch.metadata import OperationMetadata
    from attnops.dispatch.operation import API_VERSION, BaseOperation
    from attnops.dispatch.options import AttentionOptions, FlashOptions, ScoreOptions
    from attnops.dispatch.rank import Rank, RankBetween
    from attnops.dispatch.registry import OperationRegistry
    from attnops.dispatch.request import AttentionRequest, Request
    from attnops.dispatch.source import Source, SourceRequest, SourceUse
    from attnops.errors import (
        AmbiguousOperationError,
        DuplicateOperationError,
        NotDifferentiableError,
        PluginError,
        PluginWarning,
        Reason,
        UnknownOperationError,
        UnsupportedError,
        UnsupportedWarning,
    )
    from attnops.functional import attention
    from attnops.models.dtypes import canonicalize_dtype
    from attnops.models.heads import repeat_kv_bnsh, repeat_kv_bsnh, repeat_kv_heads
    from attnops.models.remat import get_gradient_checkpoint_policy
    from attnops.output import OperationOutput

__all__ = [
    "API_VERSION", "AmbiguousOperationError", "AttentionOptions", "AttentionRequest", "BaseOperation", "Call",
    "DuplicateOperationError", "Explanation", "FlashOptions", "Limits", "NotDifferentiableError", "OperationImpl",
    "OperationMetadata", "OperationOutput", "OperationRegistry", "PluginError", "PluginWarning", "Rank",
    "RankBetween", "Reason", "Request", "ScoreOptions", "Source", "SourceRequest", "SourceUse",
    "UnknownOperationError", "UnsupportedError", "UnsupportedWarning", "__version__", "attention",
    "canonicalize_dtype", "explain", "forward_for", "get_gradient_checkpoint_policy", "repeat_kv_bnsh",
    "repeat_kv_bsnh", "repeat_kv_heads",
]  # fmt: skip

# Where each public name is: `import attnops` costs nothing, and the first use of a name imports what it needs.
_HOMES: Final = {
    "dispatch.attention": ("OperationImpl",),
    "dispatch.call": ("Call",),
    "dispatch.explain": ("Explanation", "explain"),
    "dispatch.limits": ("Limits",),
    "dispatch.metadata": ("OperationMetadata",),
    "dispatch.forwards": ("forward_for",),
    "dispatch.operation": ("API_VERSION", "BaseOperation"),
    "dispatch.options": ("AttentionOptions", "FlashOptions", "ScoreOptions"),
    "dispatch.rank": ("Rank", "RankBetween"),
    "dispatch.registry": ("OperationRegistry",),
    "dispatch.request": ("AttentionRequest", "Request"),
    "dispatch.source": ("Source", "SourceRequest", "SourceUse"),
    "errors": (
        "AmbiguousOperationError",
        "DuplicateOperationError",
        "NotDifferentiableError",
        "PluginError",
        "PluginWarning",
        "Reason",
        "UnknownOperationError",
        "UnsupportedError",
        "UnsupportedWarning",
    ),
    "functional": ("attention",),
    "models.dtypes": ("canonicalize_dtype",),
    "models.heads": ("repeat_kv_bnsh", "repeat_kv_bsnh", "repeat_kv_heads"),
    "models.remat": ("get_gradient_checkpoint_policy",),
    "output": ("OperationOutput",),
}
_HOME: Final = {name: f"attnops.{home}" for home, names in _HOMES.items() for name in names}
_MODULES: Final = (
    "biases",
    "dropout",
    "errors",
    "kernels",
    "masks",
    "models",
    "operations",
    "sharding",
    "softmax",
)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"attnops.{name}")
    else:
        raise AttributeError(f"module 'attnops' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
