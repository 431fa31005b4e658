"""Pages over a sharded context: values of the same pages without a mesh, and what devices exchange for them."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ALiBi, alibi_slopes
from attnops.masks import Causal, KeyPadding, Mask, SlidingWindow
from attnops.sharding import AxisRules
from attnops_caches import CacheRows, DenseCache, PagedCache, PagePool, Quantized, Rows, sharded

B, H, K, D = 4, 4, 2, 8
PAGE, PAGES = 8, 6  # a device of 4 has 2 slots of each page
RNG = np.random.default_rng(0)
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"codec": Quantized("int8")},
    "int4": {"codec": Quantized("int4")},
    "latent": {"kv_heads": 1, "latent": 4},
}
pytestmark = pytest.mark.slow


def mesh_of(rows: int, slots: int, kind: AxisType = AxisType.Auto) -> Any:
    devices = jax.devices()[: rows * slots]
    return jax.make_mesh((rows, slots), ("dp", "sp"), axis_types=(kind, kind), devices=devices)


def create(shards: int = 1, **tokens: Any) -> PagedCache:
    """Pages in any order; each of the ``shards`` of rows has as many, numbered from 0."""
    order = np.random.default_rng(1)
    table = np.concatenate([order.permutation(24 // shards).reshape(B // shards, -1) for _ in range(shards)])
    sizes: dict[str, Any] = {"kv_heads": K, "head_dim": D, "dtype": jnp.float32, "starts": [0, 2, 1, 0]} | tokens
    return PagedCache.create(batch=B, pages=24, page_size=PAGE, max_pages=PAGES, table=table, **sizes)


def new(cache: Any, *lead: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """A query, and the key and value of its tokens."""
    shapes = (H, D), (cache.kv_heads, D), (cache.kv_heads, cache.value_head_dim)
    q, k, v = (jnp.asarray(RNG.normal(size=(*lead, *x)), jnp.float32) for x in shapes)
    return q, k, None if cache.is_latent else v


def pair(mesh: Any, tokens: int = 19, **fields: Any) -> tuple[Any, Any]:
    """The same rows on a mesh and without one."""
    shards = mesh.shape["dp"]
    placed, single = sharded(functools.partial(create, shards, **fields), mesh), create(**fields)
    assert placed.placement.slots == "sp"
    _, key, value = new(single, B, tokens)
    counts = np.array([tokens, 5, tokens - 1, 0], np.int32)
    return tuple(jax.jit(PagedCache.append)(x, key, value, counts) for x in (placed, single))  # type: ignore[return-value]


def check_contents(placed: Any, single: Any) -> None:
    found, wanted = jax.jit(lambda x: x.read())(placed), jax.jit(lambda x: x.read())(single)
    held = np.asarray(wanted.held)
    for name in ("positions", "held"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    for name in ("keys", "values"):
        np.testing.assert_array_equal(np.asarray(getattr(found, name))[held], np.asarray(getattr(wanted, name))[held])
    for name in ("lengths", "overflowed"):
        np.testing.assert_array_equal(getattr(placed, name), getattr(single, name))


def compiled(function: Any, *args: Any) -> tuple[Any, list[str]]:
    """The result of a function, and the exchanges between devices in its compiled program."""
    program = jax.jit(function).lower(*args).compile()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return program(*args), sorted(re.findall(rf"\b({kinds})(?:-start)?\(", program.as_text()))


def check_step(mesh: Any, caches: tuple[Any, Any], lead: tuple[int, int], mask: Mask, **options: Any) -> list[str]:
    """A step on the mesh gives what it gives without one, to every row; its exchanges."""
    placed, single = caches
    given = new(single, *lead)
    options |= {"mask": mask, "return_lse": True}
    name, metadata = options.pop("name", "flash"), options.pop("metadata", {})

    def step(mesh: Any, cache: Any, q: Any, k: Any, v: Any) -> Any:
        op: Any = OperationRegistry.create(name, OperationMetadata(mesh=mesh, **metadata))
        return op.step(q, k, v, cache, **options)

    (found, placed), exchanges = compiled(functools.partial(step, mesh), placed, *given)
    wanted, single = jax.jit(functools.partial(step, None))(single, *given)
    np.testing.assert_allclose(found.attention_outputs, wanted.attention_outputs, atol=5e-6)
    np.testing.assert_allclose(found.logsumexp, wanted.logsumexp, atol=5e-6)
    check_contents(placed, single)
    return exchanges


def test_every_device_has_a_part_of_each_page() -> None:
    placed, single = pair(mesh_of(2, 4), codec=Quantized("int8"))
    assert placed.store.key.addressable_shards[0].data.shape == (12, K, PAGE // 4, 2 * D)
    check_contents(placed, single)
    for x, y in zip(placed.positions(), single.read()[2:], strict=True):  # in the order of `read`
        np.testing.assert_array_equal(x, y)
    used = [np.asarray(x.data != 0).any((1, 3)).sum() for x in placed.store.key.addressable_shards]
    assert min(used) >= max(used) / 2 - 2  # tokens of a row, on each of its devices


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.tier(every=2)
def test_steps(case: str, T: int) -> None:
    mesh = mesh_of(2, 4)
    assert check_step(mesh, pair(mesh, **CASES[case]), (B, T), Causal()) == ["all-gather"]


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (Causal() & SlidingWindow(6, 0), {"sinks": np.arange(H, dtype=np.float32)}),
        (Causal() & KeyPadding(RNG.random((B, PAGE * PAGES)) < 0.8), {"bias": ALiBi(alibi_slopes(H))}),
        (Causal(), {"query_lengths": np.array([2, 1, 0, 2]), "name": "vanilla"}),
    ],
)
def test_masks_biases_and_lengths(mask: Mask, options: dict[str, Any]) -> None:
    mesh = mesh_of(1, 8)
    assert check_step(mesh, pair(mesh), (B, 2), mask, **options) == ["all-gather"]


@pytest.mark.parametrize(
    ("case", "rows", "slots", "kind"),
    [
        ("float32", 1, 8, AxisType.Auto),
        ("int8", 2, 4, AxisType.Auto),
        ("latent", 2, 4, AxisType.Auto),
        ("float32", 2, 2, AxisType.Explicit),
    ],
)
def test_packed_rows(case: str, rows: int, slots: int, kind: AxisType) -> None:
    mesh = mesh_of(rows, slots, kind)
    packed = Rows(np.array([0, 1, 9, 10]), np.array([2, 0, 3]))
    lengths = ["all-reduce"] * (rows > 1)  # every device has all queries, and needs the lengths of their rows
    exchanges = check_step(mesh, pair(mesh, **CASES[case]), (1, 12), Causal(), rows=packed)
    if kind == AxisType.Explicit:  # what has an entry by row is gathered too
        return
    assert exchanges == ["all-gather", *lengths]
    if case == "float32":
        exchanges = check_step(mesh, pair(mesh), (1, 20), Causal() & SlidingWindow(4, 0), rows=packed)
        assert exchanges == ["all-reduce", "all-reduce", *lengths]  # the largest score, and the sums


def test_packed_rows_of_a_dense_context() -> None:
    mesh = mesh_of(2, 4)
    make = functools.partial(DenseCache.create, batch=B, length=16, kv_heads=K, head_dim=D, dtype=jnp.float32)
    single = make()
    caches = tuple(x.append(*new(single, B, 5)[1:], np.array([5, 3, 0, 4])) for x in (sharded(make, mesh), single))
    caches = tuple(dataclasses.replace(x, store=caches[0].store) if i else x for i, x in enumerate(caches))
    packed = Rows(np.array([0, 1, 9, 10]), np.array([2, 0, 3]))
    check_step(mesh, (caches[0], jax.device_put(caches[1], jax.devices()[0])), (1, 12), Causal(), rows=packed)


def test_pages_that_run_out() -> None:
    mesh = mesh_of(1, 4)
    placed, single = pair(mesh)
    table = single.table.at[0, 3:].set(-1)
    caches = placed.with_table(table), single.with_table(table)
    check_step(mesh, caches, (B, 8), Causal())
    overflowed = caches[1].append(*new(single, B, 8)[1:]).overflowed
    assert overflowed.tolist() == [True, False, False, False]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_forks_copy_a_part_of_a_page_on_each_device(kind: AxisType) -> None:
    mesh = mesh_of(1, 4, kind)
    pool = PagePool.create(pages=24, page_size=PAGE, rows=B, max_pages=PAGES).reserve(np.array([13, 0, 0, 0]))
    placed = sharded(lambda: create(starts=None), mesh).with_table(pool.table)
    single = create(starts=None).with_table(pool.table)
    _, key, value = new(single, B, 13)
    counts = np.array([13, 0, 0, 0])
    placed, single = (x.append(key, value, counts) for x in (placed, single))
    pool, copies = pool.fork([0], [2])
    fork = jax.jit(lambda cache, table, copies: cache.fork([0], [2], table, copies))
    placed, exchanges = compiled(lambda cache: cache.fork([0], [2], pool.table, copies), placed)
    single = fork(single, pool.table, copies)
    assert exchanges == []
    assert placed.store.key.sharding.spec[2] == "sp"
    pool = pool.reserve(np.array([14, 0, 14, 0]))
    caches = placed.with_table(pool.table), single.with_table(pool.table)
    check_step(mesh, caches, (B, 1), Causal(), query_lengths=np.array([1, 0, 1, 0]))


def test_layers_and_rows_that_move() -> None:
    mesh = mesh_of(2, 4)
    placed, single = (
        sharded(functools.partial(create, 2, layers=2, codec=Quantized("int8")), mesh),
        create(layers=2, codec=Quantized("int8")),
    )
    _, key, value = new(single, B, 19)

    def append(cache: Any) -> Any:
        pending = cache.pending(19)
        for i in range(2):
            pending = pending.layer(i).write(key * (i + 1), value)
        return pending.cache

    placed, single = jax.jit(append)(placed), jax.jit(append)(single)
    check_contents(placed.layer(1), single.layer(1))
    rows = jnp.array([3, 1])
    move = jax.jit(lambda cache, taken: cache.put(rows[::-1], taken))
    taken = placed.take([3, 1])
    np.testing.assert_array_equal(taken.digest, single.take([3, 1]).digest)
    there = move(placed, taken)
    assert not there.overflowed.any()
    check_contents(there.layer(0), move(single, CacheRows.from_bytes(taken.to_bytes())).layer(0))


def test_rules_that_shard_no_slots() -> None:
    mesh = mesh_of(2, 4)
    whole = sharded(functools.partial(create, 2), mesh, AxisRules(kv_length=None))
    assert whole.placement.slots is None
    odd = sharded(lambda: PagedCache.create(batch=2, pages=4, page_size=6, max_pages=2, kv_heads=K, head_dim=D), mesh)
    assert odd.placement.slots is None
