"""Caches in compiled programs: traces, transformations and export."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import Cache, DenseCache, PagedCache, PagePool, Quantized, Rows, WindowCache, sharded
from attnops_testing import attention

B, H, K, D = 2, 4, 2, 32
STORAGES = ("dense", "ring", "pages")
PAGES_QUICK = ["pages", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dense", "ring"))]


def create(storage: str, length: int = 24, **options: Any) -> Cache:
    """An empty cache of `length` slots a row, pages of 8."""
    options = {"batch": B, "kv_heads": K, "head_dim": D, "dtype": jnp.float32} | options
    if storage == "ring":
        return WindowCache.create(window=length - 2, max_append=3, **options)
    if storage == "pages":
        pages = length // 8
        table = np.random.default_rng(0).permutation(B * pages).reshape(B, pages)
        return PagedCache.create(pages=B * pages, page_size=8, max_pages=pages, table=table, **options)
    return DenseCache.create(length=length, **options)


def flash(**options: Any) -> Any:
    return OperationRegistry.create("attnops:flash", OperationMetadata(on_unsupported="error", **options))


def tokens(T: int = 3, seed: int = 0, dtype: Any = jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(B, T, heads, D)), dtype) for heads in (H, K, K)]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.slow
def test_one_trace_serves_all_lengths_tables_and_fill_states(storage: str) -> None:
    traces = 0

    @jax.jit
    def step(cache: Cache, query: Any, key: Any, value: Any, lengths: Any) -> Any:
        nonlocal traces
        traces += 1
        out, cache = flash().step(query, key, value, cache, mask=Causal(), query_lengths=lengths)
        return out.attention_outputs, cache

    cache = create(storage)
    for lengths in ([3, 3], [0, 1], [3, 2], [2, 0], *[[3, 3]] * 7):  # the last of them find dense rows full
        _, cache = step(cache, *tokens(), np.array(lengths, np.int32))
        if isinstance(cache, PagedCache):
            cache = cache.with_table(np.flip(np.asarray(cache.table), 0).copy())
    cache = cache.truncate([5, 0]).reset(np.array([True, False]))
    step(cache, *tokens(), np.array([1, 1], np.int32))
    assert traces == 1


@pytest.mark.slow
def test_one_trace_serves_all_packed_rows() -> None:
    traces = 0

    @jax.jit
    def step(cache: Cache, query: Any, key: Any, value: Any, rows: Rows) -> Any:
        nonlocal traces
        traces += 1
        return flash().step(query, key, value, cache, mask=Causal(), rows=rows)

    cache = create("pages")
    packed = [x.reshape(1, 2 * 3, *x.shape[2:]) for x in tokens()]
    for starts, slots in (([0, 3, 6], [0, 1]), ([0, 5, 6], [1, 0]), ([2, 2, 4], [1, 0]), ([0, 0, 0], [1, 1])):
        _, cache = step(cache, *packed, Rows(starts, slots))
    assert traces == 1
    assert cache.lengths.tolist() == [3 + 1 + 2, 3 + 5]


@pytest.mark.slow
@pytest.mark.parametrize("storage", PAGES_QUICK)
@pytest.mark.tier(every=3)
def test_vmap_is_a_call_for_each(storage: str) -> None:
    caches = [create(storage).append(*tokens(3, seed)[1:], [3, seed]) for seed in (1, 2)]
    stacked: Any = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    arrays = [jnp.stack(x) for x in zip(tokens(2, 3), tokens(2, 4), strict=True)]

    def step(cache: Cache, query: Any, key: Any, value: Any) -> Any:
        out, cache = flash().step(query, key, value, cache, mask=Causal())
        return out.attention_outputs, cache

    found, after = jax.jit(jax.vmap(step))(stacked, *arrays)
    for i, cache in enumerate(caches):
        wanted, grown = jax.jit(step)(cache, *(x[i] for x in arrays))
        np.testing.assert_allclose(found[i], wanted, atol=1e-5)
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(grown), strict=True):
            np.testing.assert_array_equal(a[i], b)


def exported(cache: Cache, arrays: list[jax.Array]) -> export.Exported:
    """A step of `flash`."""
    step = lambda cache, *new: flash().step(*new, cache, mask=Causal())  # noqa: E731
    return export.export(jax.jit(step))(cache, *arrays)


CODECS = {"dense": Quantized("float8_e4m3fn"), "ring": None, "pages": Quantized("int4")}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.tier(quick=["ring"])
def test_a_program_with_a_cache_is_serialised(storage: str) -> None:
    cache = create(storage, codec=CODECS[storage], dtype=jnp.bfloat16)
    program = exported(cache, tokens(dtype=jnp.bfloat16))
    again = export.deserialize(program.serialize())
    assert again.in_tree == program.in_tree == jax.tree.structure(((cache, 0, 0, 0), {}))
    assert again.out_tree == program.out_tree
    assert (again.in_avals, again.out_avals) == (program.in_avals, program.out_avals)


@pytest.mark.slow
def test_what_caches_are_used_with_is_serialised() -> None:
    pool = PagePool.create(pages=4, page_size=8, rows=2, max_pages=2)
    rows = Rows(np.array([0, 2]), np.array([1]))

    def used(pool: PagePool, rows: Rows, cache: Cache) -> tuple[object, ...]:
        pieces, _ = cache.place(1, cache.lengths, jnp.arange(2))
        return pool.fork([0], [1]), rows.starts, cache.read(), cache.pending(1), pieces

    program = export.export(jax.jit(used))(pool, rows, create("pages"))
    again = export.deserialize(program.serialize())
    assert (again.in_tree, again.out_tree) == (program.in_tree, program.out_tree)


def test_a_cache_on_a_mesh_is_not_serialised() -> None:
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    cache = sharded(lambda: create("dense"), mesh)
    program = export.export(jax.jit(lambda cache: cache.lengths))(cache)
    with pytest.raises(ValueError, match=r"placement=Placement.* on a mesh"):
        program.serialize()


def test_a_program_of_another_version_is_refused() -> None:
    blob = bytes(export.export(jax.jit(lambda pool: pool.ok))(
        PagePool.create(pages=4, page_size=8, rows=2, max_pages=2)).serialize())  # fmt: skip
    assert blob.count(b'{"page_size": 8}') == 1
    with pytest.raises(ValueError, match=r"PagePool with the static fields \['page_sizf'\].*are \['page_size'\]"):
        export.deserialize(blob.replace(b'{"page_size": 8}', b'{"page_sizf": 8}'))


LOADED = """
import pickle, sys
import jax, jax.export, jax.numpy as jnp, numpy as np
import attnops_caches
path, result = sys.argv[1:]
found = []
for blob, create, leaves, tokens in pickle.load(open(path, "rb")):
    kind, sizes = create
    cache = getattr(attnops_caches, kind).create(**sizes)
    cache = jax.tree.unflatten(jax.tree.structure(cache), leaves)
    out, cache = jax.export.deserialize(blob).call(cache, *tokens)
    assert type(cache).__name__ == kind
    found.append((np.asarray(out.attention_outputs), cache.lengths.tolist()))
assert not [x for x in sys.modules if x.startswith(("attnops_tpu", "attnops_triton", "attnops_testing", "attnops_cli"))]
pickle.dump(found, open(result, "wb"))
"""


@pytest.mark.slow
def test_a_step_that_another_process_loads_gives_the_values_of_the_oracle(tmp_path: Path) -> None:
    given, expected = [], []
    for seed, storage in enumerate(STORAGES):
        cache = create(storage, codec=CODECS[storage]).append(*tokens(3, seed)[1:], [3, seed])
        new = tokens(2, seed + 3)
        sizes: dict[str, Any] = {"batch": B, "kv_heads": K, "head_dim": D, "dtype": "float32", "codec": CODECS[storage]}
        sizes |= {"dense": {"length": 24}, "ring": {"window": 22, "max_append": 3},
                  "pages": {"pages": 6, "page_size": 8, "max_pages": 3}}[storage]  # fmt: skip
        leaves = [np.asarray(x) for x in jax.tree.leaves(cache)]
        blob = bytes(exported(cache, new).serialize())
        given.append((blob, (cache.storage, sizes), leaves, [np.asarray(x) for x in new]))
        after = cache.append(*new[1:])
        keys, values, positions, held = (np.asarray(x) for x in after.read())
        at = np.asarray(after.lengths)[:, None] - 2 + np.arange(2)
        mask = (at[:, None, :, None] >= positions[:, None, None]) & held[:, None, None]
        expected.append((attention(new[0], keys, values, mask=mask).out, after.lengths.tolist()))
    (tmp_path / "given").write_bytes(pickle.dumps(given))
    command = [sys.executable, "-c", LOADED, str(tmp_path / "given"), str(tmp_path / "found")]
    run = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for found, right in zip(pickle.loads((tmp_path / "found").read_bytes()), expected, strict=True):
        np.testing.assert_allclose(found[0], right[0], atol=1e-5)
        assert found[1] == right[1]


@pytest.mark.slow
def test_a_cache_is_a_pytree_of_arrays_with_paths() -> None:
    cache = create("pages", codec=Quantized("int8"), layers=2)
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)}
    assert names == {".store.key", ".store.key_scale", ".store.value_scale", ".lengths", ".starts", ".overflowed",
                     ".table", ".copied"}  # fmt: skip
    assert all(x.shape[0] == 2 for x in jax.tree.leaves(cache.store))
