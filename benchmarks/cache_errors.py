"""Errors of caches in 4 bits: scales of keys by token and head, and by channel and group of tokens.

Run ``python benchmarks/cache_errors.py``. Keys and values are normal numbers, of which a few channels of the keys are
outliers, as in language models (arXiv:2402.02750): larger than the others, or far from 0. An error is the root of the
mean square; of keys and scores without the newest tokens, which `KiviCache` keeps as they are; of outputs with all.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from attnops import OperationMetadata, OperationRegistry
from attnops_caches import Cache, DenseCache, KiviCache, Quantized

SLOTS, KV_HEADS, HEAD_DIM, QUERIES, NEWEST = 1024, 8, 128, 64, 256
OUTLIERS = (3, 40, 77, 100)
# By name: what outlier channels are multiplied by, and what is added to them.
KEYS = {"none": (1.0, 0.0), "12 times as large": (12.0, 0.0), "3 times as large, around 12": (3.0, 12.0)}
CACHES: dict[str, dict[str, Any]] = {
    '`Quantized("int4")`': {"codec": Quantized("int4")},
    "`KiviCache`, `group=32`": {"group": 32},
    "`KiviCache`, `group=64`": {"group": 64},
    "`KiviCache`, `group=128`": {"group": 128},
}


def error(found: Any, wanted: Any) -> float:
    """The root of the mean square."""
    return float(np.sqrt(((np.asarray(found, np.float64) - wanted) ** 2).mean()))


def create(**options: Any) -> Cache:
    """An empty cache of one row."""
    storage: Any = KiviCache if "group" in options else DenseCache
    cache: Cache = storage.create(
        batch=1, length=SLOTS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=jnp.float32, **options
    )
    return cache


def bytes_per_token(cache: Any) -> float:
    """Bytes of key and value in all kv heads, without the newest keys of a `KiviCache`."""
    arrays = [cache.codes, cache.scales, cache.middles, *cache.values._blocks().values()] if isinstance(
        cache, KiviCache) else cache.store._blocks().values()  # fmt: skip
    return sum(x.nbytes for x in arrays) / SLOTS


def main() -> None:
    """Print a table."""
    op = OperationRegistry.create("flash", OperationMetadata(platform="cpu"))
    print("| outliers of keys | cache | bytes of a token | keys | scores | outputs |\n|---|---|--:|--:|--:|--:|")
    for keys, (factor, offset) in KEYS.items():
        rng = np.random.default_rng(0)
        key, value = rng.standard_normal((2, 1, SLOTS, KV_HEADS, HEAD_DIM), np.float32)
        key[..., OUTLIERS] = key[..., OUTLIERS] * factor + offset
        query = rng.standard_normal((1, QUERIES, KV_HEADS, HEAD_DIM), np.float32)
        wanted = np.asarray(op(query, jnp.asarray(key), jnp.asarray(value)).attention_outputs, np.float64)
        for name, options in CACHES.items():
            cache = create(**options).append(key, value)
            older, read = key[:, :-NEWEST], np.asarray(cache.read().keys)[:, :-NEWEST]
            scores, changed = (np.einsum("bqhd,bshd->bhqs", query, x) / np.sqrt(HEAD_DIM) for x in (older, read))
            errors = error(read, older), error(changed, scores), error(op(query, cache).attention_outputs, wanted)
            print(f"| {keys} | {name} | {bytes_per_token(cache):,.0f} |", *(f"{x:.3f} |" for x in errors))


if __name__ == "__main__":
    main()
