"""How arrays and calls lie on a mesh: runtime modes and partition specs."""

from attnops.sharding.modes import (
    GENERATION_MODES,
    MODE_DECODE,
    MODE_INSERT,
    MODE_PREFILL,
    MODE_TRAIN,
    RUNTIME_MODE_TYPES,
    canonicalize_mode,
)
from attnops.sharding.specs import correct_spec, create_stable_sharding

__all__ = [
    "GENERATION_MODES",
    "MODE_DECODE",
    "MODE_INSERT",
    "MODE_PREFILL",
    "MODE_TRAIN",
    "RUNTIME_MODE_TYPES",
    "canonicalize_mode",
    "correct_spec",
    "create_stable_sharding",
]
