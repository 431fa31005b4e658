"""Rows that move from one cache to another: the same bits, and what is flagged or refused."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import transfer
from jax.sharding import AxisType

from attnops import OperationMetadata, OperationRegistry, UnsupportedError
from attnops.masks import Causal
from attnops_caches import CacheRows, DenseCache, KiviCache, PagedCache, PagePool, Quantized, WindowCache, sharded

B, K, D = 3, 2, 8
RNG = np.random.default_rng(0)
TABLE = np.array([[5, 1, 7, 2], [0, 3, 6, 4], [9, 8, 11, 10]])
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": jnp.bfloat16, "width": 20},
    "int8": {"codec": Quantized("int8")},
    "int4": {"codec": Quantized("int4"), "value_head_dim": 4},
    "float8": {"codec": Quantized("float8_e4m3fn"), "dtype": jnp.bfloat16},
    "by head": {"codec": Quantized("float8_e5m2", "head"), "key_scale": [0.1, 0.2], "value_scale": [0.3, 0.1]},
    "by tensor": {"codec": Quantized("int8", "tensor"), "key_scale": 0.1, "value_scale": 0.2},
    "latent": {"kv_heads": 1, "latent": 4, "codec": Quantized("int8")},
    "layers": {"layers": 2, "codec": Quantized("int8")},
}
STORAGES = "dense", "ring", "pages", "small pages"
slow = pytest.mark.slow


def create(storage: str, **tokens: Any) -> Any:
    sizes: dict[str, Any] = {"batch": B, "kv_heads": K, "head_dim": D, "dtype": jnp.float32, "starts": [0, 2, 1]}
    sizes |= tokens
    if storage == "dense":
        return DenseCache.create(length=12, **sizes)
    if storage == "ring":
        return WindowCache.create(window=5, max_append=7, **sizes)
    page = 4 if storage == "pages" else 3
    return PagedCache.create(pages=12, page_size=page, max_pages=4, table=TABLE, **sizes)


def appended(cache: Any, T: int, counts: Any = None) -> Any:
    @jax.jit
    def run(cache: Any, keys: Any, values: Any) -> Any:
        pending = cache.pending(T, counts)
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            pending = (pending if cache.layers is None else pending.layer(i)).write(key, value)
        return pending.cache

    keys, values = (
        [
            jnp.asarray(RNG.normal(size=(cache.batch, T, cache.kv_heads, d)), cache.dtype)
            for _ in range(cache.layers or 1)
        ]
        for d in (cache.head_dim, cache.value_head_dim)
    )
    return run(cache, keys, [None] * len(values) if cache.is_latent else values)


@jax.jit
def contents(cache: Any) -> Any:
    """What `read` returns, of every layer."""
    return [cache.read()] if cache.layers is None else [cache.layer(i).read() for i in range(cache.layers)]


def tokens(cache: Any, row: int) -> list[np.ndarray]:
    """Keys, values and positions of a row's tokens in their order, of each layer."""
    layers: list[np.ndarray] = []
    for found in contents(cache):
        keys, values, positions, held = (np.asarray(x)[row] for x in found)
        index = np.argsort(positions)
        layers += [x[index[held[index]]] for x in (keys, values, positions)]
    return layers


def check_same(moved: Any, row: int, source: Any, of: int) -> None:
    for x, y in zip(tokens(moved, row), tokens(source, of), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.asarray(moved.overflowed)[..., row].any()


take = jax.jit(lambda cache, rows: cache.take(rows))
put = jax.jit(lambda cache, rows, taken: cache.put(rows, taken))


@slow
@pytest.mark.parametrize(
    ("case", "source", "target"),
    [x for i, x in enumerate(itertools.product(CASES, STORAGES, STORAGES)) if i % 11 == 0],
)
@pytest.mark.tier(every=2)
def test_moved_rows_have_the_same_tokens(case: str, source: str, target: str) -> None:
    given = appended(create(source, **CASES[case]), 7, np.array([7, 4, 6], np.int32))
    before = appended(create(target, **CASES[case]), 3)
    taken = take(given, jnp.array([2, 0, -1]))
    again = CacheRows.from_bytes(taken.to_bytes())
    assert again.length == 7 < taken.length
    np.testing.assert_array_equal(again.digest, again.hashed())
    np.testing.assert_array_equal(again.digest, taken.digest)
    moved = put(before, jnp.array([0, 2, -1]), again)
    check_same(moved, 0, given, 2)
    check_same(moved, 2, given, 0)
    check_same(moved, 1, before, 1)


@slow
def test_a_step_over_moved_rows_is_that_of_the_source() -> None:
    op: Any = OperationRegistry.create("flash", OperationMetadata())
    source = appended(create("dense", codec=Quantized("int8")), 7)
    moved = put(
        create("small pages", codec=Quantized("int8")), jnp.array([1, 2, 0]), take(source, jnp.array([0, 1, 2]))
    )
    order = np.array([2, 0, 1])
    q, k, v = (jnp.asarray(RNG.normal(size=(B, 1, n, D)), jnp.float32) for n in (2 * K, K, K))
    step = jax.jit(lambda q, k, v, cache: op.step(q, k, v, cache, mask=Causal())[0].attention_outputs)
    np.testing.assert_allclose(
        step(q[order], k[order], v[order], moved), step(q, k, v, source)[order], atol=2e-6, rtol=1e-5
    )


@slow
def test_rows_for_which_the_pool_has_no_page_are_flagged() -> None:
    source = appended(create("dense"), 8)
    pool = PagePool.create(pages=5, page_size=3, rows=B, max_pages=4)
    cache = PagedCache.create(batch=B, pages=5, page_size=3, max_pages=4, kv_heads=K, head_dim=D, dtype=jnp.float32)

    @jax.jit
    def move(cache: Any, pool: PagePool, source: Any) -> Any:
        taken = source.take([0, 1])
        pool = pool.reserve(jnp.zeros(B, jnp.int32).at[jnp.array([2, 0])].set(taken.lengths))
        return pool, cache.with_table(pool.table).put([2, 0], taken)

    pool, moved = move(cache, pool, source)
    assert pool.ok.tolist() == [True, True, False]  # row 0 comes first
    assert moved.overflowed.tolist() == [False, False, True]
    assert moved.lengths.tolist() == [8, 0, 0]
    check_same(moved, 0, source, 1)


@slow
def test_forked_rows_are_taken_whole_and_never_written_through() -> None:
    pool = PagePool.create(pages=12, page_size=4, rows=B, max_pages=4).reserve(np.array([9, 0, 0]))
    sizes: Any = {"batch": B, "pages": 12, "page_size": 4, "max_pages": 4, "kv_heads": K, "head_dim": D}
    cache = PagedCache.create(**sizes, dtype=jnp.float32, table=pool.table)
    cache = appended(cache, 9, np.array([9, 0, 0], np.int32))
    pool, copies = pool.fork([0], [1])
    cache = cache.fork([0], [1], pool.table, copies)
    assert (pool.table[0, :2] == pool.table[1, :2]).all()
    taken = take(cache, jnp.array([1, 0]))
    moved = put(create("dense", starts=None), jnp.array([0, 1]), taken)
    check_same(moved, 0, cache, 0)
    check_same(moved, 1, cache, 0)
    # Its full pages are row 0's too: what is put there would be row 0's tokens.
    other = take(appended(create("dense", starts=None), 9), jnp.array([0]))
    onto = put(cache, jnp.array([1]), other)
    assert onto.overflowed.tolist() == [False, True, False]
    assert onto.lengths.tolist() == [9, 0, 0]
    check_same(onto, 0, cache, 0)
    pool = pool.release(np.array([False, True, False])).reserve(np.array([0, 9, 0]))
    check_same(put(cache.with_table(pool.table), jnp.array([1]), other), 0, cache, 0)


@slow
def test_rings_keep_what_their_queries_see() -> None:
    ring = create("ring", starts=None)
    for _ in range(3):
        ring = appended(ring, 6)  # 18 tokens in 11 slots
    taken = take(ring, jnp.array([0]))
    assert taken.first.tolist() == [7]
    assert taken.positions.max() == 17
    assert put(create("dense", starts=None), jnp.array([1]), taken).overflowed.tolist() == [False, True, False]
    wide = WindowCache.create(batch=B, window=9, max_append=6, kv_heads=K, head_dim=D, dtype=jnp.float32)
    check_same(put(wide, jnp.array([1]), taken), 1, ring, 0)  # 10 of the 11 tokens were still there
    wider = WindowCache.create(batch=B, window=14, max_append=6, kv_heads=K, head_dim=D, dtype=jnp.float32)
    assert put(wider, jnp.array([1]), taken).overflowed.tolist() == [False, True, False]
    shorter = ring.truncate([14, 18, 18])
    moved = put(create("ring", starts=None), jnp.array([2]), take(shorter, jnp.array([0])))
    check_same(moved, 2, shorter, 0)
    key = value = jnp.ones((B, 3, K, D))
    for x, y in zip(tokens(moved.append(key, value), 2), tokens(shorter.append(key, value), 0), strict=True):
        np.testing.assert_array_equal(x, y)


@slow
def test_what_is_damaged_too_long_or_no_row_is_flagged() -> None:
    source, target = appended(create("dense"), 7), create("pages")
    taken = take(source, jnp.array([0, 1, 2]))
    key = taken.tokens["key"].at[1, 0, 3, 2].add(1e-6)
    moved = put(target, jnp.array([0, 1, 2]), dataclasses.replace(taken, tokens=taken.tokens | {"key": key}))
    assert moved.overflowed.tolist() == [False, True, False]
    assert moved.lengths.tolist() == [7, 0, 7]
    swapped = dataclasses.replace(taken, starts=taken.starts[::-1])
    assert put(target, jnp.array([0, 1, 2]), swapped).overflowed.tolist() == [True, False, True]
    short = jax.jit(lambda cache, rows: cache.take(rows, 6))(source, jnp.array([0, 1, 7]))
    assert short.overflowed.tolist() == [True, True, True]
    assert short.lengths.tolist() == [0, 0, 0]
    small = DenseCache.create(batch=2, length=6, kv_heads=K, head_dim=D, dtype=jnp.float32)
    assert put(small, jnp.array([0, 1, 1]), taken).overflowed.tolist() == [True, True]
    by_head = {"codec": Quantized("int8", "head"), "key_scale": [0.1, 0.2], "value_scale": [0.1, 0.1]}
    taken = take(appended(create("dense", **by_head), 2), jnp.array([0, 1, 2]))
    other = create("dense", **by_head | {"key_scale": [0.1, 0.3]})
    assert put(other, jnp.array([0, 1, 2]), taken).overflowed.all()
    assert not put(create("pages", **by_head), jnp.array([0, 1, 2]), taken).overflowed.any()
    # A row that lacked tokens says so wherever it goes.
    full = appended(appended(create("dense"), 7), 7)
    assert full.overflowed.all()
    assert put(create("dense"), jnp.array([0, 1, 2]), take(full, jnp.array([0, 1, 2]))).overflowed.all()


@slow
def test_a_row_without_one_of_its_pages_is_not_taken() -> None:
    cache = appended(create("pages"), 7)
    table = cache.table.at[0, 0].set(-1)
    taken = take(dataclasses.replace(cache, table=table), jnp.array([0, 1]))
    assert taken.overflowed.tolist() == [True, False]
    assert not np.asarray(taken.tokens["key"][0]).any()


@slow
def test_put_updates_a_donated_cache_in_place() -> None:
    source = create("pages", layers=2, codec=Quantized("int8"))
    cache = PagedCache.create(
        batch=B, pages=4096, page_size=16, max_pages=8, kv_heads=K, head_dim=64, dtype=jnp.bfloat16, layers=2
    )
    taken = jax.eval_shape(functools.partial(PagedCache.take, length=128), cache, jnp.array([0]))
    program = jax.jit(PagedCache.put, donate_argnums=0).lower(cache, jnp.array([0]), taken).compile()
    memory, size = program.memory_analysis(), sum(x.nbytes for x in jax.tree.leaves(cache.store))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 16
    reading = jax.jit(functools.partial(PagedCache.take, length=128)).lower(cache, jnp.array([0])).compile()
    assert reading.memory_analysis().temp_size_in_bytes < size / 16
    traces = []

    @jax.jit
    def move(cache: Any, rows: Any, to: Any) -> Any:
        traces.append(1)
        return cache.put(to, cache.take(rows))

    for rows, to in ([0, 1], [2, 0]), ([1, -1], [0, 1]):
        move(source, jnp.array(rows), jnp.array(to))
    assert len(traces) == 1


@slow
def test_rows_wait_in_host_memory() -> None:
    source = appended(create("pages", layers=2), 7)
    taken = jax.device_put(take(source, jnp.array([0, 2])), jax.memory.Space.Host, donate=True)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(taken)} == {"pinned_host"}
    empty = create("dense", layers=2)
    check_same(empty.put([1, 0], taken), 0, source, 2)
    moved = put(empty, jnp.array([1, 0]), taken)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(moved)} == {"device"}
    check_same(moved, 1, source, 0)
    swap = jax.jit(lambda cache, rows: jax.device_put(cache.take(rows), jax.memory.Space.Host))
    assert swap(source, jnp.array([0])).tokens["key"].sharding.memory_kind == "pinned_host"


@slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("source", "target"), [("pages", "dense"), ("dense", "pages"), ("ring", "ring")])
@pytest.mark.tier(every=2)
def test_rows_move_between_meshes(kind: AxisType, source: str, target: str) -> None:
    devices = jax.devices()
    here = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind, kind), devices=devices[:4])
    there = jax.make_mesh((2, 2), ("tp", "sp"), axis_types=(kind, kind), devices=devices[4:8])

    def of(storage: str) -> Any:
        rows: Any = {"batch": 4, "starts": None, "codec": Quantized("int8")}
        if storage == "pages":
            rows |= {"pages": 16, "page_size": 3, "max_pages": 4, "kv_heads": K, "head_dim": D, "dtype": jnp.float32}
            return PagedCache.create(**rows, table=[[5, 1, 7, 2], [0, 3, 6, 4]] * 2)  # of 8 pages in each shard
        return create(storage, **rows)

    given = appended(sharded(lambda: of(source), here), 5)
    taken = given.take([3, 0])
    assert taken.tokens["key"].sharding.spec[1] == "tp"
    own = [[4 * i + j for j in range(4)] for i in range(4)]
    onto = sharded(lambda: of(target).with_table(own) if target == "pages" else of(target), there)
    placed = onto.put([1, 2], taken)
    assert placed.store.key.sharding == onto.store.key.sharding
    for row, origin in ((1, 3), (2, 0)):
        check_same(placed, row, given, origin)
    back = given.put([1], placed.take([1]))  # rows of both shards of rows
    check_same(back, 1, given, 3)
    check_same(back, 2, given, 2)
    alone = of("dense").put([0], placed.take([2]))
    assert len(alone.store.key.devices()) == 1
    if source != "ring":
        check_same(alone, 0, given, 0)


@slow
def test_rows_move_by_transfer_servers() -> None:
    source, target = appended(create("pages"), 7), create("dense")
    taken = take(source, jnp.array([2]))
    server = transfer.start_transfer_server(jax.devices()[0].client)
    server.await_pull(7, taken)
    # The receiver knows the shapes from a cache of its own.
    shapes = jax.eval_shape(lambda cache: cache.take(jnp.zeros(1, jnp.int32), source.length), create("pages"))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=taken.digest.sharding), shapes)
    pulled = server.connect(server.address()).pull(7, shapes)
    check_same(put(target, jnp.array([1]), pulled), 1, source, 2)


@slow
def test_what_does_not_fit_is_refused() -> None:
    source = create("dense", codec=Quantized("int8"))
    taken = jax.eval_shape(lambda: source.take([0, 1]))
    for target, what in (
        (create("pages"), "layout"),
        (create("pages", codec=Quantized("int8"), kv_heads=4), "kv_heads"),
        (create("pages", codec=Quantized("int8", "tensor"), key_scale=1.0, value_scale=1.0), "layout"),
        (create("pages", codec=Quantized("int8"), dtype=jnp.bfloat16), "layout"),
        (create("pages", codec=Quantized("int8"), layers=2), "layers"),
    ):
        with pytest.raises(ValueError, match=f"cache with {what}="):
            jax.eval_shape(lambda rows, target=target: target.put([0, 1], rows), taken)
    for rows, why in (([0, 3], "must be rows"), ([1, 1], "twice"), ([0], r"integers \[N\]"), ([0.0, 1.0], "float")):
        with pytest.raises(ValueError, match=why):
            source.put(rows, taken)
    with pytest.raises(ValueError, match="must be rows of the cache"):
        source.take([4])
    with pytest.raises(ValueError, match="at least 1"):
        source.take([0], 0)
    layers = create("dense", layers=2)
    with pytest.raises(ValueError, match="layer axis"):
        layers.layer(0).take([0])
    kivi = KiviCache.create(batch=1, length=32, kv_heads=K, head_dim=D)
    for call in (lambda: kivi.take([0]), lambda: kivi.put([0, 0], taken)):
        with pytest.raises(UnsupportedError, match="KiviCache"):
            call()
    with pytest.raises(ValueError, match="not those of"):
        CacheRows.from_bytes(b"no bytes of rows")
    damaged = dataclasses.replace(taken, lengths=jax.ShapeDtypeStruct((1,), np.int32))
    with pytest.raises(ValueError, match="the rows have the arrays"):
        damaged.check()
