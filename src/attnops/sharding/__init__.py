"""How arrays and calls are sharded over a mesh: semantic axes, runtime modes, rules from axes to a mesh, and specs.

Models written for eformer or EasyDeL find their names for these in `attnops_adapters.eformer`.
"""

from attnops.sharding.axes import BATCH, HEAD, HEAD_DIM, KV_HEAD, KV_LENGTH, QUERY_LENGTH
from attnops.sharding.call import AttentionShardings
from attnops.sharding.mesh import create_mesh, current_mesh, get_names_from_partition_spec
from attnops.sharding.modes import (
    GENERATION_MODES,
    MODE_DECODE,
    MODE_INSERT,
    MODE_PREFILL,
    MODE_TRAIN,
    RUNTIME_MODE_TYPES,
    canonicalize_mode,
)
from attnops.sharding.rules import INHERIT, REPLICATE, AxisRules
from attnops.sharding.specs import correct_spec, create_stable_sharding

__all__ = [
    "BATCH", "GENERATION_MODES", "HEAD", "HEAD_DIM", "INHERIT", "KV_HEAD", "KV_LENGTH", "MODE_DECODE", "MODE_INSERT",
    "MODE_PREFILL", "MODE_TRAIN", "QUERY_LENGTH", "REPLICATE", "RUNTIME_MODE_TYPES", "AttentionShardings",
    "AxisRules", "canonicalize_mode", "correct_spec", "create_mesh", "create_stable_sharding", "current_mesh",
    "get_names_from_partition_spec",
]  # fmt: skip
