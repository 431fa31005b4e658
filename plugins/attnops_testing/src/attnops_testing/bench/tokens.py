"""Random queries, and the tokens of each row that they attend to."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops_caches import Quantized
from attnops_caches.codec import LARGEST

Array = np.ndarray[Any, Any]
# The standard deviation of scores: a few tokens have most of the weight, so that the output depends on each of them.
_SPREAD = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """The tokens of B rows, of which the last ones are queries.

    Attributes:
        lengths: tokens of each row.
        queries: for each row, the number of its last tokens that are queries.
        slots: S of the arrays that peers attend to, at least the length of the longest row; None for that length.
        heads: H.
        kv_heads: K, a divisor of H.
        head_dim: D.
        latent: the value is this many features of the key; None for separate values, Dv = D.
        dtype: the dtype of queries, keys and values.
        seed: the seed of the numbers.

    Raises:
        ValueError: sizes that are not valid for attention.
    """

    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    slots: int | None = None
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    latent: int | None = None
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.queries) or not self.lengths:
            raise ValueError(f"lengths={self.lengths} and queries={self.queries} must have one number per row")
        for length, count in zip(self.lengths, self.queries, strict=True):
            if not 1 <= count <= length:
                raise ValueError(f"queries={count} must be from 1 to used={length}: queries are among a row's tokens")
        if self.slots is not None and self.slots < max(self.lengths):
            raise ValueError(f"used={max(self.lengths)} tokens do not fit in {self.slots} slots per row")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must be a divisor of heads={self.heads}")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype={self.dtype!r} is unknown; use float32, bfloat16 or float16")

    @property
    def batch(self) -> int:
        """B, the rows."""
        return len(self.lengths)

    @property
    def T(self) -> int:
        """The most queries per row."""
        return max(self.queries)

    @property
    def S(self) -> int:
        """Slots of the arrays."""
        return max(self.lengths) if self.slots is None else self.slots

    @property
    def value_head_dim(self) -> int:
        """Dv."""
        return self.head_dim if self.latent is None else self.latent

    @functools.cached_property
    def inputs(self) -> tuple[Array, Array, Array]:
        """Query [B, T, H, D], key [B, S, K, D] and value [B, S, K, Dv]; on a CPU the memory of `device_inputs`."""
        query, key, value = map(np.asarray, self.device_inputs)
        return query, key, value

    @functools.cached_property
    def device_inputs(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`inputs` on JAX's default device."""
        rng = np.random.default_rng(self.seed)
        dtype = jnp.dtype(self.dtype)
        query = jnp.asarray(_SPREAD * self._draw(rng, self.T, self.heads), dtype)
        key = jnp.asarray(self._draw(rng, self.S, self.kv_heads), dtype)
        if self.latent is not None:
            return query, key, key[..., : self.latent]
        return query, key, jnp.asarray(self._draw(rng, self.S, self.kv_heads), dtype)

    def _draw(self, rng: np.random.Generator, length: int, heads: int) -> Array:
        return rng.standard_normal((self.batch, length, heads, self.head_dim), np.float32)

    def scale(self, codec: Quantized) -> float:
        """One scale for all tokens, by which a codec represents the largest number; for codecs with given scales."""
        _, key, value = self.inputs
        largest = max(float(np.abs(x).max()) for x in (key, value))
        return largest / LARGEST[codec.dtype]

    def dequantised(self, codec: Quantized | None, row: int) -> tuple[Array, Array]:
        """Key [S, K, D] and value [S, K, Dv] of one row, quantised by the codec, if any, and dequantised; float32."""
        _, key, value = (x[row] for x in self.inputs)
        if codec is None:
            return key.astype(np.float32), value.astype(np.float32)
        key = _round_trip(codec, key, self)
        return key, key[..., : self.latent] if self.latent is not None else _round_trip(codec, value, self)

    @functools.cached_property
    def _plain(self) -> dict[Quantized | None, tuple[jax.Array, jax.Array, jax.Array]]:
        return {}

    def plain(self, codec: Quantized | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The arrays query, key and value for peers; with a codec, dequantised and rounded to the dtype."""
        if codec in self._plain:
            return self._plain[codec]
        query, key, value = self.device_inputs
        if codec is not None:
            rows = [self.dequantised(codec, row) for row in range(self.batch)]
            key, value = (jnp.asarray(np.stack(x), self.dtype) for x in zip(*rows, strict=True))
        self._plain[codec] = query, key, value
        return self._plain[codec]


def ragged(batch: int, used: int, queries: int, seed: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths and queries of rows that differ: the first row has ``used`` and ``queries``, the others random numbers.

    Raises:
        ValueError: there is only one row.
    """
    if batch < 2:
        raise ValueError(f"batch={batch} must be at least 2: one row has one length")
    rng = np.random.default_rng(seed)
    counts = [queries, *rng.integers(1, queries, batch - 1, endpoint=True).tolist()]
    lengths = [used, *(int(rng.integers(count, used, endpoint=True)) for count in counts[1:])]
    return tuple(lengths), tuple(counts)


def _round_trip(codec: Quantized, x: Array, tokens: Tokens) -> Array:
    """[S, K, d] encoded and decoded."""
    scale = None
    if codec.scales != "token_head":
        scale = jnp.full(() if codec.scales == "tensor" else (tokens.kv_heads,), tokens.scale(codec), jnp.float32)
    stored, scale = codec.encode(jnp.asarray(x).swapaxes(0, 1), scale)
    return np.asarray(codec.decode(stored, scale)).swapaxes(0, 1)
