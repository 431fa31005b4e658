"""Random walks of caches with layers: batches and packed rows, appended and attended to, against lists of tokens.

Queries are 0, so that each gives the mean of the values that it sees: a token too many or too few shows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops.sharding import AxisRules
from attnops_caches import DenseCache, PagedCache, PagePool, Rows, WindowCache, sharded

L, B, T, PAGE, PAGES, MOST, SLOTS, WINDOW, STEPS, WALKS = 2, 3, 3, 2, 7, 4, 11, 4, 30, 20
NAMES = ("append", "append packed", "step", "step packed", "move", "truncate", "reset")
LAYER = 1000.0  # between the marks of two layers
Cache = DenseCache | WindowCache | PagedCache
OPERATION = OperationRegistry.create("attnops:flash", OperationMetadata(on_unsupported="error"))


def create(storage: str, kv_heads: int = 1) -> Any:
    sizes: dict[str, Any] = {"batch": B, "kv_heads": kv_heads, "head_dim": 1, "dtype": jnp.float32, "layers": L}
    if storage == "dense":
        return DenseCache.create(length=SLOTS, **sizes)
    if storage == "ring":
        return WindowCache.create(window=WINDOW, max_append=T, **sizes)
    return PagedCache.create(pages=PAGES, page_size=PAGE, max_pages=MOST, **sizes)


@functools.partial(jax.jit, static_argnums=0)
def walked(storage: str, *given: Any) -> Any:
    """What is seen after each step of some walks, which are data."""
    return jax.vmap(functools.partial(walk_of, create(storage)))(*given)


@jax.jit
def walked_on_a_mesh(cache: Any, *given: Any) -> Any:
    """The same, one walk after the other, of a cache whose kv heads are on several devices."""
    return jax.lax.map(lambda walk: walk_of(cache, *walk), given)


def walk_of(cache: Any, kinds: Any, counts: Any, pairs: Any, slots: Any) -> Any:
    pool = PagePool.create(pages=PAGES, page_size=PAGE, rows=B, max_pages=MOST)
    paged, heads = isinstance(cache, PagedCache), cache.kv_heads

    def with_pool(pool: Any, cache: Any) -> Any:
        return (pool, cache.with_table(pool.table)) if paged else (pool, cache)

    def layered(cache: Any, function: Any) -> Any:
        def block(cache: Any, layer: Any) -> Any:
            return function(cache.layer(layer), layer * LAYER)

        return jax.lax.scan(block, cache, jnp.arange(L))

    def new(marks: Any, shift: Any) -> Any:
        return jnp.broadcast_to((marks + shift)[..., None, None], (*marks.shape, heads, 1))

    def shortened(pool: Any, cache: Any, lengths: Any) -> Any:
        if not paged:
            return pool, cache.truncate(lengths)
        pool, copies = pool.truncate(jnp.minimum(lengths, pool.lengths))
        return with_pool(pool, cache.copy_pages(copies).truncate(jnp.where(pool.ok, lengths, cache.lengths)))

    def step(state: Any, given: Any) -> Any:
        number, kind, count, pair, slots = given
        marks = 1.0 + number * B * T + jnp.arange(B * T, dtype=jnp.float32).reshape(B, T)
        rows = Rows(jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count)]), slots)
        added = jnp.zeros(B + 1, jnp.int32).at[jnp.where(slots < 0, B, slots)].add(count)[:B]
        nothing = jnp.zeros((L, B * T))

        def extended(is_packed: bool, attends: bool, pool: Any, cache: Any) -> Any:
            pool = pool.reserve(cache.lengths + (added if is_packed else count)) if paged else pool
            pool, cache = with_pool(pool, cache)
            of_call = {"rows": rows} if is_packed else {"lengths": count}

            def of_layer(pending: Any, shift: Any) -> Any:
                tokens = new(marks.reshape(1, -1) if is_packed else marks, shift)
                if not attends:
                    return pending.write(tokens, tokens), nothing[0]
                out, pending = OPERATION.step(tokens * 0, tokens, tokens, pending, mask=Causal())
                return pending, out.attention_outputs[..., 0].mean(-1).reshape(-1)

            pending, out = layered(cache.pending(B * T if is_packed else T, **of_call), of_layer)
            return (pool, pending.cache), out

        def moved(pool: Any, cache: Any) -> Any:
            source, target = pair
            if not paged:
                return pool, cache.take_rows(jnp.arange(B).at[target].set(source))
            pool, cache = shortened(pool, cache, cache.lengths)
            pool, copies = pool.fork(source[None], target[None])
            return pool, cache.fork(source[None], target[None], pool.table, copies)

        def emptied(pool: Any, cache: Any) -> Any:
            chosen = count > 1
            return with_pool(pool.release(chosen) if paged else pool, cache.reset(chosen))

        left = lambda pool, cache: jnp.maximum(cache.lengths - count, 0)  # noqa: E731
        state, out = jax.lax.switch(kind, [
            functools.partial(extended, False, False),
            functools.partial(extended, True, False),
            functools.partial(extended, False, True),
            functools.partial(extended, True, True),
            lambda *state: (moved(*state), nothing),
            # The window of a ring that is shortened has holes, see test_stateful.py.
            lambda *state: (state if isinstance(cache, WindowCache) else shortened(*state, left(*state)), nothing),
            lambda *state: (emptied(*state), nothing),
        ], *state)  # fmt: skip
        pool, after = state
        read = jax.lax.map(lambda layer: (after.layer(layer).read().keys[..., 0], *after.positions()), jnp.arange(L))
        return state, (out, after.lengths, after.overflowed, pool.ok, pool.table, *read)

    numbers = jnp.arange(STEPS)
    return jax.lax.scan(step, with_pool(pool, cache), (numbers, kinds, counts, pairs, slots))[1]


def draw(rng: np.random.Generator) -> list[Any]:
    shape = WALKS, STEPS
    kinds = rng.choice(len(NAMES), shape, p=[0.15, 0.15, 0.2, 0.25, 0.1, 0.1, 0.05])
    source = rng.integers(0, B, shape)
    pairs = np.stack([source, (source + rng.integers(1, B, shape)) % B], -1)
    slots = rng.permuted(np.broadcast_to(np.arange(B), (*shape, B)), axis=-1)
    slots = np.where(rng.random(slots.shape) < 0.1, -1, slots)
    return [x.astype(np.int32) for x in (kinds, rng.integers(0, T + 1, (*shape, B)), pairs, slots)]


def check(storage: str, given: list[Any], seen: list[Any]) -> None:
    """One walk against lists of the marks of each row's tokens, those of layer 0."""
    rows: list[list[float]] = [[] for _ in range(B)]
    overflowed = np.zeros(B, bool)
    ring = WINDOW - 1 + T
    for n, (kind, count, pair, slots) in enumerate(zip(*given, strict=True)):
        name, (out, lengths, over, ok, table, keys, positions, held) = NAMES[kind], [x[n] for x in seen]
        where = f"{storage}, step {n}: {[NAMES[k] for k in given[0][: n + 1]]}"
        expected = np.zeros(B * T)
        if name.startswith(("append", "step")):
            packed = "packed" in name
            starts = np.cumsum([0, *count]) if packed else np.arange(B) * T
            for run in range(B):
                b = slots[run] if packed else run
                if b < 0:
                    continue
                before = len(rows[b])
                room = {"dense": SLOTS, "ring": 10**6, "paged": PAGE * int((table[b] >= 0).sum())}[storage]
                new = [1.0 + n * B * T + starts[run] + j for j in range(count[run])]
                rows[b] += new[: max(0, room - before)]
                overflowed[b] |= before + len(new) > len(rows[b])
                if name.startswith("step"):
                    for j in range(count[run]):
                        first = max(0, before + j - WINDOW + 1) if storage == "ring" else 0
                        sees = rows[b][first : before + j + 1]
                        expected[starts[run] + j] = np.mean(sees) if sees else 0
        if name == "move":
            source, target = pair
            rows[target], overflowed[target] = list(rows[source]), overflowed[source]
            if storage == "paged" and not ok[target]:
                overflowed[target] |= bool(rows[target])
                rows[target] = []
        if name == "truncate" and storage != "ring":
            for b in range(B):
                if storage != "paged" or ok[b]:
                    rows[b] = rows[b][: max(0, len(rows[b]) - count[b])]
        if name == "reset":
            rows = [[] if count[b] > 1 else row for b, row in enumerate(rows)]
            overflowed &= count <= 1
        for layer in range(L):
            wanted = np.where(expected, expected + layer * LAYER, 0)
            np.testing.assert_allclose(out[layer], wanted, rtol=1e-5, err_msg=f"{where}, layer {layer}")
            for b, row in enumerate(rows):
                order = np.argsort(positions[layer, b][held[layer, b]])
                found = keys[layer, b][held[layer, b]][order]
                assert (found == found[:, :1]).all(), "every head has the same marks"
                kept = row[-ring:] if storage == "ring" else row
                assert (found[:, 0] - layer * LAYER).tolist() == kept, where
            assert lengths.tolist() == [len(row) for row in rows], where
            assert over.tolist() == overflowed.tolist(), where


def walk(storage: str, seeds: range, run: Any = None) -> None:
    for seed in seeds:
        given = draw(np.random.default_rng(seed))
        seen = [np.asarray(x) for x in (run or functools.partial(walked, storage))(*given)]
        for w in range(WALKS):
            check(storage, [x[w] for x in given], [x[w] for x in seen])


@pytest.mark.parametrize("storage", ["paged", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dense", "ring"))])
def test_every_layer_holds_and_sees_what_a_list_holds(storage: str) -> None:
    walk(storage, range(1))


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["dense", "ring", "paged"])
def test_every_layer_holds_and_sees_what_a_list_holds_for_long(storage: str) -> None:
    walk(storage, range(1, 11))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("storage", ["dense", "ring", "paged"])
def test_on_a_mesh_of_eight_devices(storage: str, axis_type: AxisType) -> None:
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(axis_type,))
    cache = sharded(lambda: create(storage, 8), mesh, AxisRules())
    walk(storage, range(101, 102), functools.partial(walked_on_a_mesh, cache))
