"""Random walks of a pool that runs out and its cache, against lists of tokens: no row sees another row's tokens."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from attnops.sharding import AxisRules
from attnops_caches import PagedCache, PagePool, sharded

B, T, PAGE, PAGES, MOST, STEPS, WALKS = 3, 3, 2, 5, 3, 40, 20
NAMES = (
    "reserve",
    "reserve without a table",
    "release",
    "release without a table",
    "append",
    "fork",
    "truncate",
    "reset",
)
State = tuple[PagePool, PagedCache]


def synced(pool: PagePool, cache: PagedCache) -> State:
    return pool, cache.with_table(pool.table)


def truncated(pool: PagePool, cache: PagedCache, lengths: Any) -> State:
    pool, copies = pool.truncate(jnp.minimum(lengths, pool.lengths))
    cache = cache.copy_pages(copies).truncate(jnp.where(pool.ok, lengths, cache.lengths))
    return synced(pool, cache)


def forked(pool: PagePool, cache: PagedCache, source: Any, target: Any) -> State:
    pool, cache = truncated(*synced(pool, cache), cache.with_table(pool.table).lengths)
    pool, copies = pool.fork(source[None], target[None])
    return pool, cache.fork(source[None], target[None], pool.table, copies)


def appended(pool: PagePool, cache: PagedCache, counts: Any, marks: Any) -> State:
    pool, cache = synced(pool, cache)
    new = jnp.broadcast_to(marks[..., None, None], (B, T, cache.kv_heads, 1))
    return pool, cache.append(new, new, counts)


def create(kv_heads: int) -> PagedCache:
    return PagedCache.create(
        batch=B, pages=PAGES, page_size=PAGE, max_pages=MOST, kv_heads=kv_heads, head_dim=1, dtype=jnp.float32
    )


@jax.jit
@jax.vmap
def walked(kinds: Any, counts: Any, pairs: Any) -> Any:
    """What is seen after each step of some walks, which are data."""
    return walk_of(create(1), kinds, counts, pairs)


@jax.jit
def walked_on_a_mesh(cache: PagedCache, kinds: Any, counts: Any, pairs: Any) -> Any:
    """The same, one walk after the other, of a cache whose kv heads are on several devices."""
    return jax.lax.map(lambda walk: walk_of(cache, *walk), (kinds, counts, pairs))


def walk_of(cache: PagedCache, kinds: Any, counts: Any, pairs: Any) -> Any:
    pool = PagePool.create(pages=PAGES, page_size=PAGE, rows=B, max_pages=MOST)

    def step(state: State, given: Any) -> Any:
        number, kind, count, pair = given
        marks = 1.0 + number * B * T + jnp.arange(B * T, dtype=jnp.float32).reshape(B, T)
        more, chosen = (lambda pool, cache: pool.reserve(cache.lengths + count)), count > 1

        def grown(pool: PagePool, cache: PagedCache) -> State:
            pool = jax.lax.cond(pair[0] == 0, lambda: pool, lambda: more(pool, cache))
            return appended(pool, cache, count, marks)

        state = jax.lax.switch(kind, [
            lambda pool, cache: synced(more(pool, cache), cache),
            lambda pool, cache: (more(pool, cache), cache),
            lambda pool, cache: synced(pool.release(chosen), cache),
            lambda pool, cache: (pool.release(chosen), cache),
            grown,
            lambda pool, cache: forked(pool, cache, *pair),
            lambda pool, cache: truncated(*synced(pool, cache), jnp.maximum(cache.lengths - count, 0)),
            lambda pool, cache: synced(pool.release(chosen), cache.reset(chosen)),
        ], *state)  # fmt: skip
        pool, cache = state
        keys, _, positions, held = cache.read()
        return state, (pool.table, pool.ok, cache.lengths, cache.overflowed, keys[..., 0], positions, held)

    return jax.lax.scan(step, (pool, cache), (jnp.arange(STEPS), kinds, counts, pairs))[1]


def draw(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    kinds = rng.choice(len(NAMES), (WALKS, STEPS), p=[0.05, 0.1, 0.04, 0.08, 0.45, 0.12, 0.12, 0.04])
    source = rng.integers(0, B, (WALKS, STEPS))
    pairs = np.stack([source, (source + rng.integers(1, B, (WALKS, STEPS))) % B], -1)
    return kinds.astype(np.int32), rng.integers(0, T + 1, (WALKS, STEPS, B)).astype(np.int32), pairs.astype(np.int32)


def check(kinds: Any, counts: Any, pairs: Any, seen: Any) -> None:
    """One walk against lists of the marks of each row's tokens."""
    rows: list[list[float]] = [[] for _ in range(B)]
    gone, overflowed = np.zeros(B, bool), np.zeros(B, bool)
    for n, (kind, count, pair, now) in enumerate(zip(kinds, counts, pairs, zip(*seen, strict=True), strict=True)):
        name = NAMES[kind]
        table, ok, lengths, over, keys, positions, held = now
        assert (keys == keys[..., :1]).all(), "every head has the same marks"
        keys = keys[..., 0]
        where = f"step {n}, {name}: {[NAMES[k] for k in kinds[: n + 1]]}"
        found = [keys[b][held[b]][np.argsort(positions[b][held[b]])].tolist() for b in range(B)]
        gone |= (count > 1) & (name in ("release", "release without a table", "reset"))
        if "without" not in name:
            for b in np.flatnonzero(gone):  # may come back to pages of its own, and to no others
                most = lengths[b] if name in ("reserve", "release", "reset") else len(rows[b])
                rows[b] = rows[b][:most] if name != "reset" or count[b] <= 1 else []
            if name in ("append", "fork", "truncate"):  # how much of it came back is seen in the marks
                for b in np.flatnonzero(gone):
                    kept = [x for x in found[b] if x in rows[b]]
                    rows[b] = rows[b][: len(kept)]
            gone[:] = False
        if name == "append":
            for b in range(B):
                room = PAGE * int((table[b] >= 0).sum())
                new = [1.0 + n * B * T + b * T + j for j in range(count[b])]
                fit = max(0, min(len(new), room - len(rows[b])))
                overflowed[b] |= fit < len(new)
                rows[b] += new[:fit]
        if name == "fork":
            source, target = pair
            rows[target], overflowed[target] = list(rows[source]), overflowed[source]
            if not ok[target]:
                overflowed[target] |= bool(rows[target])
                rows[target] = []
        if name == "truncate":
            for b in np.flatnonzero(ok):
                rows[b] = found[b] if found[b] == rows[b][: len(found[b])] and len(found[b]) < len(rows[b]) else rows[b]
        if name == "reset":
            overflowed &= count <= 1
        assert found == rows, where
        assert lengths.tolist() == [len(row) for row in rows], where
        assert over.tolist() == overflowed.tolist(), where


def walk(seeds: range, walked: Any = walked) -> None:
    for seed in seeds:
        given = draw(np.random.default_rng(seed))
        seen = [np.asarray(x) for x in walked(*given)]
        for w in range(WALKS):
            check(*(x[w] for x in given), [x[w] for x in seen])


@pytest.mark.slow
def test_no_row_sees_another_rows_tokens() -> None:
    walk(range(1))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [30, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_no_row_sees_another_rows_tokens_in_hundreds_of_walks(seeds: int) -> None:
    walk(range(1, 1 + seeds))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_nor_on_a_mesh_of_eight_devices(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(axis_type,))
    cache = sharded(lambda: create(8), mesh, AxisRules())
    assert cache.store.key.sharding.shard_shape(cache.store.key.shape)[-3] == 1, cache.store.key.sharding
    walk(range(101, 106), functools.partial(walked_on_a_mesh, cache))
