"""attnops: pluggable attention for JAX."""

from attnops._version import __version__
from attnops.dtypes import canonicalize_dtype
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
from attnops.explain import Explanation, explain
from attnops.heads import repeat_kv_bnsh, repeat_kv_bsnh, repeat_kv_heads
from attnops.metadata import OperationMetadata
from attnops.operation import API_VERSION, BaseOperation, OperationImpl
from attnops.output import OperationOutput
from attnops.registry import OperationRegistry
from attnops.remat import get_gradient_checkpoint_policy
from attnops.request import AttentionRequest, Limits, Reason, Request

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
