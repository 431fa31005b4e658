"""The plan of a call, and the arrays that its kernels read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from attnops.typing import DType

# Keys per panel, the unit in which kernels skip and mask, and the bits of a word.
PANEL = 32
# Queries per tile of a kernel.
TILE = 96
# The limits of a band without limits.
LOWEST, HIGHEST = -(2**62), 2**62


@dataclasses.dataclass(frozen=True)
class CpuPlan:
    """Everything static about a call; hashable.

    Attributes:
        B, T, S, H, K, D, Dv: the dimensions of the call.
        block_q: queries per tile of the tile map.
        block_k: keys per tile of the tile map, a multiple of `PANEL`.
        dtype: the dtype of query, key and value, by name.
        is_partial: whether it is a partial softmax, over some of the keys, whose results are float32.
        scale: the softmax scale.
        cap: the soft cap; 0 for none.
        low: the least ``i - j`` at which query i sees key j.
        high: the largest ``i - j`` at which query i sees key j.
        table: whether the bias is a table by distance.
        dropout_prob: the probability of dropout.
        dropout_step: the factor by which dropout's hash multiplies the index of a key.
        max_logits: whether the forward pass returns the largest scores.
        in_place: whether the forward pass reads keys and values in place, and packs nothing.
    """

    B: int
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int
    block_q: int
    block_k: int
    dtype: str
    is_partial: bool
    scale: float
    cap: float
    low: int
    high: int
    table: bool
    dropout_prob: float
    dropout_step: int
    max_logits: bool
    in_place: bool

    @property
    def out_dtype(self) -> DType:
        """The dtype of the output and of the gradients."""
        return jnp.dtype(jnp.float32 if self.is_partial else self.dtype)


class Arrays(NamedTuple):
    """The inputs of scores other than query and key; None for an input that the call does not have.

    Attributes:
        sinks: [1, H] float32; under `jax.vmap` [B, H].
        bias: [B or 1, H or 1, T or 1, S or 1]; or a table by distance [1, H, T + S − 1], where element
            ``d + T − 1`` is for ``kv − q = d``.
        dropout: the hash of each query, uint32 [B, H, T].
    """

    sinks: jax.Array | None = None
    bias: jax.Array | None = None
    dropout: jax.Array | None = None


class TileMap(NamedTuple):
    """Which keys a query sees within the band; all fields are None if it sees all of them.

    Attributes:
        tiles: int32 [B or 1, H or 1, tiles of q, tiles of kv]: `EMPTY`, `FULL`, or the index of the tile's bits.
        bits: the bits of PARTIAL tiles, uint32 [B or 1, tiles, block_q, block_k / 32]; None with ids.
        q_ids: the segment of each query, int32 [B or 1, T].
        kv_ids: the segment of each key, int32 [B or 1, S].
    """

    tiles: jax.Array | None = None
    bits: jax.Array | None = None
    q_ids: jax.Array | None = None
    kv_ids: jax.Array | None = None


EMPTY, FULL = -2, -1
