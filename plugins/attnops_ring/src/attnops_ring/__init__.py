"""attnops-ring: attention over sequences that are sharded over a mesh, by any operation that serves one device."""

from attnops_ring._version import __version__
from attnops_ring.operation import RingAttention
from attnops_ring.orders import positions, reorder, restore

__all__ = ["RingAttention", "__version__", "positions", "reorder", "restore"]
