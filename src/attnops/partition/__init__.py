"""A call under a mesh: one `jax.shard_map` over batch and heads, with masks and biases sharded to match.

Listed here is what operations that also shard the sequence use, such as `ring` of attnops-ring.
"""

from attnops.partition.boundary import Boundary
from attnops.partition.run import run_sharded
from attnops.sharding.placing import mesh_of_types, own_entry, resharded, uncut

__all__ = ["Boundary", "mesh_of_types", "own_entry", "resharded", "run_sharded", "uncut"]
