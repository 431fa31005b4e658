"""Plans for tests that run no kernel."""

from __future__ import annotations

from typing import Any

from attnops.kernels import Scoring
from attnops_triton.flash.plan import FlashPlan, TileSizes

TILES = TileSizes(64, 32, 4, 2)


def make_plan(**fields: Any) -> FlashPlan:
    """A plan of 2 batches, 96 queries and keys, 4 query heads, 2 kv heads and head dims of 64."""
    defaults: dict[str, Any] = {
        "B": 2, "inner": 2, "T": 96, "S": 96, "H": 4, "K": 2, "D": 64, "Dv": 64, "forward": TILES, "by_query": TILES,
        "by_key": TILES, "by_score": TileSizes(32, 32, 4, 1), "dtype": "bfloat16", "is_partial": False, "scale": 0.125,
        "tf32": False, "scoring": Scoring(), "arch": "sm_90",
    }  # fmt: skip
    return FlashPlan(**defaults | fields)
