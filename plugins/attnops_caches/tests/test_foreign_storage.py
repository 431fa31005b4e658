"""A storage that is not ours passes the suite: through arrays, and in place by native `flash` with its own loader."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry, explain
from attnops.masks import Causal
from attnops_caches import Cache, PagedCache
from attnops_testing.cache_features import cache_rows, combine_cache
from attnops_testing.cache_problem import Foreign
from attnops_testing.caches import cache_name, check_cache
from attnops_testing.runner import Status, Subject

PATH = Path(__file__).parents[3] / "tests/third_party/acme-engine-pages/acme_engine_pages.py"
SPEC = importlib.util.spec_from_file_location("acme_engine_pages", PATH)
assert SPEC is not None
assert SPEC.loader is not None
acme: Any = importlib.util.module_from_spec(SPEC)
sys.modules["acme_engine_pages"] = acme
SPEC.loader.exec_module(acme)


def of_pages(cache: PagedCache) -> Cache:
    """The tokens of a `PagedCache`, [P, K, page, 2 · D], in the engine's layout."""
    both = np.asarray(cache.store.key).view(cache.store.layout.stored_dtype)
    pages, K, page, _ = both.shape
    apart = both.reshape(pages, K, page, 2, -1).transpose(0, 2, 1, 3, 4).reshape(pages, page, 2 * K, -1)
    rows = {name: getattr(cache, name) for name in ("lengths", "starts", "overflowed", "table")}
    found: Cache = acme.EnginePages(pages=apart, **rows)
    return found


def to_pages(cache: Any, like: PagedCache) -> PagedCache:
    """The inverse of `of_pages`."""
    apart = np.asarray(cache.pages)
    pages, page, heads, D = apart.shape
    both = apart.reshape(pages, page, heads // 2, 2 * D).swapaxes(1, 2)
    store = dataclasses.replace(like.store, key=np.ascontiguousarray(both).view(like.store.key.dtype))  # type: ignore[arg-type]
    return dataclasses.replace(like, store=store, lengths=cache.lengths, overflowed=cache.overflowed)


FOREIGN = Foreign(of_pages, to_pages)
# What such pages can hold: tokens as they are, of equal head dims and joined without zeros.
OTHERS = {"ring", "latent", "joined", "D ≠ Dv"}


def served() -> list[tuple[str, ...]]:
    """Rows of the suite's features over pages, without what the layout has no room for."""
    found = {}
    for row in cache_rows():
        names = [name for name in row if name not in OTHERS and " by " not in name]
        names = names if "paged" in names else [*names, "paged"]
        found[tuple(names)] = None
    return list(found)


@pytest.mark.parametrize("operation", ["attnops:vanilla", "attnops:flash"])
@pytest.mark.parametrize("row", served(), ids=cache_name)
@pytest.mark.slow
@pytest.mark.tier(every=3)
def test_another_storage_passes_the_suite(row: tuple[str, ...], operation: str) -> None:
    assert combine_cache(row).storage == "paged"
    outcome = check_cache(Subject(operation=operation), row, FOREIGN)
    assert outcome.status is Status.RIGHT, outcome


def pages(dtype: Any = jnp.float32) -> Any:
    cache = acme.EnginePages.create(batch=2, pages=6, page=4, max_pages=3, kv_heads=2, head_dim=8, dtype=dtype)
    return dataclasses.replace(cache, table=jnp.array([[4, 0, 2], [1, 3, -1]], jnp.int32))


@pytest.mark.slow
def test_flash_reads_it_in_place_with_its_loader_and_vanilla_through_arrays() -> None:
    query = jnp.ones((2, 1, 4, 8))
    for name, reads in (("flash", "reads the cache in place"), ("vanilla", "reads the cache into arrays")):
        op: Any = OperationRegistry.create(name, OperationMetadata(platform="cpu"))
        found = explain(op.request(query, pages(), mask=Causal()), name, op.metadata)
        assert found.chosen.source_use is not None
        assert found.chosen.source_use.reads.startswith(reads)


def test_without_a_loader_it_is_read_into_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(acme.EnginePages, "loader")
    op: Any = OperationRegistry.create("flash", OperationMetadata(platform="cpu"))
    request = op.request(jnp.ones((2, 1, 4, 8)), pages(), mask=Causal())
    use = explain(request, "flash", op.metadata).chosen.source_use
    assert "cache=EnginePages: has no loader of tiles; define its loader()" in str(getattr(use, "reads", ""))


def test_tokens_beyond_the_rows_pages_are_dropped_and_told() -> None:
    cache, new = pages(), jnp.ones((2, 9, 2, 8))
    cache = cache.append(new, new)
    assert np.asarray(cache.lengths).tolist() == [9, 8]
    assert np.asarray(cache.overflowed).tolist() == [False, True]


def test_a_storage_that_reads_another_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read = acme.EnginePages.read
    monkeypatch.setattr(acme.EnginePages, "read", lambda self: read(self)._replace(keys=read(self).keys[:, 1:]))
    op: Any = OperationRegistry.create("vanilla", OperationMetadata(platform="cpu"))
    with pytest.raises(ValueError, match=r"EnginePages.read\(\) returned keys of shape \(2, 11, 2, 8\), but its batch"):
        op(jnp.ones((2, 1, 4, 8)), pages(), mask=Causal())


def test_a_mesh_leaves_it_whole() -> None:
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    cache, new = pages(), jnp.ones((2, 3, 2, 8))
    op: Any = OperationRegistry.create("flash", OperationMetadata(platform="cpu"))
    on_mesh: Any = OperationRegistry.create("flash", OperationMetadata(platform="cpu", mesh=mesh))
    query = jax.random.normal(jax.random.key(0), (2, 3, 4, 8))
    expected, _ = op.step(query, new, new, cache, mask=Causal())
    found, _ = on_mesh.step(query, new, new, cache, mask=Causal())
    np.testing.assert_allclose(found.attention_outputs, expected.attention_outputs, rtol=1e-6)
