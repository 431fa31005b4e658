"""tokamax's Mosaic kernel for Hopper and Blackwell as an operation of attnops: `MosaicAttention`, named ``mosaic``."""

from attnops_tokamax._version import __version__
from attnops_tokamax.operation import MosaicAttention

__all__ = ["MosaicAttention", "__version__"]
