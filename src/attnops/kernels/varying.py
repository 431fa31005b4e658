"""Over which axes of a mesh an array varies, for kernels; see `attnops.programs.varying`."""

from attnops.programs.varying import equally_varying

__all__ = ["equally_varying"]
