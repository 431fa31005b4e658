"""Bytes that the TPU and the GPU kernel over caches read where rows share a prefix, counted in their interpreters.

Run ``python benchmarks/shared_prefix_bytes.py tpu`` or ``gpu``; needs the distribution of the platform, and no
accelerator. One causal token of each row, in one call, as `flash` computes it there; and in two calls of the same
kernel, whose partial softmaxes are merged: the queries of all rows over the prefix, and each row over its own tokens.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops.softmax import PartialSoftmax, merge
from attnops_caches import PagedCache

ROWS, PREFIX, OWN, PAGE, KV_HEADS, GROUPS, HEAD_DIM = 8, 512, 128, 16, 2, 4, 128
HEADS = KV_HEADS * GROUPS


def forked() -> PagedCache:
    """Rows with the pages of a prefix, and pages of their own."""
    rng, shared, own = np.random.default_rng(0), PREFIX // PAGE, OWN // PAGE
    table = np.broadcast_to(np.arange(shared), (ROWS, shared))
    table = np.concatenate([table, shared + np.arange(ROWS * own).reshape(ROWS, own)], axis=1)
    cache = PagedCache.create(
        batch=ROWS, pages=int(table.max()) + 1, page_size=PAGE, max_pages=shared + own, kv_heads=KV_HEADS,
        head_dim=HEAD_DIM, dtype=jnp.float32, table=table,
    )  # fmt: skip
    key = jnp.asarray(rng.standard_normal(cache.store.key.shape, np.float32))
    lengths = jnp.asarray(PREFIX + rng.integers(16, OWN + 1, ROWS), jnp.int32)
    return dataclasses.replace(cache, store=dataclasses.replace(cache.store, key=key), lengths=lengths)


def in_one_call(op: Any, query: jax.Array, cache: PagedCache) -> jax.Array:
    """What `flash` computes."""
    out: jax.Array = op(query, cache, mask=Causal()).attention_outputs
    return out


def in_two_calls(op: Any, query: jax.Array, cache: PagedCache) -> jax.Array:
    """The prefix once for all rows, and each row's own tokens."""
    first = {name: getattr(cache, name)[:1] for name in ("table", "starts", "overflowed")}
    prefix: Any = dataclasses.replace(cache, **first, lengths=jnp.full((1,), PREFIX, jnp.int32))
    own = dataclasses.replace(cache, starts=cache.starts + PREFIX)
    a = op(query.reshape(1, ROWS, HEADS, HEAD_DIM), prefix, return_lse=True)
    b = op(query, own, mask=Causal(), return_lse=True)
    lse, none = a.logsumexp.reshape(HEADS, ROWS, 1).swapaxes(0, 1), jnp.zeros((ROWS, HEADS, 1))
    together = PartialSoftmax(a.attention_outputs.reshape(query.shape), lse, none)
    return merge(together, PartialSoftmax(b.attention_outputs, b.logsumexp, none)).out


def tpu(run: Callable[[Any], jax.Array]) -> tuple[jax.Array, int]:
    """The output, and the bytes of all transfers from main memory and to it, with v6e's tiles."""
    from tpu_decode_bytes import recorded

    out, sizes = recorded(run, "v6e")
    return out, sum(sizes)


def gpu(run: Callable[[Any], jax.Array]) -> tuple[jax.Array, int]:
    """The output, and the bytes of the sectors that the kernel loads."""
    from attnops_triton.language.interpreter import loads

    metadata = OperationMetadata(platform="cuda", interpret=True, on_unsupported="error")
    op = OperationRegistry.create("attnops-triton:flash", metadata)
    with loads() as found:
        out = jax.block_until_ready(run(op))
    moved = (len(np.unique(x.first // 32)) * 32 if x.first.size > 1 else x.size
             for name, x in found if name == "attnops_ragged")  # fmt: skip
    return out, sum(moved)


def main() -> None:
    """Count, compare the outputs, and print."""
    counted = {"tpu": tpu, "gpu": gpu}[sys.argv[1]]
    cache = forked()
    query = jnp.asarray(np.random.default_rng(1).standard_normal((ROWS, 1, HEADS, HEAD_DIM), np.float32))
    one, moved = counted(lambda op: jax.jit(lambda q, c: in_one_call(op, q, c))(query, cache))
    two, fewer = counted(lambda op: jax.jit(lambda q, c: in_two_calls(op, q, c))(query, cache))
    np.testing.assert_allclose(two, one, atol=2e-6)
    total = int(cache.lengths.sum())
    least = total * cache.bytes_per_token, (total - (ROWS - 1) * PREFIX) * cache.bytes_per_token
    print(f"{ROWS} rows, prefix {PREFIX}, {total - ROWS * PREFIX} other tokens: {moved:,} bytes (least {least[0]:,}), "
          f"in two calls {fewer:,} (least {least[1]:,}): {moved / fewer:.2f} times fewer")  # fmt: skip


if __name__ == "__main__":
    main()
