"""What fits no cache is refused, with both values and the rule; where it is data, flags tell it."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import NotDifferentiableError, OperationMetadata, OperationRegistry
from attnops.biases import ALiBi
from attnops.masks import Ancestors, Causal, Dense, Full, KeyPadding, Segments
from attnops_caches import DenseCache, PageCopies, PagedCache, PagePool, Quantized, Rows, WindowCache, bytes_per_page
from attnops_caches.calls.step import _warn_of_later_tokens

B, H, K, D, S = 2, 4, 2, 8, 12
OPTIONS: dict[str, Any] = {"batch": B, "kv_heads": K, "head_dim": D, "dtype": jnp.bfloat16}
OP: Any = OperationRegistry.create("attnops:flash", OperationMetadata())


def dense(**options: Any) -> DenseCache:
    return DenseCache.create(length=S, **OPTIONS | options)


def ring() -> WindowCache:
    return WindowCache.create(window=4, max_append=3, **OPTIONS)


def paged(**options: Any) -> PagedCache:
    return PagedCache.create(pages=6, page_size=4, max_pages=3, **OPTIONS | options)


def x(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.ones(shape, dtype)


NEW = x(B, 2, K, D)
QUERY = x(B, 2, H, D)
PACKED = x(1, 5, H, D)

REFUSED: dict[str, tuple[Any, str]] = {
    "key of another dtype": (
        lambda: dense().append(NEW.astype(jnp.float32), NEW),
        r"key has dtype float32, but the cache was created for bfloat16: cast it, or create the cache with "
        r"dtype=float32",
    ),
    "value of another dtype": (lambda: dense().append(NEW, NEW.astype(jnp.float16)), r"value has dtype float16, but"),
    "key of another batch": (
        lambda: dense().append(x(3, 2, K, D), x(3, 2, K, D)),
        r"key has shape \(3, 2, 2, 8\), but the cache takes \[B, T, K, head_dim\]=\[2, T, 2, 8\]",
    ),
    "keys with heads before tokens": (
        lambda: dense().append(x(B, K, 3, D), x(B, K, 3, D)),
        r"\[2, T, 2, 8\] with T of at least 1. With heads and tokens swapped it fits: key.swapaxes\(1, 2\), or m",
    ),
    "a step with heads before tokens": (
        lambda: OP.step(x(B, H, 3, D), x(B, K, 3, D), x(B, K, 3, D), dense(), mask=Causal()),
        r"key has shape \(2, 2, 3, 8\).* swapped it fits: key.swapaxes\(1, 2\), or metadata.layout of op.step",
    ),
    "queries with heads before tokens": (
        lambda: OP(x(B, H, 3, D), dense()),
        r"query has 3 heads and the cache has 2: the kv heads must divide the heads \(check that metadata.layout is",
    ),
    "values of another length": (
        lambda: dense().append(NEW, x(B, 3, K, D)), r"value has length 3, but key has length 2: they must be equal",
    ),
    "no value": (lambda: dense().append(NEW), r"value=None, but the cache stores values"),
    "value of latent content": (
        lambda: dense(latent=4).append(NEW, NEW),
        r"value is given, but the cache has latent content: its value is the first 4 features of the key",
    ),
    "more tokens than were given": (
        lambda: dense().append(NEW, NEW, [1, 3]), r"lengths=\[1, 3\] must be from 0 to T=2",
    ),
    "lengths of another batch": (lambda: dense().append(NEW, NEW, [1]), r"lengths is int64 \(1,\), but must be"),
    "lengths that are not integers": (lambda: dense().truncate([1.0, 2.0]), r"lengths is float64 \(2,\), but must be"),
    "more than a ring takes": (
        lambda: ring().append(x(B, 4, K, D), x(B, 4, K, D)),
        r"4 tokens are appended at once, but the cache was created with max_append=3: more would overwrite tokens that "
        r"a query still sees; append in chunks, or create it with more",
    ),
    "a run longer than a ring takes": (
        lambda: ring().append(x(1, 5, K, D), x(1, 5, K, D), rows=Rows([0, 4, 5], [0, 1])),
        r"4 tokens are appended at once, but the cache was created with max_append=3",
    ),
    "table of another batch": (
        lambda: paged().with_table(np.zeros((3, 3), int)),
        r"table is int64 \(3, 3\), but must be integers \[B, max_pages\]=\(2, 3\)",
    ),
    "table of floats": (lambda: paged().with_table(np.zeros((2, 3))), r"table is float64 \(2, 3\), but"),
    "page that does not exist": (
        lambda: paged().with_table([[0, 6, -1], [1, 2, 3]]),
        r"table has pages from -1 to 6, but the cache has pages 0 to 5, and -1 means no page",
    ),
    "scales that are missing": (
        lambda: dense(codec=Quantized("int8", "head")), r"key_scale is missing: with scales='head' it must be given",
    ),
    "scales without a codec": (lambda: dense(key_scale=1.0), r"key_scale is given, but the cache has no codec"),
    "scales of another shape": (
        lambda: dense(codec=Quantized("int8", "head"), key_scale=np.ones(3), value_scale=np.ones(2)),
        r"key_scale has shape \(3,\), but must have shape \(2,\)",
    ),
    "unknown codec": (lambda: Quantized("int5"), r"dtype='int5' must be one of|int5"),
    "odd head dim of int4": (
        lambda: dense(codec=Quantized("int4"), value_head_dim=5),
        r"value_head_dim=5 is odd, but codec='int4 by token_head' stores two features in a byte: give an even one",
    ),
    "odd width of int4": (lambda: dense(codec=Quantized("int4"), width=17), r"width=17 is odd, but codec='int4 by"),
    "unknown scales": (lambda: Quantized("int8", "row"), r"scales='row' must be one of"),
    "integer dtype": (lambda: dense(dtype=jnp.int8), r"dtype=int8 must be float32, bfloat16 or float16"),
    "negative padding": (lambda: dense(starts=[0, -1]), r"starts=\[0, -1\] must be at least 0"),
    "latent larger than the key": (lambda: dense(latent=9), r"latent=9 must be at most head_dim=8"),
    "no slots": (lambda: DenseCache.create(length=0, **OPTIONS), r"length=0 must be an int of at least 1"),
    "a chosen row that is an id": (
        lambda: dense().reset(np.array([1, 0])), r"rows is int\d+ \(2,\), but must be bool \[B\]=\(2,\)",
    ),
    "a fork of as many sources as not targets": (
        lambda: paged().fork([0, 1], [1], paged().table, PageCopies(np.array([-1]), np.array([-1]))),
        r"source has shape \(2,\) and target \(1,\), but both must have shape \[N\]",
    ),
    "copies of as many sources as not targets": (
        lambda: paged().copy_pages(PageCopies(np.array([1]), np.array([2, 3]))),
        r"copies\.source has shape \(1,\) and copies\.target \(2,\), but both must have shape \[N\]",
    ),
    "copies of pages that are no integers": (
        lambda: paged().copy_pages(PageCopies(np.array([1.5]), np.array([2]))),
        r"copies\.source has dtype float64, but must be integers",
    ),
    "rows that overlap": (
        lambda: OP(PACKED, dense(), rows=Rows([0, 2, 5], [1, 1])),
        r"Rows' slots=\[1, 1\] overlap: each row of the cache may have one run of queries; join its runs",
    ),
    "rows that decrease": (
        lambda: OP(PACKED, dense(), rows=Rows([0, 3, 2], [0, 1])),
        r"Rows' starts=\[0, 3, 2\] must not decrease, from 0 at least to the 5 queries at most",
    ),
    "rows beyond the queries": (lambda: OP(PACKED, dense(), rows=Rows([0, 3, 6], [0, 1])), r"to the 5 queries at most"),
    "rows that the cache has not": (
        lambda: OP(PACKED, dense(), rows=Rows([0, 3, 5], [0, 2])), r"Rows' slots=\[0, 2\] must be rows of the cache",
    ),
    "rows of another number": (
        lambda: OP(PACKED, dense(), rows=Rows([0, 5], [0, 1])), r"Rows has 2 starts and 2 slots, but must have",
    ),
    "rows and query_lengths": (
        lambda: OP(PACKED, dense(), rows=Rows([0, 5], [0]), query_lengths=[1, 1]),
        r"rows and query_lengths are both given",
    ),
    "query of another batch": (
        lambda: OP(x(3, 1, H, D), dense()), r"query has batch 3, but the cache has batch 2: they must be equal",
    ),
    "packed query of a batch": (
        lambda: OP(QUERY, dense(), rows=Rows([0, 2], [0])), r"query has batch 2, but packed rows have batch 1",
    ),
    "query of another head_dim": (
        lambda: OP(x(B, 1, H, 4), dense()), r"query has head_dim 4, but the cache has head_dim 8: they must be equal",
    ),
    "heads that K does not divide": (lambda: OP(x(B, 1, 3, D), dense()), r"query has 3 heads and the cache has 2"),
    "value with a cache": (lambda: OP(QUERY, dense(), NEW), r"key is a DenseCache and value is given too"),
    "query_lengths without a cache": (
        lambda: OP(QUERY, NEW, NEW, query_lengths=[1, 1]), r"'query_lengths'.*; write op\(query, cache, query_lengths",
    ),
    "dropout": (
        lambda: OP(QUERY, dense(), dropout_key=jax.random.key(0)),
        r"dropout_key is given, but attention over a cache has no dropout",
    ),
    "the mode train": (
        lambda: OP(QUERY, dense(), mode="train"),
        r"^mode='train', but attention over a cache has no gradient and no dropout; give the call mode='prefill'",
    ),
    "the mode train of a step": (
        lambda: OP.step(QUERY, NEW, NEW, dense(), mode="__train__"), r"^mode='train', but attention over a cache",
    ),
    "the mode train of the metadata": (
        lambda: OperationRegistry.create("attnops:vanilla", OperationMetadata(mode="train"))(QUERY, dense()),
        r"^metadata\.mode='train', but attention over a cache",
    ),
    "an unknown mode": (lambda: OP(QUERY, dense(), mode="learn"), r"mode='learn' is not a runtime mode"),
    "bias with an offset": (
        lambda: OP(QUERY, dense(), bias=ALiBi(np.ones(H, np.float32), offset=3)),
        r"has offset=3, but over a cache the queries' positions are known",
    ),
    "Ancestors of packed rows": (
        lambda: OP(PACKED, dense(), rows=Rows([0, 5], [0]), mask=Ancestors([-1] * 5)),
        r"Ancestors.* numbers the queries of each row, but rows are packed",
    ),
    **{
        f"{name} in a ring": (
            lambda mask=mask: OP(QUERY, ring(), mask=mask),
            r"has an array by key, but positions in a WindowCache of 6 slots have no limit",
        )
        for name, mask in {
            "Dense": Dense(np.ones((1, 1, 1, 6), bool)),
            "an array": np.ones((1, 1, 1, 6), bool),
            "Segments": Segments(np.zeros(2, int), np.zeros(6, int)) & Causal(),
            "KeyPadding": KeyPadding(np.ones(6, bool)),
        }.items()
    },
    **{
        f"{name} in a ring with packed rows": (
            lambda mask=mask: OP(PACKED, ring(), mask=mask, rows=Rows([0, 3, 5], [0, 1])),
            r"has an array by key, but positions in a WindowCache of 6 slots have no limit",
        )
        for name, mask in {
            "Dense": Dense(np.ones((B, 1, 1, 6), bool)),
            "Segments": Causal() & Segments(np.zeros(5, int), np.zeros(6, int)),
            "KeyPadding": ~KeyPadding(np.zeros(6, bool)),
        }.items()
    },
    "a bias in a ring": (
        lambda: OP(QUERY, ring(), bias=np.ones((1, 1, 1, 6), np.float32)),
        r"bias has an array by key, but positions in a WindowCache",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, text = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=text):
        call()


def test_the_mode_of_a_call_over_a_cache_is_decode_or_prefill_unless_it_is_stated() -> None:
    modes = {1: "__autoregressive__", 2: "__prefill__"}
    assert {T: OP.request(x(B, T, H, D), dense()).mode for T in modes} == modes
    trained: Any = OperationRegistry.create("attnops:flash", OperationMetadata(mode="train", dropout_prob=0.1))
    assert trained.request(QUERY, dense(), mode="insert").mode == "__insert__"


@pytest.mark.parametrize("of", ["query", "cache", "tokens"])
@pytest.mark.parametrize("name", ["attnops:flash", "attnops:vanilla"])
def test_a_gradient_is_refused(name: str, of: str) -> None:
    op: Any = OperationRegistry.create(name, OperationMetadata())
    cache = dense(dtype=jnp.float32)
    query, key = QUERY.astype(jnp.float32), NEW.astype(jnp.float32)
    functions: dict[str, tuple[Any, Any]] = {
        "query": (lambda q: op(q, cache).attention_outputs.sum(), query),
        "cache": (
            lambda k: op(query, DenseCache(**{**vars(cache), "store": cache.store.__class__(
                **{**vars(cache.store), "key": k})})).attention_outputs.sum(), cache.store.key,
        ),
        "tokens": (lambda k: op.step(query, k, key, cache)[0].attention_outputs.sum(), key),
    }  # fmt: skip
    function, given = functions[of]
    with pytest.raises(
        NotDifferentiableError, match=r"attention over a cache has no gradient.*call the operation with"
    ):
        jax.grad(function)(given)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"head_dim": D}, "kv_heads is missing: a cache is created with kv_heads=K and head_dim=D at least"),
        ({"kv_heads": K, "head_dim": None}, "head_dim is missing"),
        ({"kv_heads": K, "head_dim": D, "layer": 2}, "a cache has no option 'layer'; it has .*'layers'"),
    ],
)
def test_options_that_are_missing_or_unknown(options: Any, text: str) -> None:
    for create in (
        lambda: DenseCache.create(batch=B, length=S, **options),
        lambda: bytes_per_page(page_size=16, **options),
    ):
        with pytest.raises(TypeError, match=text):
            create()


def test_none_is_the_default() -> None:
    cache = DenseCache.create(batch=B, length=S, kv_heads=K, head_dim=D, dtype=None, codec=None, layers=None)
    assert (cache.dtype, cache.value_head_dim) == (jnp.bfloat16, D)


def test_a_step_of_several_tokens_without_a_mask_warns_once() -> None:
    _warn_of_later_tokens.cache_clear()
    cache = dense()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(OP.step, QUERY[:, :1], NEW[:, :1], NEW[:, :1], cache)
        for mask in (Causal(), Full()):
            jax.eval_shape(functools.partial(OP.step, mask=mask), QUERY, NEW, NEW, cache)
        assert not caught
        for _ in range(2):
            jax.eval_shape(OP.step, QUERY, NEW, NEW, cache)
    (warning,) = caught
    assert "mask=Causal()" in str(warning.message)


@pytest.mark.slow
def test_a_full_pool_is_told_by_ok_and_its_tokens_by_overflowed() -> None:
    pool = PagePool.create(pages=3, page_size=2, rows=B, max_pages=3).reserve(np.array([4, 4]))
    assert pool.ok.tolist() == [True, False]
    cache = PagedCache.create(pages=3, page_size=2, max_pages=3, table=pool.table, **OPTIONS)
    cache = cache.append(x(B, 4, K, D), x(B, 4, K, D))
    assert cache.lengths.tolist() == [4, 0]
    assert cache.overflowed.tolist() == [False, True]
