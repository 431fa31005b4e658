"""The plan of a call: tile sizes, and how arrays are laid out in tiles."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


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
    is repeated. Tiled arrays are [groups, tiles, L, rows, features].

    Attributes:
        B, T, S, H, K, D, Dv: the dimensions of the call.
        bq: queries a tile.
        bk: keys a tile.
        lanes: problems a group, a divisor of B · K.
        maps: batch and kv heads that the block map tells apart, each 1 or all.
        dtype: of the operands of products: bfloat16 for bfloat16 inputs, else float32.
        scale: the softmax scale.
        precision: of products.
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
    scale: float
    precision: Any

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
        return self.B * self.K // self.lanes

    @property
    def folded(self) -> float:
        """The part of the scale that the query is multiplied by: all of it in float32, a power of two in 16 bits,
        where any other would round.
        """
        if self.dtype == jnp.float32 or self.scale == 0:
            return self.scale
        return math.copysign(2.0 ** math.floor(math.log2(abs(self.scale))), self.scale)

    @property
    def rest(self) -> float:
        """What is left of the scale, in [1, 2)."""
        return 1.0 if self.folded == self.scale else self.scale / self.folded

    def map_of(self, group: Any) -> Any:
        """Which of the block maps, laid out as [batch, kv heads], a group goes by."""
        first = group * self.lanes
        b, k = first // self.K, first % self.K
        return (b if self.maps[0] > 1 else 0) * self.maps[1] + (k if self.maps[1] > 1 else 0)

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

    def tile_queries(self, x: jax.Array) -> jax.Array:
        """[B, T, H, d] to [groups, nq, L, R, d], zeros at the ragged end."""
        d = x.shape[-1]
        x = jnp.pad(x, ((0, 0), (0, self.nq * self.bq - self.T), (0, 0), (0, 0)))
        x = x.reshape(self.B, self.nq, self.bq, self.K, self.G, d).transpose(0, 3, 1, 4, 2, 5)
        return self._to_groups(x.reshape(self.B * self.K, self.nq, self.R, d))

    def untile_queries(self, x: jax.Array) -> jax.Array:
        """The inverse of `tile_queries`."""
        d = x.shape[-1]
        x = self._from_groups(x).reshape(self.B, self.K, self.nq, self.G, self.bq, d).transpose(0, 2, 4, 1, 3, 5)
        return x.reshape(self.B, self.nq * self.bq, self.H, d)[:, : self.T]

    def tile_keys(self, x: jax.Array) -> jax.Array:
        """[B, S, K, d] to [groups, nk, L, bk, d], zeros at the ragged end."""
        d = x.shape[-1]
        x = jnp.pad(x, ((0, 0), (0, self.nk * self.bk - self.S), (0, 0), (0, 0)))
        x = x.reshape(self.B, self.nk, self.bk, self.K, d).transpose(0, 3, 1, 2, 4)
        return self._to_groups(x.reshape(self.B * self.K, self.nk, self.bk, d))

    def untile_keys(self, x: jax.Array) -> jax.Array:
        """The inverse of `tile_keys`."""
        d = x.shape[-1]
        x = self._from_groups(x).reshape(self.B, self.K, self.nk, self.bk, d).transpose(0, 2, 3, 1, 4)
        return x.reshape(self.B, self.nk * self.bk, self.K, d)[:, : self.S]

    def tile_rows(self, x: jax.Array, fill: float) -> jax.Array:
        """[B, H, T] to [groups, nq, L, R], ``fill`` at the ragged end."""
        x = jnp.pad(x, ((0, 0), (0, 0), (0, self.nq * self.bq - self.T)), constant_values=fill)
        x = x.reshape(self.B, self.K, self.G, self.nq, self.bq).swapaxes(2, 3)
        return self._to_groups(x.reshape(self.B * self.K, self.nq, self.R))

    def untile_rows(self, x: jax.Array) -> jax.Array:
        """The inverse of `tile_rows`."""
        x = self._from_groups(x).reshape(self.B, self.K, self.nq, self.G, self.bq).swapaxes(2, 3)
        return x.reshape(self.B, self.H, self.nq * self.bq)[:, :, : self.T]

    def _to_groups(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.groups, self.lanes, *x.shape[1:]).swapaxes(1, 2)

    def _from_groups(self, x: jax.Array) -> jax.Array:
        x = x.swapaxes(1, 2)
        return x.reshape(-1, *x.shape[2:])

    def product(self, a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
        """[L, ·, ·] by [L, ·, ·], contracted over one axis of each, accumulated in float32."""
        dimensions = (((a_axis,), (b_axis,)), ((0,), (0,)))
        return lax.dot_general(a, b, dimensions, precision=self.precision, preferred_element_type=jnp.float32)
