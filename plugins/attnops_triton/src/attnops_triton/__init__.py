"""attnops-triton: flash attention in Triton, for NVIDIA and AMD GPUs."""

from attnops_triton._version import __version__
from attnops_triton.flash.operation import TritonFlashAttention

__all__ = ["TritonFlashAttention", "__version__"]
