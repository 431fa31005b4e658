"""Bit masks, for masks that have no translation to Triton: one bit for each score of a PARTIAL tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.kernels import of_mask
from attnops.masks import Mask
from attnops_triton.flash.plan import FlashPlan, TileSizes, cdiv
from attnops_triton.language.translate import PRIMITIVES

if TYPE_CHECKING:
    from attnops.typing import Array

# Bits per word.
WORD = 32

# Computes the bits of n tiles, int32 [n, bq, words per query], from the indices of their batches, heads, tiles of
# queries and tiles of keys, [n] each.
BitsFunction: TypeAlias = Callable[[Any, Any, Any, Any], jax.Array]

# Tiles that are computed at a time. It bounds memory: before a tile is packed, it is an array of bq · bk booleans.
_BATCH = 64


def is_translatable(mask: Mask) -> bool:
    """Whether kernels can evaluate a bound mask, so that it needs no bits."""
    try:
        return of_mask(mask)[0].primitives <= PRIMITIVES
    except Exception:
        # A function that can't be traced on scalars.
        return False


def bits_map_shape(mask: Mask, plan: FlashPlan) -> tuple[int, int]:
    """The numbers of batches and heads for which a bound mask has its own bits: each 1 or all."""
    try:
        axes = of_mask(mask)[0].axes
    except Exception:
        axes = frozenset("bh")
    return (plan.B if "b" in axes else 1), (plan.H if "h" in axes else 1)


def bits_function(mask: Mask, plan: FlashPlan, tiles: TileSizes) -> BitsFunction:
    """The function that computes the bits of a bound mask's tiles."""

    def bits_of_tile(indices: tuple[Array, ...]) -> jax.Array:
        b, h, q_tile, kv_tile = (x.reshape(1, 1, 1, 1) for x in indices)
        # Tokens beyond the last one have its index, so that no index is out of range.
        q = jnp.minimum(q_tile * tiles.bq + np.arange(tiles.bq, dtype=np.int32)[:, None], plan.T - 1)
        kv = jnp.minimum(kv_tile * tiles.bk + np.arange(tiles.bk, dtype=np.int32), plan.S - 1)
        seen = jnp.broadcast_to(mask.allowed(b, h, q, kv), (1, 1, tiles.bq, tiles.bk))[0, 0]
        words = cdiv(tiles.bk, WORD)
        bits = seen.reshape(tiles.bq, words, -1).astype(jnp.uint32)
        packed_words = (bits << np.arange(bits.shape[2], dtype=np.uint32)).sum(axis=2, dtype=jnp.uint32)
        return lax.bitcast_convert_type(packed_words, jnp.int32)

    def bits_of(*indices: Array) -> jax.Array:
        return lax.map(bits_of_tile, tuple(jnp.asarray(x, jnp.int32) for x in indices), batch_size=_BATCH)

    return bits_of
