"""The plan of a call: tile sizes, and how arrays are laid out in tiles."""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.operations.flash.scoring import NativeScoring
from attnops.typing import DType

# An index, static or computed by a loop.
Index: TypeAlias = jax.Array | int


def quotient_and_remainder(n: Index, divisor: int) -> tuple[Index, Index]:
    """``n // divisor`` and ``n % divisor`` of indices that are not negative; with fewer operations than jnp's."""
    if isinstance(n, int):
        return divmod(n, divisor)
    if divisor == 1:
        return n, 0
    by = np.asarray(divisor, n.dtype)
    return lax.div(n, by), lax.rem(n, by)


class NativeTileIndex(NamedTuple):
    """Which scores a tile holds: indices that broadcast to its shape, [P, R, bk], or transposed [P, bk, R].

    Attributes:
        group: index of the group of problems.
        q_tile: index of the tile of queries.
        kv_tile: index of the tile of keys.
        transposed: whether keys come before queries.
        b: indices in the batch.
        h: indices of the query heads.
        q: indices of the queries; T and above beyond the ragged end.
        kv: indices of the keys; S and above beyond the ragged end.
    """

    group: Index
    q_tile: Index
    kv_tile: Index
    transposed: bool
    b: jax.Array
    h: jax.Array
    q: jax.Array
    kv: jax.Array


# With at most this many rows in a float32 tile, a product is faster with keys as its first operand.
_FEW_ROWS: Final = 16


@dataclasses.dataclass(frozen=True)
class NativePlan:
    """Everything static about a call; hashable.

    The B · K pairs of a batch and a kv head are independent problems. A group of ``problems_per_tile`` (P) of them is
    computed at a time, as one batched product. A tile of queries holds all G heads of a kv head, R = G · bq rows, so
    that no kv head is repeated. Tiles are [P, rows, features].

    Attributes:
        B, T, S, H, K, D, Dv: the dimensions of the call.
        bq: queries per tile.
        bk: keys per tile.
        problems_per_tile: problems per group; a divisor of K, or K times a divisor of B.
        map_shape: how many batches and kv heads the block map has, each 1 or all.
        dtype: the dtype of the operands of products: bfloat16 for bfloat16 inputs, else float32.
        is_partial: whether it is a partial softmax, over some of the keys, whose results are float32.
        precision: the precision of products.
        scoring: what changes scores.
        overlaps: whether the last tile of keys ends at S and so overlaps the tile before, for keys that can't be
            padded. Else it ends beyond S.
        max_logits: whether the forward pass returns the largest scores.
    """

    B: int
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int
    bq: int
    bk: int
    problems_per_tile: int
    map_shape: tuple[int, int]
    dtype: DType
    is_partial: bool
    precision: jax.lax.PrecisionLike
    scoring: NativeScoring = dataclasses.field(default_factory=NativeScoring)
    overlaps: bool = False
    max_logits: bool = False

    @property
    def G(self) -> int:
        """Query heads per kv head."""
        return self.H // self.K

    @property
    def R(self) -> int:
        """Rows of a tile of queries."""
        return self.G * self.bq

    @property
    def nq(self) -> int:
        """Tiles of queries."""
        return -(-self.T // self.bq)

    @property
    def nk(self) -> int:
        """Tiles of keys."""
        return -(-self.S // self.bk)

    @property
    def groups(self) -> int:
        """Groups of problems."""
        if self.problems_per_tile <= self.K:
            return self.B * (self.K // self.problems_per_tile)  # a symbolic B has no quotient
        return self.B * self.K // self.problems_per_tile

    def first_key(self, kv_tile: Index) -> Index:
        """The index of the first key of a tile."""
        first = kv_tile * self.bk
        return jnp.minimum(first, self.S - self.bk) if self.overlaps and self.S % self.bk else first

    def map_index(self, group: Index) -> Index:
        """The index of a group's block map in the maps [batch, kv heads]."""
        first = group * self.problems_per_tile
        b, k = quotient_and_remainder(first, self.K)
        return (b if self.map_shape[0] != 1 else 0) * self.map_shape[1] + (k if self.map_shape[1] > 1 else 0)

    def tile_index(self, group: Index, q_tile: Index, kv_tile: Index, transposed: bool) -> NativeTileIndex:
        """The indices of a tile."""
        problem, row, key = (np.arange(n, dtype=np.int32) for n in (self.problems_per_tile, self.R, self.bk))
        # A group begins with a batch's first kv head, or lies within a batch.
        batch, kv_head = quotient_and_remainder(group * self.problems_per_tile, self.K)
        b = jnp.asarray(batch + problem // self.K)[:, None, None]
        head = (kv_head + problem % self.K) * self.G
        h = jnp.asarray(head[:, None] + (row // self.bq)[None, :])  # [P, R]
        q = jnp.asarray(q_tile * self.bq + row % self.bq)[None, :]  # [1, R]
        kv = jnp.asarray(self.first_key(kv_tile) + key)[None, :]  # [1, bk]
        if transposed:
            return NativeTileIndex(group, q_tile, kv_tile, True, b, h[:, None, :], q[:, None, :], kv[:, :, None])
        return NativeTileIndex(group, q_tile, kv_tile, False, b, h[:, :, None], q[:, :, None], kv[:, None, :])

    def indices(self, *indices: Index) -> list[jax.Array]:
        """Indices as int32, since slicing needs one dtype: with x64 on, Python integers are wider than a loop's."""
        return [jnp.asarray(index, jnp.int32) for index in indices]

    def scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """[P, R, D] by [P, bk, D] to [P, R, bk], accumulated in float32."""
        if self.dtype == jnp.float32 and self.R <= _FEW_ROWS:
            return self.scores_of_keys(k, q.swapaxes(1, 2))
        return self.product(q, k, 2, 2)

    def scores_of_keys(self, k: jax.Array, q: jax.Array) -> jax.Array:
        """[P, keys, D] by [P, D, R] to [P, R, keys], in float32.

        With the larger operand first, XLA's CPU backend reads it at up to twice the rate. Without the barrier XLA would
        exchange them, to save the transpose of the result.
        """
        return lax.optimization_barrier(self.product(k, q, 2, 1)).swapaxes(1, 2)

    def product(self, a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
        """[P, ·, ·] by [P, ·, ·], contracted over one axis of each, accumulated in float32."""
        dimensions = (((a_axis,), (b_axis,)), ((0,), (0,)))
        if self.dtype == jnp.bfloat16:
            # Otherwise XLA folds an operand's transpose into the product, which its CPU backend lacks for bfloat16.
            a, b = lax.optimization_barrier((a, b))
        return lax.dot_general(a, b, dimensions, precision=self.precision, preferred_element_type=jnp.float32)
