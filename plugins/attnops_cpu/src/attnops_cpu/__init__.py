"""attnops-cpu: flash attention and decoding in C++, for x86-64 and ARM processors."""

from attnops_cpu._version import __version__

__all__ = ["__version__"]
