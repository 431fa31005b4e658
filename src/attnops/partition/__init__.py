"""A call under a mesh: one `jax.shard_map` over batch and heads, masks and biases cut to match.

What an operation that cuts the sequence too needs, as `ring` of attnops-ring does, is listed here.
"""

from attnops.partition.boundary import Boundary
from attnops.partition.placing import mesh_of_types, own_entry, resharded, uncut
from attnops.partition.run import run_in_parts

__all__ = ["Boundary", "mesh_of_types", "own_entry", "resharded", "run_in_parts", "uncut"]
