"""Plans of calls over caches, for tests of one file of the kernel each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from attnops.kernels import Scoring
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.tile_sizes import Starts


@pytest.fixture
def cache_plan() -> Callable[..., CachePlan]:
    """Makes a plan, some of its fields given, of a small call over pages of 4 slots, in tiles of 4 pages."""
    float32 = np.dtype(np.float32)

    def plan(**fields: Any) -> CachePlan:
        return CachePlan(**{
            "B": 3, "T": 1, "S": 64, "H": 4, "K": 2, "D": 8, "Dv": 8, "width": 8, "bq": 1, "bk": 16, "chunk": 16,
            "masked_chunk": 16, "unit": 4, "is_packed": False, "keys_by_cache_row": False, "is_ring": False,
            "is_paged": True, "piece": 8, "buffers": 2, "starts": Starts.BEFORE, "transposed": False,
            "sublanes": 8, "cores": 1, "dtype": float32, "stored": float32, "packed": 1, "operand": float32,
            "out_dtype": float32, "scales": "", "is_latent": False, "is_joined": False,
            "precision": jax.lax.Precision.HIGHEST, "scale": 1.0, "scoring": Scoring(), "wants_lse": False,
            "interpret": True, "bounds_checks": False, "vmem": 1 << 20, **fields,
        })  # fmt: skip

    return plan
