"""A call under a mesh: one `jax.shard_map` over batch and heads, with masks and biases sharded to match.

``__all__`` is for operations that also shard the sequence, such as `ring` of attnops-ring.
"""

from attnops.partition.boundary import Boundary
from attnops.partition.run import run_sharded
from attnops.sharding.placing import explicit_entry, mesh_of_types, resharded, unsharded

__all__ = ["Boundary", "explicit_entry", "mesh_of_types", "resharded", "run_sharded", "unsharded"]
