"""The kernel over caches compiled for every generation, by the real compiler, with no TPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ALiBi, alibi_slopes
from attnops.masks import Causal, Chunked, KeyPadding, Mask, Segments, SlidingWindow
from attnops_caches import Cache, DenseCache, PagedCache, Quantized, Rows, WindowCache, in_place_reasons, step_reasons
from attnops_tpu.aot import TOPOLOGIES, compile_for
from attnops_tpu.generations import target

# What is compiled for a TPU is what a TPU would run.
pytestmark = pytest.mark.optimised

SLOTS = 16384

# Pages, K, G and D, 576 for a latent of 512; each value of one with several of the others.
SIZES = [
    (16, 8, 4, 128), (32, 2, 8, 128), (64, 1, 8, 128), (128, 8, 1, 128), (256, 2, 16, 128), (48, 2, 4, 256),
    (128, 1, 16, 256), (64, 2, 8, 64), (16, 8, 4, 80), (64, 1, 128, 576),
]  # fmt: skip
GENERATIONS = list(TOPOLOGIES)
OWN = [(GENERATIONS[i % 5], *sizes) for i, sizes in enumerate(SIZES)]
# And pages of so few bytes that a tile has twice as many.
SMALL_PAGES = {("v5p", 16, 1, 4, 128), ("v5p", 16, 1, 8, 64)}
CASES = sorted(SMALL_PAGES | {(name, *sizes) for i, sizes in enumerate(SIZES) for name in (GENERATIONS[i % 5], "v6e")})


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Compiled programs are large, and none is needed twice."""
    yield
    jax.clear_caches()


def temporaries(
    cache: Cache, generation: str, G: int, T: int = 1, mask: Mask | None = None, is_packed: bool = False, **options: Any
) -> int:
    """Bytes; raises what the compiler does. Packed are T queries in all."""
    operation = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", on_unsupported="error"))
    lead = 1 if is_packed else cache.batch
    query = jax.ShapeDtypeStruct((lead, T, cache.kv_heads * G, cache.head_dim), cache.dtype)
    starts, slots = (jax.ShapeDtypeStruct((cache.batch + i,), jnp.int32) for i in (1, 0))
    rows = Rows(starts, slots) if is_packed else None
    assert not in_place_reasons(operation, "tpu", operation.request(query, cache, mask=mask, rows=rows))

    def run(query: jax.Array, cache: Cache, starts: jax.Array, slots: jax.Array) -> jax.Array:
        given = {"rows": Rows(starts, slots)} if is_packed else {}
        return operation(query, cache, mask=mask, **given, **options).attention_outputs

    return compile_for(run, (query, cache, starts, slots), generation).memory_analysis().temp_size_in_bytes


def pages(page: int, K: int, D: int, batch: int = 8, **options: Any) -> Cache:
    latent = {"latent": 512} if D == 576 else {}
    width = -(-(D if latent else 2 * D) // 128) * 128

    def make() -> Cache:
        return PagedCache.create(batch=batch, pages=batch * SLOTS // page, page_size=page, max_pages=SLOTS // page,
                                 kv_heads=K, head_dim=D, width=width, **latent, **options)  # fmt: skip

    return jax.eval_shape(make)


# Of the schedule and the table of a call; no copy of keys is as small, and no array by slot of many rows.
SMALL = 4 << 20


@pytest.mark.parametrize(
    ("generation", "page", "K", "G", "D"),
    [
        pytest.param(
            *case,
            marks=[] if case == ("v4", 16, 8, 4, 128) else pytest.mark.slow if case in OWN else pytest.mark.exhaustive,
        )
        for case in CASES
    ],
)
@pytest.mark.tier(every=6)
def test_pages_are_read_where_they_are(generation: str, page: int, K: int, G: int, D: int) -> None:
    cache = pages(page, K, D)
    assert temporaries(cache, generation, G, mask=Causal()) <= SMALL < 2 * cache.store.key.size


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, Causal() & SlidingWindow(1000, 0), Chunked(4096)], ids=repr)
@pytest.mark.tier(every=3)
def test_many_long_rows_have_no_array_by_slot(mask: Mask | None) -> None:
    def make() -> Cache:
        return PagedCache.create(batch=1024, pages=4096, page_size=64, max_pages=2048, kv_heads=1, head_dim=128)

    bias = ALiBi(alibi_slopes(4))
    assert temporaries(jax.eval_shape(make), "v6e", 4, mask=mask, bias=bias) <= SMALL


@pytest.mark.exhaustive
def test_more_rows_than_scalar_memory_holds_compile() -> None:
    def make() -> Cache:
        return PagedCache.create(batch=12000, pages=4096, page_size=64, max_pages=8, kv_heads=1, head_dim=128)

    temporaries(jax.eval_shape(make), "v6e", 4, mask=Causal())


@pytest.mark.slow
def test_a_mask_with_an_array_by_key_compiles() -> None:
    cache = pages(64, 2, 128)
    mask = Segments(jnp.zeros((8, 1), jnp.int32), jnp.zeros((8, SLOTS), jnp.int32))
    temporaries(cache, "v6e", 4, mask=Causal() & mask)


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.tier(every=5)
def test_a_prompt_with_all_that_scores_have_compiles(generation: str) -> None:
    cache = pages(64, 2, 128, batch=2)
    mask = SlidingWindow(jnp.array([[1000], [50]]), 0)
    temporaries(cache, generation, 4, T=600, mask=mask, logits_soft_cap=30.0, return_lse=True,
                sinks=jnp.ones((8,), jnp.bfloat16))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "generation", [pytest.param(x, marks=[] if x == "v6e" else pytest.mark.exhaustive) for x in GENERATIONS]
)
def test_packed_rows_read_pages_where_they_are(generation: str) -> None:
    cache = pages(64, 2, 128, batch=32)
    mask = SlidingWindow(jnp.full((32, 1), 5000), 0) & KeyPadding(jnp.ones((32, SLOTS), bool))
    size = temporaries(cache, generation, 4, T=512, mask=mask, is_packed=True, return_lse=True)
    # Queries and results of tiles, some of them with one query, and what XLA computes values by key from.
    assert size <= 3 * SMALL < cache.store.key.size


# The codec and its scales, a page, K and a generation.
CODECS = [
    ("int8", "token_head", 128, 8, "v4"), ("int8", "head", 32, 8, "v5e"), ("float8_e5m2", "tensor", 128, 2, "v5p"),
    ("float8_e4m3fn", "token_head", 256, 1, "v6e"), ("float8_e4m3fn", "head", 64, 2, "tpu7x"),
    ("int4", "token_head", 128, 8, "v6e"), ("int4", "head", 64, 2, "v4"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "scales", "page", "K", "generation"), CODECS)
@pytest.mark.tier(every=5)
def test_quantised_pages_are_read_where_they_are(dtype: str, scales: str, page: int, K: int, generation: str) -> None:
    given: Any = {} if scales == "token_head" else {"key_scale": 0.1, "value_scale": 0.1}
    given = {name: [x] * K if scales == "head" else x for name, x in given.items()}
    cache = pages(page, K, 128, codec=Quantized(dtype, scales), **given)
    assert temporaries(cache, generation, 4, mask=Causal()) <= SMALL


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_rows_without_pages_compile(dtype: Any) -> None:
    def make() -> Cache:
        return DenseCache.create(batch=4, length=SLOTS - 128, kv_heads=4, head_dim=128, dtype=dtype)

    cache = jax.eval_shape(make)
    assert temporaries(cache, "v5e", 2, mask=Causal()) <= SMALL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generation", "T"),
    [pytest.param(name, T, marks=[] if name == "v6e" else pytest.mark.exhaustive)
     for name in GENERATIONS for T in (1, 5)],
)  # fmt: skip
@pytest.mark.tier(every=2)
def test_a_step_writes_to_the_cache_where_it_is(generation: str, T: int) -> None:
    def ring() -> Cache:
        return WindowCache.create(batch=8, window=1009, max_append=16, kv_heads=4, head_dim=128, layers=8)

    codec: dict[str, Any] = {"codec": Quantized("int8", "head"), "key_scale": [0.1] * 4, "value_scale": [0.1] * 4}
    by_token, int4 = ({"codec": Quantized(dtype, "token_head")} for dtype in ("int8", "int4"))
    quantised = (pages(128, 4, 128, **by_token), pages(128, 4, 128, **int4))
    for cache in (pages(64, 4, 128), pages(64, 4, 128, **codec), *quantised, jax.eval_shape(ring)):
        # A tile of keys and values; all scales of one array are 2 MiB more.
        assert step_temporaries(cache, generation, T) <= 5 << 19


@pytest.mark.slow
@pytest.mark.parametrize(
    "generation", [pytest.param(x, marks=[] if x == "v6e" else pytest.mark.exhaustive) for x in ("v5e", "v6e", "tpu7x")]
)
def test_a_step_of_several_tiles_of_queries_writes_to_the_cache_where_it_is(generation: str) -> None:
    for cache in (pages(64, 1, 128, batch=2), pages(128, 1, 128, batch=2, codec=Quantized("int8", "token_head"))):
        assert step_temporaries(cache, generation, 512) <= 1 << 20  # some queries, new tokens and outputs


@pytest.mark.exhaustive
@pytest.mark.parametrize("generation", ["v4", "v5p"])
def test_a_step_of_several_tiles_of_queries_appends_where_two_cores_share_a_kernel(generation: str) -> None:
    for cache in (pages(64, 4, 128, batch=2), pages(128, 4, 128, batch=2, codec=Quantized("int8", "token_head"))):
        assert step_temporaries(cache, generation, 512, is_one_kernel=False) <= 24 << 20
    assert step_temporaries(pages(64, 4, 128, batch=2), generation, 64) <= 24 << 20  # one tile


def step_temporaries(cache: Cache, generation: str, T: int, is_one_kernel: bool = True) -> int:
    """Bytes of temporaries of a step that updates the cache where it is."""
    operation = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", on_unsupported="error"))

    def step(query: jax.Array, key: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        pending = cache.pending(T) if cache.layers is None else cache.pending(T).layer(7)
        output, pending = operation.step(query, key, key, pending, mask=Causal())
        return output.attention_outputs, pending.cache

    K = cache.kv_heads
    query, key = (jax.ShapeDtypeStruct((cache.batch, T, heads, 128), jnp.bfloat16) for heads in (4 * K, K))
    compiled = compile_for(step, (query, key, cache), generation, donated=(2,))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in cache.store._blocks().values())
    with target(generation):
        one: Any = cache if cache.layers is None else jax.eval_shape(lambda cache: cache.layer(7), cache)
        request = operation.request(query, one, mask=Causal())
        assert {r.argument for r in step_reasons(operation, "tpu", request)} == (set() if is_one_kernel else {"query"})
    if T < 100 and is_one_kernel:  # the compiler can't print programs whose operands it prefetches in parts
        assert "while" not in compiled.as_text()  # `append` is a loop over rows
    return memory.temp_size_in_bytes
