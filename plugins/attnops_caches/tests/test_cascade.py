"""Pages that rows share, attended to once: values against the oracle, which pages are shared, and when it is done."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_mutants import Mutant

from attnops import OperationMetadata, OperationRegistry, explain
from attnops.masks import Causal, SlidingWindow
from attnops_caches import Cache, PagedCache, PagePool, sharded
from attnops_caches.flash import attention, cascade
from attnops_testing import oracle
from attnops_testing.cache_codec import Codec
from attnops_testing.cache_features import PAGE, CacheSpec
from attnops_testing.cache_model import CacheModel
from attnops_testing.cache_problem import CacheProblem

FLASH = OperationRegistry.create("attnops:flash", OperationMetadata(on_unsupported="error", block_k=8))
SHARED = 5  # pages of the first and the last row of a problem: those that the first row's 21 tokens fill


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small rows share pages, and no program outlives its test."""
    monkeypatch.setattr(attention, "_compiled", attention._forward)
    monkeypatch.setattr(cascade, "_LEAST_SLOTS", 1)
    monkeypatch.setattr(cascade, "_LEAST_SAVED", 1)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The two parts compute the output, whatever they save, and whatever pages the mask hides."""
    computed: list[bool] = []
    shared_pages = cascade.shared_pages

    @functools.wraps(shared_pages)
    def of_all(table: Any, slots: Any, seen: Any) -> Any:
        return shared_pages(table, slots, seen | True)

    def in_parts(plan: Any, query: Any, saves: Any, results: Any, in_tiles: Any) -> Any:
        computed.append(True)
        return results()

    monkeypatch.setattr(cascade, "if_finite", in_parts)
    monkeypatch.setattr(cascade, "shared_pages", of_all)
    yield
    assert computed


class SharedProblem(CacheProblem):
    """A problem whose first and last row begin with the same tokens, in the same pages."""

    @functools.cached_property
    def table(self) -> tuple[tuple[int, ...], ...]:
        first, middle, last = super().table
        return first, middle, (*first[:SHARED], *last[SHARED:])

    @functools.cached_property
    def before(self) -> CacheModel:
        model = super().before
        model.rows[2][: SHARED * PAGE] = model.rows[0][: SHARED * PAGE]
        return model


QUICK = [
    CacheSpec(
        mask="Causal",
        T=4,
        kv_heads=2,
        bias="ALiBi",
        sinks=True,
        logits_soft_cap=2.0,
        return_lse=True,
        return_max_logits=True,
        step=True,
    ),
    CacheSpec(mask="window per batch", codec=Codec("int8", "token_head"), starts=True, sinks=True),
]
SPECS = [
    *(CacheSpec(mask=mask, T=T, return_lse=True) for mask, T in (
        (None, 1), ("Causal", 1), ("SlidingWindow", 4), ("window per head", 3), ("Chunked", 3), ("PrefixLM", 4),
        ("Segments", 4), ("Lengths", 1), ("KeyPadding", 3), ("Dense", 4), ("MaskFn", 3), ("mask & mask", 1),
        ("mask | mask", 3), ("~mask", 1), ("Ancestors", 4),
    )),
    *(CacheSpec(bias=bias, mask="Causal", T=4) for bias in ("ALiBi", "RelativePosition", "ScoreFn", "array bias")),
    *(CacheSpec(codec=codec, mask="Causal", T=3, kv_heads=1) for codec in (
        Codec("int8", "head"), Codec("float8_e4m3fn", "token_head"), Codec("int8", "tensor"),
    )),
    *(CacheSpec(content=content, mask="Causal", T=3) for content in ("Dv", "joined", "latent")),
    *(CacheSpec(dtype=dtype, mask="Causal", T=3, sinks=True) for dtype in ("bfloat16", "float16")),
    CacheSpec(T=4, kv_heads=2, rows="ragged", starts=True, mask="Causal", sinks=True, return_lse=True),
    CacheSpec(T=5, softmax_scale=-0.7, logits_soft_cap=3.0, mask="Causal"),
    CacheSpec(T=16, mask="SlidingWindow", return_lse=True),
]  # fmt: skip


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("spec", [*QUICK, *(pytest.param(spec, marks=pytest.mark.slow) for spec in SPECS)], ids=str)
@pytest.mark.tier(quick=[str(spec) for spec in QUICK], slow=[str(spec) for spec in SPECS], every=2)
def test_it_equals_the_oracle(spec: CacheSpec) -> None:
    SharedProblem(dataclasses.replace(spec, storage="paged")).check(FLASH)


@pytest.mark.usefixtures("always")
@pytest.mark.slow
def test_it_equals_the_oracle_outside_jit() -> None:
    problem = SharedProblem(dataclasses.replace(QUICK[0], storage="paged"))
    problem.check_output(*jax.tree.map(np.asarray, problem.program(FLASH)(*problem.arguments)[:2]))


MUTANTS = {
    "a page that one row has not counts as shared": Mutant(
        "flash.cascade:shared_pages", "& (table == table[leader])", "", ""
    ),
    "a row attends twice to shared pages": Mutant("flash.cascade:attend", "~shared.pages", "shared.pages | True", ""),
    "the first row is the leader": Mutant("flash.cascade:attend", "loader.table[shared.leader]", "loader.table[1]", ""),
    "sinks are counted twice": Mutant("flash.cascade:attend", "sinks=None", "sinks=arrays.sinks", ""),
    "masks are those of the first row": Mutant("flash.cascade:by_row", "b=jnp.minimum(row, rows - 1)", "b=0 * row", ""),
    "positions are those of the first query": Mutant("flash.cascade:by_row", "q=jnp.asarray(q)", "q=0 * row", ""),
}


@pytest.mark.usefixtures("always")
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name].apply(monkeypatch)
    with pytest.raises(AssertionError, match="attention_outputs"):
        SharedProblem(dataclasses.replace(QUICK[0], storage="paged")).check(FLASH)


# One program for tables and lengths of four rows, with pages of 4 slots.
B, H, K, D, M, PAGES = 4, 4, 2, 8, 6, 24
RNG = np.random.default_rng(0)
POOL = RNG.normal(size=(PAGES, K, 4, 2 * D)).astype(np.float32)
QUERY = RNG.normal(size=(B, 2, H, D)).astype(np.float32)
OWN = np.arange(PAGES).reshape(B, M)
TABLES = {
    "no page": (OWN, (24, 9, 3, 14), 0),
    "one page": (np.where(np.arange(M) < 1, 7, OWN), (24, 9, 4, 14), 2 * 4),
    "all pages": (np.tile(OWN[2], (B, 1)), (24, 24, 24, 24), 2 * 24),
    "of three rows": (np.where((np.arange(M) < 4) & (OWN >= M), 3 + np.arange(M), OWN), (24, 17, 16, 20), 16),
    "of two rows, fewer than save time": (np.where((np.arange(M) < 4) & (OWN >= 12), OWN[3], OWN), (24, 17, 16, 20), 0),
    "with rows that are shorter": (np.where(np.arange(M) < 4, OWN[3], OWN), (2, 17, 7, 18), 4 * (2 + 1)),
    "with an empty row": (np.where(OWN < M, -1, np.where(np.arange(M) < 3, 9, OWN)), (0, 13, 18, 12), 3 * 4),
    "of nothing": (np.full((B, M), -1), (0, 0, 0, 0), 0),
    "one page twice": (np.where(np.arange(M) < 2, 5, OWN), (24, 9, 8, 14), 2 * 8),
    "after pages of their own": (np.where((np.arange(M) > 1) & (np.arange(M) < 4), OWN[1], OWN), (24, 16, 16, 18), 16),
}


def cache_of(table: np.ndarray, lengths: Any, pool: np.ndarray = POOL) -> PagedCache:
    """NaN in the slots that no row has."""
    shapes = jax.eval_shape(lambda: PagedCache.create(
        batch=B, pages=PAGES, page_size=4, max_pages=M, kv_heads=K, head_dim=D, dtype=jnp.float32
    ))  # fmt: skip
    written = np.zeros((PAGES, 4), bool)
    for row, length in zip(table, lengths, strict=True):
        for i in range(length):
            written[row[i // 4], i % 4] = True
    cache = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    store = dataclasses.replace(cache.store, key=np.where(written[:, None, :, None], pool, np.float32(np.nan)))
    return dataclasses.replace(
        cache, store=store, lengths=np.array(lengths, np.int32), table=table.astype(np.int32)
    )  # fmt: skip


def exact(table: np.ndarray, lengths: Any, pool: np.ndarray = POOL) -> np.ndarray:
    tokens = pool[np.maximum(table, 0)].swapaxes(2, 3).reshape(B, M * 4, K, 2 * D)
    positions = np.array(lengths)[:, None] - 2 + np.arange(2)
    mask = (np.arange(M * 4) <= positions[..., None])[:, None]
    return oracle.attention(QUERY, tokens[..., :D], tokens[..., D:], mask=mask).out


def test_one_program_serves_all_tables() -> None:
    traces: list[bool] = []

    @jax.jit
    def run(cache: PagedCache) -> Any:
        traces.append(True)
        shared = cascade.shared_pages(cache.table, cache.slots(), jnp.array(True))
        return FLASH(QUERY, cache, mask=Causal()).attention_outputs, shared

    for name, (table, lengths, saved) in TABLES.items():
        out, shared = run(cache_of(table, lengths))
        assert int(shared.saved) == saved, name
        np.testing.assert_allclose(out, exact(table, lengths), atol=2e-6, err_msg=name)
    assert len(traces) == 1


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_reaches_no_row_that_does_not_see_it(value: float) -> None:
    table, lengths, _ = TABLES["with rows that are shorter"]
    pool = POOL.copy()
    pool[table[0, 1], :, 3, D:] = value  # of the rows' token 7, which the first row and the third have not
    attend = jax.jit(lambda cache: FLASH(QUERY, cache, mask=Causal()).attention_outputs)
    found = np.asarray(attend(cache_of(table, lengths, pool)))
    clean = exact(table, lengths)
    np.testing.assert_allclose(found[[0, 2]], clean[[0, 2]], atol=2e-6)
    assert not np.isfinite(found[[1, 3]]).any()


@pytest.mark.slow
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(5, 0)], ids=str)
def test_forks_equal_copies(mask: Any) -> None:
    """A prompt forked to all rows, which then append tokens of their own, one and three at a time."""

    def step(cache: Any, key: Any, value: Any, query: Any) -> Any:
        out, cache = FLASH.step(query, key, value, cache, mask=mask)
        return out.attention_outputs, cache

    prompt = RNG.normal(size=(2, B, 14, K, D)).astype(np.float32)
    prompt[:, 1:] = prompt[:, :1]
    empty = functools.partial(
        PagedCache.create, batch=B, pages=PAGES, page_size=4, max_pages=M, kv_heads=K, head_dim=D, dtype=jnp.float32
    )
    copies = empty(table=OWN).append(*prompt)
    pool = PagePool.create(pages=PAGES, page_size=4, rows=B, max_pages=M).reserve(np.array([14, 0, 0, 0]))
    shared = empty(table=pool.table).append(*prompt, lengths=np.array([14, 0, 0, 0]))
    pool, pages = pool.fork(np.zeros(3, np.int32), np.arange(1, 4, dtype=np.int32))
    shared = shared.fork(np.zeros(3, np.int32), np.arange(1, 4, dtype=np.int32), pool.table, pages)
    assert (np.asarray(shared.table)[:, :3] == np.asarray(shared.table)[0, :3]).all()
    length = 14
    for T in (1, 3, 1):
        length += T
        pool = pool.reserve(np.full(B, length))
        shared = shared.with_table(pool.table)
        tokens = [RNG.normal(size=(B, T, heads, D)).astype(np.float32) for heads in (K, K, H)]
        found, shared = jax.jit(step)(shared, *tokens)
        assert int(cascade.shared_pages(shared.table, shared.slots(), jnp.array(True)).saved) == 2 * 12
        wanted, copies = jax.jit(step)(copies, *tokens)
        np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.slow
@pytest.mark.optimised
def test_steps_in_a_scan_over_layers_copy_no_cache() -> None:
    layers, pages = 3, 64
    cache = PagedCache.create(
        batch=B, pages=pages, page_size=8, max_pages=16, kv_heads=K, head_dim=32, dtype=jnp.bfloat16, layers=layers,
        table=np.concatenate([np.tile(np.arange(12), (B, 1)), 12 + np.arange(4 * B).reshape(B, 4)], 1),
    )  # fmt: skip

    def steps(cache: Any, query: Any, key: Any, value: Any) -> Any:
        def block(pending: Any, layer: Any) -> Any:
            out, pending = FLASH.step(query, key, value, pending.layer(layer), mask=Causal())
            return pending, out.attention_outputs

        pending, out = jax.lax.scan(block, cache.pending(1), jnp.arange(layers))
        return pending.cache, out

    tokens = [jnp.ones((B, 1, heads, 32), jnp.bfloat16) for heads in (H, K, K)]
    memory = jax.jit(steps, donate_argnums=0).lower(cache, *tokens).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < cache.store.key[0].nbytes


@pytest.mark.slow
@pytest.mark.usefixtures("always")
def test_each_device_shares_the_pages_of_its_rows() -> None:
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    table, lengths = np.array([[0, 1, 2], [0, 1, 3], [4, 2, 5], [4, 2, 1]]), np.array([10, 12, 9, 11])
    tokens = RNG.normal(size=(2, B, 12, K, D)).astype(np.float32)
    tokens[:, 1, :8], tokens[:, 3, :8] = tokens[:, 0, :8], tokens[:, 2, :8]

    def create(table: Any = table) -> Cache:
        return PagedCache.create(
            batch=B, pages=PAGES, page_size=4, max_pages=3, kv_heads=K, head_dim=D, dtype=jnp.float32, table=table
        )

    def run(cache: Any) -> Any:
        return FLASH(QUERY[:, :1], cache.append(*tokens, lengths), mask=Causal()).attention_outputs

    with jax.set_mesh(mesh):
        found = jax.jit(run)(sharded(create, mesh))
    np.testing.assert_allclose(found, jax.jit(run)(create(np.arange(12).reshape(B, 3))), atol=2e-6)


def test_it_is_off_where_it_would_be_slower_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def reads(name: str, B: int, T: int, pages: int) -> str:
        op: Any = OperationRegistry.create(f"attnops:{name}", OperationMetadata(platform="cpu"))
        make = functools.partial(
            PagedCache.create, batch=B, pages=8, page_size=128, max_pages=pages, kv_heads=2, head_dim=8,
            dtype=jnp.float32,
        )  # fmt: skip
        requests: list[Any] = []
        jax.eval_shape(lambda: requests.append(op.request(jnp.ones((B, T, 2, 8)), make(), mask=Causal())))
        use = explain(requests[0], f"attnops:{name}", op.metadata).chosen.source_use
        assert use is not None
        return use.reads

    assert "pages that rows share once if it saves time" in reads("flash", 2, 1, 8)
    for B, T, pages, why in (
        (2, 17, 8, "query=17: must be at most 16"), (2, 1, 7, "cache.length=896: must be at least 1024"),
    ):  # fmt: skip
        assert f"pages that rows share are read by each: {why}" in reads("flash", B, T, pages)
    assert "share" not in reads("flash", 1, 1, 8)
    assert "share" not in reads("vanilla", 2, 1, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "saves"), [(Causal(), True), (SlidingWindow(2, 0), False)], ids=str)
def test_pages_that_no_row_sees_are_not_counted(mask: Any, saves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    monkeypatch.setattr(
        cascade, "if_finite", lambda plan, query, saves, *parts: found.append(bool(saves)) or parts[1]()
    )
    table, lengths = np.where(np.arange(M) < 3, OWN[3], OWN), (24, 20, 21, 22)
    FLASH(QUERY, jax.tree.map(jnp.asarray, cache_of(table, lengths)), mask=mask)
    assert found == [saves]
