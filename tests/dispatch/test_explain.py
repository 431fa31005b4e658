"""Only what declares that it computes attention is picked or listed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationImpl, OperationMetadata, OperationOutput, OperationRegistry, Rank, explain
from attnops.dispatch.platforms import PLATFORMS
from attnops_caches import CacheLimits, CacheReader, DenseCache, PagedCache, Quantized
from attnops_caches.calls.request import printed_bytes
from attnops_testing.oracle import attention


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ATTNOPS_NO_AUTOLOAD", "1")
    before = OperationRegistry._registered[:]
    OperationRegistry.refresh()
    yield
    OperationRegistry._registered[:] = before
    monkeypatch.undo()
    OperationRegistry.refresh()


def linear(**members: Any) -> type[OperationImpl]:
    """A linear attention: it takes what attention takes, and computes something else."""

    def forward(self: Any, query: Any, key: Any, value: Any) -> OperationOutput:
        return OperationOutput(jnp.einsum("bthd,bshd,bshe->bthe", query, key, value))

    body = {
        "get_impl_name": classmethod(lambda cls: "linear"),
        "rank": classmethod(lambda cls, request: Rank.EXCHANGES_KEYS),
        "forward_native": forward,
        "__module__": "acme.linear",
    }
    forwards = {f"forward_{platform}": forward for platform in members.pop("forwards", ())}
    return OperationRegistry.register(type("Linear", (OperationImpl,), body | forwards | members))


@pytest.mark.parametrize("forwards", [(), PLATFORMS])
def test_a_class_that_declares_nothing_is_not_picked_and_not_listed_on_any_platform(forwards: tuple[str, ...]) -> None:
    linear(forwards=forwards)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 5, 2, 8)), jnp.float32) for _ in range(3))
    request = OperationRegistry.create("auto").request(q, k, v)
    for platform in PLATFORMS:
        found = explain(request.replace(platform=platform))
        assert "acme:linear" not in {c.name for c in (found.chosen, *found.others)}
    out = OperationRegistry.create("auto", OperationMetadata(platform="cpu"))(q, k, v).attention_outputs
    np.testing.assert_allclose(out, attention(q, k, v).out, atol=1e-5)


def test_one_that_declares_it_is() -> None:
    linear(computes="attention")
    q = jnp.ones((1, 5, 2, 8))
    assert explain(OperationRegistry.create("auto").request(q, q, q)).chosen.name == "acme:linear"


def test_one_that_declares_nothing_is_explained_by_name() -> None:
    linear()
    q = jnp.ones((1, 5, 2, 8))
    found = explain(OperationRegistry.create("auto").request(q, q, q), "linear")
    assert (found.chosen.name, found.chosen.forward) == ("acme:linear", "native")
    assert "attnops:vanilla" in {c.name for c in found.others}


def test_a_subclass_of_a_core_operation_may_say_that_it_computes_something_else() -> None:
    vanilla = OperationRegistry.get("vanilla", "cpu")
    name = {"get_impl_name": classmethod(lambda cls: "mean"), "__module__": "acme.mean", "computes": None}
    OperationRegistry.register(type("Mean", (vanilla,), name))
    q = jnp.ones((1, 5, 2, 8))
    found = explain(OperationRegistry.create("auto").request(q, q, q))
    assert "acme:mean" not in {c.name for c in (found.chosen, *found.others)}


class PagesReader(CacheReader):
    limits = CacheLimits(storages={"PagedCache"}, codecs={"int8"})

    def attend(self, operation: Any, query: Any, cache: Any, *, mask: Any) -> OperationOutput:
        return OperationOutput(jnp.zeros_like(query))


@pytest.mark.slow
def test_a_class_that_declares_a_storage_reads_it_in_place() -> None:
    vanilla = OperationRegistry.get("vanilla", "cpu")
    name = {"get_impl_name": classmethod(lambda cls: "paged"), "__module__": "acme.paged"}
    cls = type("Paged", (vanilla,), name | {"readers": {"native": PagesReader()}})
    OperationRegistry.register(cls)
    sizes = {"batch": 1, "kv_heads": 2, "head_dim": 8, "dtype": jnp.float32}
    pages = {"pages": 4, "page_size": 8, "max_pages": 4, **sizes}
    q = jnp.ones((1, 1, 4, 8))

    def told(cache: Any, **options: Any) -> tuple[str, int]:
        request = OperationRegistry.create("paged").request(q, cache, **options)
        found = explain(request, "paged")
        use: Any = found.chosen.source_use
        assert f"\n  {use.reads}" in str(found)
        return use.reads, use.bytes_read

    in_place = "reads the cache in place (forward_native)", 0
    assert told(PagedCache.create(**pages)) == told(PagedCache.create(codec=Quantized("int8"), **pages)) == in_place
    through = "reads the cache into arrays by cache.read(), 4.1 kB a call: "  # 32 slots of 2 · (8 + 8) float32
    for cache, options, why in (
        (DenseCache.create(length=32, **sizes), {}, "cache=DenseCache: must be one of ['PagedCache']"),
        (PagedCache.create(codec=Quantized("float8_e5m2"), **pages), {}, "cache.codec=float8_e5m2: must be one of"),
        (PagedCache.create(**pages), {"return_lse": True}, "return_lse=given: PagesReader.attend has no such option"),
    ):
        reads, size = told(cache, **options)
        assert reads.startswith(through + why)
        assert size == 4096


def test_a_call_without_a_cache_tells_of_none() -> None:
    q = jnp.ones((1, 5, 2, 8))
    found = explain(OperationRegistry.create("auto").request(q, q, q))
    assert found.chosen.source_use is None
    assert "the cache" not in str(found)


def test_bytes_are_printed_in_decimal_units() -> None:
    sizes = [0, 999, 1000, 33_554_432, 2 * 10**9]
    assert [printed_bytes(x) for x in sizes] == ["0 bytes", "999 bytes", "1.0 kB", "33.6 MB", "2.0 GB"]
