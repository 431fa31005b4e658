"""A step whose kernel writes the new tokens, held to `append` and the core's `flash`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Mask, SlidingWindow
from attnops_caches import Cache, DenseCache, NewTokens, PagedCache, Quantized, Rows, WindowCache, sharded
from attnops_tpu.caches import batches, packed
from attnops_tpu.caches.reader import TPUCacheReader
from attnops_tpu.caches.write import Writer
from attnops_tpu.generations import target
from attnops_tpu.interpreter import detect_races

PAGE, K = 16, 2
SLOW = pytest.mark.slow
SIZES = {"batch": 4, "kv_heads": K, "head_dim": 16}
METADATA = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error", block_k=32)


def paged(dtype: Any = jnp.float32, **options: Any) -> Cache:
    # Row 1 has no page after its second: of its new tokens some don't fit.
    table = np.array([[1, 2, 3, 4], [5, 6, -1, -1], [-1] * 4, [7, 8, 9, 0]])
    return PagedCache.create(pages=10, page_size=PAGE, max_pages=4, table=jnp.asarray(table), dtype=dtype,
                             **SIZES, **options)  # fmt: skip


def dense(dtype: Any = jnp.float32, **options: Any) -> Cache:
    return DenseCache.create(length=64, dtype=dtype, **SIZES, **options)


def ring(dtype: Any = jnp.float32, **options: Any) -> Cache:
    return WindowCache.create(window=34, max_append=15, dtype=dtype, **SIZES, **options)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def check(
    cache: Cache,
    T: int,
    mask: Mask | None,
    lengths: list[int],
    real: list[int] | None = None,
    rows: Rows | None = None,
    **fields: Any,
) -> None:
    if isinstance(cache, PagedCache):
        lengths = [min(n, m) for n, m in zip(lengths, [64, 32, 0, 64], strict=True)]
    bits = jax.random.bits(jax.random.key(0), cache.store.key.shape, jnp.uint8)
    filled = {
        name: (bits[..., : x.shape[-1]] % 64).astype(x.dtype) if x.ndim == 4 else bits[..., 0] / jnp.float32(2550)
        for name, x in cache.store._blocks().items()
    }
    cache = dataclasses.replace(cache, store=dataclasses.replace(cache.store, **filled), lengths=jnp.asarray(lengths))
    if isinstance(cache, WindowCache):
        cache = dataclasses.replace(cache, written=cache.lengths)
    B = 4 if rows is None else 1
    key, value = (normal(i, B, T, K, 16).astype(cache.dtype) for i in (1, 2))
    query = normal(3, B, T, 2 * K, 16).astype(cache.dtype)
    given = None if real is None else jnp.asarray(real)

    def step(operation: Any) -> Any:
        program = jax.jit(functools.partial(operation.step, mask=mask, query_lengths=given, return_lse=True))
        return program(query, key, value, cache, rows=rows)

    expected, after = step(OperationRegistry.create("flash", OperationMetadata(platform="cpu")))
    got, written = step(OperationRegistry.create("attnops-tpu:flash", METADATA.replace(**fields)))
    for x, y in zip(jax.tree.leaves(written), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(x, y)
    rounding = {"rtol": 2**-7, "atol": 2**-7} if cache.dtype == jnp.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for name in ("attention_outputs", "logsumexp"):
        a, b = (np.asarray(getattr(x, name), np.float32) for x in (got, expected))
        np.testing.assert_allclose(a, b, **rounding)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The tokens a row of each step that is one kernel, of which every test has some."""
    queries: list[int] = []
    stepped = TPUCacheReader.step

    def spy(self: TPUCacheReader, operation: Any, query: jax.Array, *given: Any, **options: Any) -> Any:
        queries.append(query.shape[1])
        return stepped(self, operation, query, *given, **options)

    monkeypatch.setattr(TPUCacheReader, "step", spy)
    yield queries
    assert queries


@pytest.mark.slow
def test_what_is_written_and_attended_to_is_that_of_append() -> None:
    # In one page and in two; of row 1 one token fits, of row 2 none.
    check(paged(), 3, Causal(), [15, 31, 0, 33], [3, 3, 3, 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "T", "mask", "lengths"),
    [(paged, 1, SlidingWindow(5, 0), [40, 8, 0, 47]), (paged, 1, Causal(), [16, 31, 0, 64]),
     # In the slots of a ring before and after its end.
     (ring, 12, Causal(), [44, 4, 0, 90]), (ring, 1, None, [47, 48, 0, 8]),
     # New tokens that no query sees.
     (dense, 1, ~Causal(), [31, 8, 0, 15]), (paged, 19, Causal(), [0, 17, 0, 40]), (dense, 40, None, [20, 0, 0, 63])],
    ids=lambda x: getattr(x, "__name__", repr(x)),
)  # fmt: skip
@pytest.mark.tier(every=7)
def test_tokens_that_lie_in_any_way(make: Any, T: int, mask: Mask | None, lengths: list[int]) -> None:
    with detect_races():
        check(make(), T, mask, lengths)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "T", "lengths", "real"),
    [(functools.partial(paged, codec=Quantized("int8")), 20, [15, 8, 0, 40], [20, 20, 20, 5]),
     (dense, 30, [0, 17, 0, 40], [30, 9, 0, 17]), (ring, 14, [44, 4, 0, 90], [14, 3, 0, 14])],
    ids=["paged", "dense", "ring"],
)  # fmt: skip
@pytest.mark.tier(every=3)
def test_several_tiles_of_queries_a_row(make: Any, T: int, lengths: list[int], real: list[int]) -> None:
    """The last one writes, also where it has no query."""
    with target("v6e"), detect_races():
        check(make(), T, Causal(), lengths, real, block_q=8)


@pytest.mark.parametrize(
    ("make", "lengths", "starts", "slots"),
    [
        # Single tokens, one of which has no page left, and a prompt that is one tile and goes on in another page.
        (paged, [15, 32, 0, 40], [0, 1, 2, 9], [3, 1, 0]),
        # A prompt of three tiles, padding, a run without tokens and one without a page.
        pytest.param(paged, [15, 30, 0, 40], [2, 21, 21, 22, 25], [0, 1, 3, 2], marks=SLOW),
        # After a ring's end comes its start.
        pytest.param(ring, [44, 4, 46, 90], [0, 12, 13, 19], [3, 2, 0], marks=SLOW),
        pytest.param(dense, [15, 30, 0, 60], [1, 9, 10, 16], [3, 2, 1], marks=SLOW),
        # Left padding that ends among a row's new tokens, of which one tile has all, or not; and after them.
        pytest.param(
            functools.partial(dense, starts=[3, 0, 9, 9]), [0, 30, 0, 0], [1, 7, 8, 20, 22], [0, 1, 2, 3], marks=SLOW
        ),
    ],
)
@pytest.mark.tier(every=4)
def test_packed_rows_of_one_tile_are_written_by_the_kernel(
    make: Any, lengths: list[int], starts: list[int], slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = packed.written_before

    def written_before(cache: Any, new: NewTokens, rows: jax.Array) -> Cache:
        # What the kernel does not write must be of several tiles, of 8 queries here, or all padding.
        return write(cache, new, rows & ((new.size > 8) | (cache.lengths <= cache.starts)))

    monkeypatch.setattr(packed, "written_before", written_before)
    # One tile a call of the kernel, the schedule of which scalar memory would hold.
    monkeypatch.setattr(batches, "rows_a_call", lambda nq, words, shared: 1 if make is dense else 99)
    with detect_races():
        rows = Rows(jnp.asarray(starts), jnp.asarray(slots))
        check(make(), starts[-1] + 2, Causal(), lengths, rows=rows, block_q=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"dtype": jnp.bfloat16}, {"codec": Quantized("int8", "head"), "key_scale": [0.1, 0.2], "value_scale": [0.3, 0.4]},
     {"codec": Quantized("float8_e4m3fn", "tensor"), "key_scale": 0.1, "value_scale": 0.1},
     {"codec": Quantized("int8", "token_head")}],
    ids=lambda x: next(iter(x)),
)  # fmt: skip
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.tier(every=4)
def test_packed_numbers(options: dict[str, Any], T: int) -> None:
    check(paged(**options), T, Causal(), [15, 30, 0, 33])


@pytest.mark.slow
@pytest.mark.parametrize("make", [dense, ring])
@pytest.mark.tier(every=2)
def test_scales_beside_keys_and_values_in_arrays_of_their_own(make: Any) -> None:
    check(make(codec=Quantized("int8", "token_head")), 1, Causal(), [15, 30, 0, 33])


@pytest.mark.slow
def test_auto_picks_the_kernel_that_writes(steps: list[int]) -> None:
    cache, token = paged(), jnp.zeros((4, 1, K, 16))
    operation = OperationRegistry.create("auto", METADATA)
    jax.eval_shape(lambda cache: operation.step(token, token, token, cache), cache)
    assert steps == [1]


@pytest.mark.slow
def test_a_layer_of_all_is_written() -> None:
    pending = paged(layers=3).pending(1).layer(1)
    operation = OperationRegistry.create("attnops-tpu:flash", METADATA)
    key = normal(0, 4, 1, K, 16)
    step = jax.jit(lambda query, key, pending: operation.step(query, key, key, pending, mask=Causal())[1])
    written = step(normal(1, 4, 1, 4, 16), key, pending)
    expected = jax.jit(lambda key, pending: pending.write(key, key))(key, pending)
    np.testing.assert_array_equal(written.cache.store.key, expected.cache.store.key)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["paged", "dense", "ring"])
@pytest.mark.tier(every=3)
def test_each_device_of_a_mesh_writes_to_its_part(storage: str, steps: list[int]) -> None:
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=axes, devices=jax.devices()[:4])
    table = np.array([[1, 2, 3, 0], [4, 5, -1, -1], [3, 1, 2, 0], [5, 4, 6, 7]])  # of 8 pages in each of two shards
    arguments: dict[str, Any] = SIZES | {"dtype": jnp.float32}

    def make() -> Cache:
        if storage != "paged":
            return dense() if storage == "dense" else WindowCache.create(window=34, max_append=31, **arguments)
        return PagedCache.create(pages=16, page_size=PAGE, max_pages=4, table=table, **arguments)

    placed, whole = sharded(make, mesh), make()
    if isinstance(whole, PagedCache):
        whole = whole.with_table(np.where(table >= 0, table + np.array([0, 0, 8, 8])[:, None], -1))
    key, new, query = normal(0, 4, 31, K, 16), normal(1, 4, 3, K, 16), normal(2, 4, 3, 2 * K, 16)
    results = []
    for cache, metadata in ((placed, METADATA), (whole, OperationMetadata(platform="cpu"))):
        operation = OperationRegistry.create("attnops-tpu:flash", metadata)
        step = jax.jit(functools.partial(operation.step, mask=Causal(), return_lse=True))
        results.append(step(query, new, -new, cache.append(key, -key, [31, 30, 7, 20])))
    (got, written), (expected, after) = results
    assert steps == [3]
    for name in ("attention_outputs", "logsumexp"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=1e-4, atol=1e-5)
    for name in {"lengths", "overflowed", "written"} & set(vars(after)):
        np.testing.assert_array_equal(getattr(written, name), getattr(after, name))
    for x, y in zip(jax.tree.leaves(written.store), jax.tree.leaves(after.store), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_packed_rows_of_a_cache_whose_heads_are_on_several_devices_are_one_kernel(steps: list[int]) -> None:
    mesh = jax.make_mesh((2,), ("tp",), (jax.sharding.AxisType.Auto,))
    new, query, rows = normal(1, 1, 5, K, 16), normal(2, 1, 5, 2 * K, 16), Rows(jnp.array([0, 1, 4]), jnp.array([3, 0]))
    results = []
    for cache, metadata in ((sharded(dense, mesh), METADATA), (dense(), OperationMetadata(platform="cpu"))):
        operation = OperationRegistry.create("attnops-tpu:flash", metadata)
        results.append(jax.jit(functools.partial(operation.step, mask=Causal()))(query, new, -new, cache, rows=rows))
    (got, written), (expected, after) = results
    assert steps == [5]
    np.testing.assert_allclose(got.attention_outputs, expected.attention_outputs, rtol=1e-4, atol=1e-5)
    for x, y in zip(jax.tree.leaves(written), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_a_missing_wait_for_a_write_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writer, "finish", lambda *given: None)
    with pytest.raises((RuntimeError, AssertionError), match=r"RACE|data race|[Nn]ot equal|semaphore"), detect_races():
        check(dense(), 1, Causal(), [15, 31, 0, 33])
