"""The plan of a call: tile sizes, and how arrays are laid out in tiles."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops.operations.flash.options import Options


class Where(NamedTuple):
    """Which scores a tile holds: indices that broadcast to its shape, [L, R, bk], or transposed [L, bk, R].

    Attributes:
        group: which group of lanes.
        q_tile: which tile of queries.
        kv_tile: which tile of keys.
        transposed: whether keys come before queries.
        b: index in the batch.
        h: index of the query head.
        q: index of the query; at the ragged end beyond the last.
        kv: index of the key; likewise.
    """

    group: Any
    q_tile: Any
    kv_tile: Any
    transposed: bool
    b: jax.Array
    h: jax.Array
    q: jax.Array
    kv: jax.Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about the shapes of a call.

    The B · K pairs of a batch and a kv head are independent problems; ``lanes`` (L) of them, a group, are computed at a
    time, as one batched product. A tile of queries holds all G heads of a kv head, R = G · bq rows, so that no kv head
    is repeated. Tiles are [L, rows, features].

    Attributes:
        B, T, S, H, K, D, Dv: the dimensions of the call.
        bq: queries a tile.
        bk: keys a tile.
        lanes: problems a group; a divisor of K, or K times a divisor of B.
        maps: batch and kv heads that the block map tells apart, each 1 or all.
        dtype: of the operands of products: bfloat16 for bfloat16 inputs, else float32.
        is_partial: whether the keys are some of a softmax's, so that results are float32, see `attnops.softmax`.
        precision: of products.
        options: what is done to scores.
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
    lanes: int
    maps: tuple[int, int]
    dtype: Any
    is_partial: bool
    precision: Any
    options: Options = dataclasses.field(default_factory=Options)

    @property
    def G(self) -> int:
        """Query heads a kv head."""
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
        """Groups of lanes."""
        if self.lanes <= self.K:
            return self.B * (self.K // self.lanes)  # a symbolic B has no quotient
        return self.B * self.K // self.lanes

    def map_of(self, group: Any) -> Any:
        """Which of the block maps, laid out as [batch, kv heads], a group goes by."""
        first = group * self.lanes
        b, k = first // self.K, first % self.K
        return (b if self.maps[0] != 1 else 0) * self.maps[1] + (k if self.maps[1] > 1 else 0)

    def where(self, group: Any, q_tile: Any, kv_tile: Any, transposed: bool) -> Where:
        """The indices of a tile."""
        n = group * self.lanes + jnp.arange(self.lanes, dtype=jnp.int32)
        row = jnp.arange(self.R, dtype=jnp.int32)
        b = (n // self.K)[:, None, None]
        h = (n % self.K)[:, None] * self.G + (row // self.bq)[None, :]  # [L, R]
        q = (q_tile * self.bq + row % self.bq)[None, :]  # [1, R]
        kv = (kv_tile * self.bk + jnp.arange(self.bk, dtype=jnp.int32))[None, :]  # [1, bk]
        if transposed:
            return Where(group, q_tile, kv_tile, True, b, h[:, None, :], q[:, None, :], kv[:, :, None])
        return Where(group, q_tile, kv_tile, False, b, h[:, :, None], q[:, :, None], kv[:, None, :])

    def indices(self, *indices: Any) -> list[jax.Array]:
        """Indices of one type, as slicing wants them; where x64 is on, Python's are wider than a loop's."""
        return [jnp.asarray(index, jnp.int32) for index in indices]

    def product(self, a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
        """[L, ·, ·] by [L, ·, ·], contracted over one axis of each, accumulated in float32."""
        dimensions = (((a_axis,), (b_axis,)), ((0,), (0,)))
        if self.dtype == jnp.bfloat16:
            # Else XLA folds an operand's transposition into the product, and its CPU backend has no such bfloat16 form.
            a, b = lax.optimization_barrier((a, b))
        return lax.dot_general(a, b, dimensions, precision=self.precision, preferred_element_type=jnp.float32)
