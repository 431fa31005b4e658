"""Every method of caches, and every call over one, on every kind of mesh axes: as without a mesh."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ALiBi
from attnops.masks import Ancestors, Causal, Segments
from attnops.sharding import AxisRules
from attnops_caches import Cache, DenseCache, PageCopies, PagedCache, PagePool, Pending, Rows, WindowCache, sharded

B, T, H, K, D, S = 2, 2, 4, 2, 4, 8
A, E = AxisType.Auto, AxisType.Explicit
AXES = {
    "auto": (("dp", "tp"), (A, A)),
    "explicit": (("dp", "tp"), (E, E)),
    "explicit rows": (("dp", "tp"), (E, A)),
    "explicit heads": (("dp", "tp"), (A, E)),
    "a cut context": (("sp", "tp"), (A, A)),
    "an explicit cut context": (("sp", "tp"), (E, E)),
    "a cut context with explicit heads": (("sp", "tp"), (A, E)),
}
# The kinds of axes of eager calls without a mesh that is set, and with one, of which it is every third call; of the
# others types alone are checked.
EAGER = {False: ("explicit", "explicit rows", "an explicit cut context"), True: ("explicit",)}
STORAGES = ("dense", "ring", "paged")
RNG = np.random.default_rng(0)
KEY, VALUE, QUERY = (RNG.normal(size=(B, T, heads, D)).astype(np.float32) for heads in (K, K, H))
PACKED = tuple(x[:1].repeat(2, 1) * np.arange(1, 5, dtype=np.float32)[:, None, None] for x in (QUERY, KEY, VALUE))
ROWS = Rows(np.array([0, 2, 3]), np.array([1, 0]))
TABLE = np.array([[1, 0, 3], [2, 3, 0]])  # of each shard's own pages
Call = Callable[[Any], Any]


def mesh_of(kind: str) -> Mesh:
    names, types = AXES[kind]
    return jax.make_mesh((2, 2), names, axis_types=types, devices=jax.devices()[:4])


def create(storage: str, **fields: Any) -> Any:
    sizes: dict[str, Any] = {"batch": B, "kv_heads": K, "head_dim": D, "dtype": jnp.float32, "starts": [1, 0], **fields}
    if storage == "dense":
        return DenseCache.create(length=S, **sizes)
    if storage == "ring":
        return WindowCache.create(window=4, max_append=T, **sizes)
    return PagedCache.create(pages=8, page_size=2, max_pages=3, table=TABLE, **sizes)


def flash(cache: Cache) -> Any:
    mesh = None if cache.placement is None else cache.placement.mesh
    return OperationRegistry.create("attnops:flash", OperationMetadata(mesh=mesh))


def vanilla(cache: Cache) -> Any:
    mesh = None if cache.placement is None else cache.placement.mesh
    return OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh))


CALLS: dict[str, Call] = {
    "append": lambda cache: cache.append(KEY, VALUE, [2, 1]),
    "append of one token": lambda cache: cache.append(KEY[:, :1], VALUE[:, :1]),
    "append of packed rows": lambda cache: cache.append(*PACKED[1:], rows=ROWS),
    "pending": lambda cache: cache.pending(T, [2, 1]).cache,
    "positions": lambda cache: cache.positions(),
    "query_positions": lambda cache: cache.query_positions(T, cache.row_lengths("lengths", [1, 2], T)),
    "truncate": lambda cache: cache.truncate([3, 1]),
    "reset": lambda cache: cache.reset(np.array([False, True])),
    "take_rows": lambda cache: cache.take_rows([1, 1]),
    "take more rows": lambda cache: cache.take_rows([1, 0, 1]),
    "with_table": lambda cache: cache.with_table(np.array([[1, -1, -1], [2, 3, 1]])),
    "without_mesh": lambda cache: cache.without_mesh(),
    "call": lambda cache: flash(cache)(QUERY, cache, mask=Causal(), return_lse=True),
    "call through read()": lambda cache: vanilla(cache)(
        QUERY, cache, mask=Causal(), bias=ALiBi(np.ones(H, np.float32))
    ),
    "call with a mask by key": lambda cache: flash(cache)(
        QUERY, cache, mask=Segments(np.zeros((B, T), int), np.arange(cache.length)[None].repeat(B, 0) % 2)
    ),
    "call with a bias by key": lambda cache: flash(cache)(
        QUERY, cache, bias=np.arange(H * cache.length, dtype=np.float32).reshape(1, H, 1, -1) / 9
    ),
    "call with a tree": lambda cache: flash(cache)(QUERY, cache, mask=Ancestors(np.array([[-1, 0], [-1, -1]]))),
    "call with query_lengths": lambda cache: flash(cache)(QUERY, cache, mask=Causal(), query_lengths=[1, 2]),
    "packed call": lambda cache: flash(cache)(PACKED[0], cache, mask=Causal(), rows=ROWS, return_lse=True),
    "packed call through read()": lambda cache: vanilla(cache)(PACKED[0], cache, mask=Causal(), rows=ROWS),
    "packed call with a mask by key": lambda cache: flash(cache)(
        PACKED[0], cache, rows=ROWS,
        mask=Segments(np.zeros((B, 4), int), np.arange(cache.length)[None].repeat(B, 0) % 2),
    ),
    "step": lambda cache: flash(cache).step(QUERY, KEY, VALUE, cache, mask=Causal(), query_lengths=[2, 1]),
    "packed step": lambda cache: flash(cache).step(*PACKED, cache, mask=Causal(), rows=ROWS),
}  # fmt: skip
LAYERED: dict[str, Call] = {
    "layer": lambda cache: _written(cache, jnp.int32(1)).layer(1),
    "step of a layer": lambda cache: [
        x.cache.layer(1) if isinstance(x, Pending) else x
        for x in flash(cache).step(QUERY, KEY, VALUE, cache.pending(T).layer(1), mask=Causal())
    ],
    "layer after with_table": lambda cache: _with_table(cache, 0).layer(0),
    "layer of a cache without its placement": lambda cache: cache.without_mesh().layer(1),
    "take_rows of layers": lambda cache: cache.take_rows([1, 0]).layer(1),
}
FORKED: dict[str, Call] = {
    "fork": lambda cache: cache.fork([0], [1], np.array([[1, 0, 3], [1, 2, -1]]), PageCopies(*np.array([[0], [2]]))),
    "copy_pages": lambda cache: cache.copy_pages(PageCopies(*np.array([[0], [5]]))),
}


def _with_table(cache: Any, layer: int) -> Any:
    moved = cache.with_table(np.array([[3, 2, 1], [0, 1, 2]])) if isinstance(cache, PagedCache) else cache
    return _written(moved, layer)


def _written(cache: Any, layer: Any) -> Any:
    return cache.pending(T).layer(layer).write(KEY, VALUE).cache


def seen(result: Any) -> list[np.ndarray]:
    """What a caller sees of a result."""
    if isinstance(result, Cache):
        keys, values, positions, held = map(np.asarray, result.read())
        own = [np.where(held[..., None, None], x, 0) for x in (keys, values)]
        by_row = [result.lengths, result.starts, result.overflowed]
        return [*own, np.where(held, positions, -1), held, *map(np.asarray, by_row)]
    if isinstance(result, (tuple, list)):
        return [x for part in result for x in seen(part)]
    return [np.asarray(x) for x in jax.tree.leaves(result)]


def made(storage: str, kind: str, calls: dict[str, Call]) -> tuple[Any, Any]:
    """A cache on a mesh and the same without one, both with some tokens."""
    fields: dict[str, Any] = {"layers": 2} if calls is LAYERED else {}
    rules = AxisRules(batch=None) if calls is FORKED else AxisRules()
    placed = sharded(lambda: create(storage, **fields), mesh_of(kind), rules)
    single = create(storage, **fields)
    if storage == "paged" and placed.placement.batch is not None:
        single = single.with_table(TABLE + np.array([[0], [4]]))
    if calls is LAYERED:
        return placed, single
    return placed.append(KEY[::-1], VALUE[::-1], [2, 1]), single.append(KEY[::-1], VALUE[::-1], [2, 1])


def cases() -> list[Any]:
    groups = [(CALLS, s, "calls") for s in STORAGES] + [(LAYERED, s, "layers") for s in STORAGES]
    return [
        pytest.param(storage, kind, calls, id=f"{storage}-{name}-{kind}")
        for calls, storage, name in [*groups, (FORKED, "paged", "forks")]
        for kind in AXES
        if storage == "dense" or "cut" not in kind
    ]


def serves(name: str, storage: str, kind: str) -> bool:
    """Whether there is such a call: the others are refused, which other tests assert."""
    if storage == "ring" and "by key" in name:
        return False
    if "cut" in kind and "packed" in name:
        return False
    return "take" not in name if storage == "paged" else name != "with_table"


@pytest.mark.slow
@pytest.mark.parametrize(("storage", "kind", "calls"), cases())
@pytest.mark.tier(every=3)
def test_a_call_on_a_mesh_is_that_without_one(storage: str, kind: str, calls: dict[str, Call]) -> None:
    mesh, (placed, single) = mesh_of(kind), made(storage, kind, calls)
    expected = functools.cache(lambda name: seen(jax.jit(calls[name])(single)))
    for i, (name, call) in enumerate(calls.items()):
        if not serves(name, storage, kind):
            continue
        for current in (False, True):
            with jax.set_mesh(mesh) if current else contextlib.nullcontext():
                jax.jit(call).trace(placed)
                is_called = kind in EAGER[current] and not (current and i % 3)
                found = seen(call(placed)) if is_called else None
            if found is None or "table" in name:  # whose pages are those of each shard
                continue
            for x, y in zip(found, expected(name), strict=True):
                np.testing.assert_allclose(x, y, atol=5e-6, err_msg=f"{name}, a mesh is set: {current}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "explicit", "explicit rows"])
def test_a_pool_on_a_mesh_gives_the_pages_that_it_gives_without_one(kind: str) -> None:
    mesh, single = mesh_of(kind), PagePool.create(pages=8, page_size=2, rows=B, max_pages=3)
    placed = jax.device_put(single, NamedSharding(mesh, PartitionSpec()))

    def call(pool: PagePool) -> Any:
        pool = pool.reserve(np.array([5, 2]))
        forked, copies = pool.fork([0], [1])
        return (
            forked,
            copies,
            forked.truncate(np.array([3, 5])),
            forked.release(np.array([True, False])),
            pool.available,
        )

    for current in (False, True):
        with jax.set_mesh(mesh) if current else contextlib.nullcontext():
            for found in (call(placed), jax.jit(call)(placed)):
                jax.tree.map(np.testing.assert_array_equal, found, call(single))
