"""The mesh axes that arrays vary over, for kernels; see `attnops.programs.varying`."""

from attnops.programs.varying import equally_varying, varies

__all__ = ["equally_varying", "varies"]
