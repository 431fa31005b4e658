"""attnops-splash: JAX's splash attention, a kernel for TPUs, as the operation ``splash``."""

from attnops_splash._version import __version__
from attnops_splash.operation import SplashAttention

__all__ = ["SplashAttention", "__version__"]
