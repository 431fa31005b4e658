"""How arrays and calls are sharded over a mesh: semantic axes, runtime modes, rules from axes to a mesh, and specs.

Names that only models written for eformer or EasyDeL need are in `attnops.sharding.compat`, and found here too.
"""

import importlib
from typing import Any

from attnops.sharding.axes import BATCH, HEAD, HEAD_DIM, KV_HEAD, KV_LENGTH, QUERY_LENGTH
from attnops.sharding.call import AttentionShardings
from attnops.sharding.mesh import create_mesh, current_mesh, get_names_from_partition_spec
from attnops.sharding.modes import MODE_DECODE, MODE_INSERT, MODE_PREFILL, MODE_TRAIN, canonicalize_mode
from attnops.sharding.rules import INHERIT, REPLICATE, AxisRules
from attnops.sharding.specs import correct_spec

__all__ = [
    "BATCH", "HEAD", "HEAD_DIM", "INHERIT", "KV_HEAD", "KV_LENGTH", "MODE_DECODE", "MODE_INSERT", "MODE_PREFILL",
    "MODE_TRAIN", "QUERY_LENGTH", "REPLICATE", "AttentionShardings", "AxisRules", "canonicalize_mode",
    "correct_spec", "create_mesh", "current_mesh", "get_names_from_partition_spec",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    compat = importlib.import_module("attnops.sharding.compat")
    if name in compat.__all__:
        return getattr(compat, name)
    raise AttributeError(f"module 'attnops.sharding' has no attribute {name!r}")
