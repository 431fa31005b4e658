"""`CacheCase`: a call over a cache that is measured, and the cache."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.masks import Causal, Mask
from attnops_caches import PagedCache, Rows, StoredCache, WindowCache
from attnops_testing.bench.cache_truth import CacheTruth
from attnops_testing.bench.case import Array, Refused
from attnops_testing.bench.machine import default_memory_limit
from attnops_testing.bench.program import Contender, Ready
from attnops_testing.bench.tokens import Tokens

# The number of tokens that are appended at a time.
_CHUNK: Final = 512


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CacheCase:
    """One call over a cache: the last tokens of each row attend to the row.

    Attributes:
        tokens: the tokens of each row.
        cache: an empty cache by shape, such as ``jax.eval_shape(lambda: DenseCache.create(...))``.
        mask: a mask by positions; None if queries see all tokens.
        packed: whether the queries of all rows are packed one after the other, with `attnops_caches.Rows`.
        memory_limit: bytes that a contender may use.

    Raises:
        ValueError: the tokens do not fit the cache.
    """

    tokens: Tokens
    cache: StoredCache
    mask: Mask | None = dataclasses.field(default_factory=Causal)
    packed: bool = False
    memory_limit: int = dataclasses.field(default_factory=default_memory_limit)

    def __post_init__(self) -> None:
        cache, tokens = self.cache, self.tokens
        for name in ("batch", "kv_heads", "head_dim", "value_head_dim"):
            if (size := getattr(cache, name)) != getattr(tokens, name):
                raise ValueError(f"the cache has {name}={size}, but the tokens have {getattr(tokens, name)}")
        if isinstance(cache, WindowCache):
            if cache.max_append < tokens.T:
                raise ValueError(f"queries={tokens.T} must be at most the cache's max_append={cache.max_append}")
        elif max(tokens.lengths) > cache.length:
            raise ValueError(f"used={max(tokens.lengths)} tokens do not fit in {cache.length} slots per row")
        if self.mask is not None:
            self._bound(self.mask)

    @property
    def length(self) -> int:
        """S, the slots of a row."""
        return self.cache.length

    @property
    def dtype(self) -> str:
        """The dtype of queries, keys and values."""
        return self.tokens.dtype

    @property
    def label(self) -> str:
        """The case in a few words."""
        return f"{self.dtype} S={self.length}"

    @functools.cached_property
    def truth(self) -> CacheTruth:
        """The oracle's results."""
        return CacheTruth(self.tokens, self.cache.codec, self.seen)

    def over(self, cache: StoredCache) -> CacheCase:
        """The same call over another cache; shares the oracle's results if they are the same."""
        other = dataclasses.replace(self, cache=cache)
        if cache.codec == self.cache.codec and not any(isinstance(x, WindowCache) for x in (cache, self.cache)):
            other.__dict__["truth"] = self.truth
        return other

    @functools.cached_property
    def filled(self) -> StoredCache:
        """The cache with the tokens of each row; pages lie in a random order."""
        _, keys, values = self.tokens.inputs
        cache = _empty(self)
        append = jax.jit(lambda cache, k, v, n: cache.append(k, v, n), donate_argnums=0)
        chunk = cache.max_append if isinstance(cache, WindowCache) else _CHUNK
        lengths = np.array(self.tokens.lengths)
        for first in range(0, max(lengths), chunk):
            part = slice(first, min(first + chunk, max(lengths)))
            counts = np.clip(lengths - first, 0, part.stop - first).astype(np.int32)
            value = None if self.tokens.latent is not None else jnp.asarray(values[:, part])
            cache = append(cache, jnp.asarray(keys[:, part]), value, counts)
        return cache

    @functools.cached_property
    def call(self) -> tuple[jax.Array, dict[str, Any]]:
        """The query, and ``rows`` or ``query_lengths``: [B, T, H, D], or packed [1, N, H, D]."""
        query, counts = self.tokens.inputs[0], self.tokens.queries
        if self.packed:
            packed = np.concatenate([row[:count] for row, count in zip(query, counts, strict=True)])[None]
            starts = np.cumsum([0, *counts]).astype(np.int32)
            rows = Rows(jnp.asarray(starts), jnp.arange(len(counts), dtype=jnp.int32))
            return jnp.asarray(packed), {"rows": rows}
        if len(set(counts)) == 1:
            return jnp.asarray(query), {}
        return jnp.asarray(query), {"query_lengths": jnp.asarray(counts, jnp.int32)}

    def unpacked(self, out: Array) -> Array:
        """An output of `call`, or [N, H, Dv] of all rows, as [B, T, H, Dv]; 0 where there is no query."""
        if not self.packed and out.ndim == 4:
            return out
        out = out.reshape(1, -1, *out.shape[-2:])
        spread = np.zeros((self.tokens.batch, self.tokens.T, *out.shape[2:]), out.dtype)
        first = 0
        for row, count in enumerate(self.tokens.queries):
            spread[row, :count] = out[0, first : first + count]
            first += count
        return spread

    def seen(self, row: int, queries: Array | None = None) -> Array:
        """The tokens of a row that some of its queries see, bool [H or 1, queries, tokens].

        Args:
            row: the row.
            queries: indices of queries; None for all.
        """
        length, count = self.tokens.lengths[row], self.tokens.queries[row]
        queries = np.arange(count) if queries is None else queries
        k = np.arange(length)[None, None, None, :]
        q = (length - count + queries)[None, None, :, None]
        visible = np.ones((1, 1, len(queries), length), bool)
        if self.mask is not None:
            heads = np.arange(self.tokens.heads)[None, :, None, None]
            visible = visible & np.asarray(self._bound(self.mask).allowed(np.full((1, 1, 1, 1), row), heads, q, k))
        if isinstance(self.cache, WindowCache):
            visible = visible & (k > q - self.cache.window)
        return visible[0]

    def _bound(self, mask: Mask) -> Mask:
        longest = max(self.tokens.lengths)
        return mask.bind(self.tokens.batch, self.tokens.heads, longest, longest)

    @functools.cached_property
    def tokens_seen(self) -> int:
        """The number of tokens of all rows that some query sees."""
        return sum(int(self.seen(row).any((0, 1)).sum()) for row in range(self.tokens.batch))

    @property
    def plain_bytes(self) -> int:
        """Bytes of the tokens that are seen, as they are in the arrays that peers attend to."""
        per_token = self.tokens.kv_heads * (self.tokens.head_dim + self.tokens.value_head_dim)
        return self.tokens_seen * per_token * int(jnp.dtype(self.dtype).itemsize)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tokens that are seen, as they are in the cache."""
        return self.tokens_seen * self.cache.bytes_per_token

    def check_memory(self, needed: int, what: str) -> None:
        """Raise `Refused` if more memory is needed than the limit."""
        if needed > self.memory_limit:
            raise Refused(f"{what} needs {needed / 1e9:.1f} GB, more than the limit of {self.memory_limit / 1e9:.1f}")

    def to_json(self) -> dict[str, object]:
        """The case's fields, for a program to read."""
        tokens, codec = self.tokens, self.cache.codec
        return {
            "cache": self.cache.storage,
            "codec": None if codec is None else str(codec),
            "page_size": self.cache.page_size if isinstance(self.cache, PagedCache) else None,
            "window": self.cache.window if isinstance(self.cache, WindowCache) else None,
            "length": self.length,
            "batch": tokens.batch,
            "used": tokens.lengths,
            "queries": tokens.queries,
            "packed": self.packed,
            "heads": tokens.heads,
            "kv_heads": tokens.kv_heads,
            "head_dim": tokens.head_dim,
            "latent": tokens.latent,
            "dtype": self.dtype,
            "mask": "" if self.mask is None else repr(self.mask),
            "tokens_seen": self.tokens_seen,
        }


def reading(plain: bool = False) -> Contender:
    """A contender that only reads the bytes of the tokens that queries see, once: it sums 32-bit words. It is not
    checked.

    Args:
        plain: whether it reads the arrays that peers attend to rather than the cache.
    """

    def prepare(case: Any) -> Ready:
        size = case.plain_bytes if plain else case.stored_bytes
        case.check_memory(size, "the array")
        x = jnp.ones((max(size // 4, 1),), jnp.float32)
        run = jax.jit(jnp.sum).lower(x).compile()
        return Ready(
            run=lambda: run(x), wait=jax.block_until_ready, results=None, what="the sum of as many bytes, as float32",
            bytes_seen=size,
        )  # fmt: skip

    return Contender("one read, plain" if plain else "one read", prepare)


def _empty(case: CacheCase) -> StoredCache:
    """The empty cache with arrays: scales of the tokens, and pages in a random order."""
    shapes, tokens = case.cache, case.tokens
    case.check_memory(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)), "the cache")
    cache: StoredCache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    if cache.codec is not None and cache.codec.scales != "token_head":
        scale = tokens.scale(cache.codec)
        scales: dict[str, Any] = {
            name: jnp.full_like(x, scale)
            for name in ("key_scale", "value_scale")
            if (x := getattr(cache.store, name)) is not None
        }
        cache = dataclasses.replace(cache, store=dataclasses.replace(cache.store, **scales))
    if isinstance(cache, PagedCache):
        order = np.random.default_rng(tokens.seed + 1).permutation(cache.pages)
        return cache.with_table(order[: cache.table.size].reshape(cache.table.shape).astype(np.int32))
    return cache
