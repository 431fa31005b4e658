"""attnops: pluggable attention for JAX."""

from attnops._version import __version__
from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.explain import Explanation, explain
from attnops.dispatch.limits import Limits
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import API_VERSION, BaseOperation
from attnops.dispatch.output import OperationOutput
from attnops.dispatch.registry import OperationRegistry
from attnops.dispatch.request import AttentionRequest, Reason, Request
from attnops.errors import (
    AmbiguousOperationError,
    DuplicateOperationError,
    NotDifferentiableError,
    PluginError,
    PluginWarning,
    UnknownOperationError,
    UnsupportedError,
    UnsupportedWarning,
)
from attnops.models.dtypes import canonicalize_dtype
from attnops.models.heads import repeat_kv_bnsh, repeat_kv_bsnh, repeat_kv_heads
from attnops.models.remat import get_gradient_checkpoint_policy

__all__ = [
    "API_VERSION",
    "AmbiguousOperationError",
    "AttentionRequest",
    "BaseOperation",
    "DuplicateOperationError",
    "Explanation",
    "Limits",
    "NotDifferentiableError",
    "OperationImpl",
    "OperationMetadata",
    "OperationOutput",
    "OperationRegistry",
    "PluginError",
    "PluginWarning",
    "Reason",
    "Request",
    "UnknownOperationError",
    "UnsupportedError",
    "UnsupportedWarning",
    "__version__",
    "canonicalize_dtype",
    "explain",
    "get_gradient_checkpoint_policy",
    "repeat_kv_bnsh",
    "repeat_kv_bsnh",
    "repeat_kv_heads",
]
