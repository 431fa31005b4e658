"""attnops-tpu: flash attention in Pallas, for every TPU generation."""

from attnops_tpu._version import __version__
from attnops_tpu.flash.operation import TPUFlashAttention

__all__ = ["TPUFlashAttention", "__version__"]
