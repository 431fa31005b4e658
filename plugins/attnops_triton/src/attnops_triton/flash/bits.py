"""Masks that have no form in Triton, as bits: one a score, for the tiles that a kernel masks and for no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.kernels import of_mask
from attnops.masks import Mask
from attnops_triton.flash.plan import Plan, Tiles, cdiv
from attnops_triton.language.translate import PRIMITIVES

WORD = 32

# The bits of tiles, int32 [n, bq, words a query], of their batches, heads, tiles of queries and of keys, [n] each.
Pack: TypeAlias = Callable[[Any, Any, Any, Any], jax.Array]

# How many tiles are computed at a time: their booleans take bq · bk bytes each, before they are packed.
_TOGETHER = 64


def is_translatable(mask: Mask) -> bool:
    """Whether kernels can evaluate a bound mask by themselves."""
    try:
        return of_mask(mask)[0].primitives <= PRIMITIVES
    except Exception:
        # A function that works on arrays alone: it is not taken apart.
        return False


def told_apart(mask: Mask, plan: Plan) -> tuple[int, int]:
    """How many batches and heads a bound mask tells apart, each 1 or all."""
    try:
        axes = of_mask(mask)[0].axes
    except Exception:
        axes = frozenset("bh")
    return (plan.B if "b" in axes else 1), (plan.H if "h" in axes else 1)


def packer(mask: Mask, plan: Plan, tiles: Tiles) -> Pack:
    """What computes the bits of a bound mask."""

    def one(at: tuple[Any, ...]) -> jax.Array:
        b, h, q_tile, kv_tile = (x.reshape(1, 1, 1, 1) for x in at)
        # Beyond the ragged end stand the last ones: a function is asked about tokens that there are.
        q = jnp.minimum(q_tile * tiles.bq + np.arange(tiles.bq, dtype=np.int32)[:, None], plan.T - 1)
        kv = jnp.minimum(kv_tile * tiles.bk + np.arange(tiles.bk, dtype=np.int32), plan.S - 1)
        seen = jnp.broadcast_to(mask.allowed(b, h, q, kv), (1, 1, tiles.bq, tiles.bk))[0, 0]
        words = cdiv(tiles.bk, WORD)
        bits = seen.reshape(tiles.bq, words, -1).astype(jnp.uint32)
        packed = (bits << np.arange(bits.shape[2], dtype=np.uint32)).sum(axis=2, dtype=jnp.uint32)
        return lax.bitcast_convert_type(packed, jnp.int32)

    def pack(*at: Any) -> jax.Array:
        return lax.map(one, tuple(jnp.asarray(x, jnp.int32) for x in at), batch_size=_TOGETHER)

    return pack
