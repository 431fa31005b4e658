"""The tile map of a mask, and the bits of its PARTIAL tiles, which XLA computes.

A mask that is a band needs neither. Kernels compare segments themselves. For any other mask they read a bit per score,
in PARTIAL tiles only. If the coverage is known when tracing, there are bits for these tiles alone, else for all tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.kernels import of_mask
from attnops.masks import Coverage, Mask, block_map
from attnops_cpu.flash.plan import EMPTY, FULL, PANEL, CpuPlan, TileMap

if TYPE_CHECKING:
    from attnops.typing import Array

# Tiles that are computed at a time, which bounds memory: before a tile is packed, a boolean needs a byte.
_BATCH: Final = 32


def tile_map(plan: CpuPlan, mask: Mask | None) -> TileMap:
    """The tile map of a bound mask: an integer per tile, and a bit per score of tiles that need them."""
    if mask is None:
        return TileMap()
    split = mask.split()
    if split.segments is None and split.rest is None:
        return TileMap()
    coverage = block_map(mask, (plan.B, plan.H, plan.T, plan.S), plan.block_q, plan.block_k).coverage
    if split.rest is None and split.segments is not None:
        ids = split.segments
        q_ids, kv_ids = (jnp.asarray(x).astype(jnp.int32) for x in (ids.q_ids, ids.kv_ids))
        return TileMap(_codes(coverage, jnp.zeros((), jnp.int32)), None, q_ids, kv_ids)
    leading = [max(sizes) for sizes in zip(coverage.shape, _varies(mask, plan), strict=False)]
    if isinstance(coverage, np.ndarray):
        return _known(plan, mask, np.broadcast_to(coverage, (*leading, *coverage.shape[2:])))
    coverage = jnp.broadcast_to(coverage, (*leading, *coverage.shape[2:]))
    batch, *each = coverage.shape
    slots = jnp.arange(np.prod(each), dtype=jnp.int32).reshape(1, *each)
    indices = np.indices(coverage.shape, np.int32).reshape(4, batch, -1)
    return TileMap(_codes(coverage, slots), _bits(plan, mask, indices))


def _codes(coverage: Array, slots: jax.Array) -> jax.Array:
    """The code of each tile that kernels read: `EMPTY`, `FULL`, or the index of its bits."""
    codes = jnp.where(jnp.asarray(coverage) == Coverage.FULL, FULL, slots)
    return jnp.where(jnp.asarray(coverage) == Coverage.EMPTY, EMPTY, codes).astype(jnp.int32)


def _known(plan: CpuPlan, mask: Mask, coverage: Array) -> TileMap:
    """The map of tiles whose coverage is known when tracing; only PARTIAL ones have bits."""
    tiles = np.where(coverage == Coverage.FULL, FULL, EMPTY).astype(np.int32)
    partial = [np.nonzero(each == Coverage.PARTIAL) for each in coverage]
    most = max(len(each[0]) for each in partial)
    if not most:
        return TileMap(jnp.asarray(tiles))
    indices = np.zeros((4, len(coverage), most), np.int32)
    for b, each in enumerate(partial):
        tiles[b][each] = np.arange(len(each[0]))
        indices[0, b] = b
        indices[1:, b, : len(each[0])] = each
    return TileMap(jnp.asarray(tiles), _bits(plan, mask, indices))


def _varies(mask: Mask, plan: CpuPlan) -> tuple[int, int]:
    """For how many batches and heads a bound mask has separate bits: each 1, or all."""
    try:
        axes = of_mask(mask)[0].axes
    except Exception:  # a function that can't be traced on scalars
        axes = frozenset("bh")
    return (plan.B if "b" in axes else 1), (plan.H if "h" in axes else 1)


def _bits(plan: CpuPlan, mask: Mask, indices: Array) -> jax.Array:
    """The bits of tiles, uint32 [B or 1, tiles, block_q, block_k / 32], from their indices (b, h, q tile, kv tile)."""
    block_q, block_k = plan.block_q, plan.block_k

    def of_tile(index: tuple[Array, ...]) -> jax.Array:
        b, h, q_tile, kv_tile = (x.reshape(1, 1, 1, 1) for x in index)
        # Indices beyond the last token are clamped to it, so that none is out of range.
        q = jnp.minimum(q_tile * block_q + np.arange(block_q, dtype=np.int32)[:, None], plan.T - 1)
        kv = jnp.minimum(kv_tile * block_k + np.arange(block_k, dtype=np.int32), plan.S - 1)
        seen = jnp.broadcast_to(mask.allowed(b, h, q, kv), (1, 1, block_q, block_k))
        words = seen.reshape(block_q, block_k // PANEL, PANEL).astype(jnp.uint32) << np.arange(PANEL, dtype=np.uint32)
        return words.sum(axis=2, dtype=jnp.uint32)

    _, batch, tiles = indices.shape
    flat = tuple(jnp.asarray(x.reshape(-1)) for x in indices)
    bits = lax.map(of_tile, flat, batch_size=min(_BATCH, batch * tiles))
    return bits.reshape(batch, tiles, *bits.shape[1:])
