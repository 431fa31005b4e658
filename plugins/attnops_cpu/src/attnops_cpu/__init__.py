"""attnops-cpu: flash attention, decoding and linear attention in C++, for processors."""

from attnops_cpu._version import __version__
from attnops_cpu.flash.operation import CpuFlashAttention

__all__ = ["CpuFlashAttention", "__version__"]
