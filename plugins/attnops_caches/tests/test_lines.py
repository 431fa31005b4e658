"""Lines: several tokens side by side in the array of keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import Cache, DenseCache, PagedCache, bytes_per_page
from attnops_caches.calls.reader import in_place_reasons


def paged(F: int, latent: int | None = None) -> Cache:
    return PagedCache.create(batch=1, pages=2, page_size=8, max_pages=2, kv_heads=2, head_dim=6, dtype=jnp.float32,
                             latent=latent, table=[[1, 0]], tokens_per_line=F)  # fmt: skip


def dense(F: int, latent: int | None = None) -> Cache:
    return DenseCache.create(batch=1, length=16, kv_heads=2, head_dim=6, dtype=jnp.float32, latent=latent,
                             tokens_per_line=F)  # fmt: skip


@pytest.mark.parametrize("make", [paged, dense])
@pytest.mark.parametrize("latent", [None, 4])
@pytest.mark.parametrize("F", [2, 4])
@pytest.mark.slow
@pytest.mark.tier(every=4)
def test_what_is_appended_in_pieces_is_read(make: object, latent: int | None, F: int) -> None:
    cache, plain = make(F, latent), make(1, latent)  # type: ignore[operator]
    first = 0
    for T in (1, 1, 5, 3, 4):
        key, value = jax.random.normal(jax.random.key(first), (2, 1, T, 2, 6))
        given = None if latent else value
        cache, plain = cache.append(key, given), plain.append(key, given)
        first += T
    assert cache.length == plain.length == 16
    for x, y in zip(cache.read()[:2], plain.read()[:2], strict=True):
        np.testing.assert_array_equal(x[:, :first], y[:, :first])


@pytest.mark.slow
def test_a_line_has_keys_and_then_values() -> None:
    key = jnp.arange(12.0).reshape(1, 2, 1, 6)
    cache = DenseCache.create(batch=1, length=2, kv_heads=1, head_dim=6, dtype=jnp.float32, tokens_per_line=2)
    line = cache.append(key, -key).store.key[0, 0]
    np.testing.assert_array_equal(line, [[*range(12), *(-x for x in range(12))]])


def test_lines_that_pages_do_not_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="the first must divide the second"):
        paged(3)
    with pytest.raises(ValueError, match="no zeros: leave width out"):
        DenseCache.create(batch=1, length=4, kv_heads=1, head_dim=6, tokens_per_line=2, width=16)
    with pytest.raises(ValueError, match="tokens_per_line=0"):
        dense(0)


def test_bytes_are_those_of_tokens() -> None:
    assert dense(2).bytes_per_token == 2 * 12 * 4
    sizes = {"page_size": 64, "kv_heads": 8, "head_dim": 80, "platform": "tpu"}
    assert bytes_per_page(**sizes, tokens_per_line=4) == 8 * 64 * 160 * 2  # type: ignore[arg-type]
    assert bytes_per_page(**sizes) == 8 * 64 * 256 * 2  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_a_kernel_does_not_declare_is_not_read_in_place() -> None:
    operation = OperationRegistry.create("vanilla", OperationMetadata())
    query = jnp.ones((1, 1, 2, 6))
    reasons = in_place_reasons(operation, "cpu", operation.request(query, paged(2), mask=Causal()))
    assert reasons
