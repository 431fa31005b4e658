"""`attnops_adapters.flash_attn`: flash-attn's conventions, held to its tests' reference, restated in NumPy."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, UnsupportedError
from attnops_adapters import flash_attn

H, K, D = 4, 2, 8


def reference(q, k, v, *, q_lengths=None, k_lengths=None, leftpad=None, causal=False, window=(-1, -1), softcap=0.0,
              slopes=None, scale=None):  # fmt: skip
    """``attention_ref`` and ``construct_local_mask`` of flash-attn's tests, in float64, with the logsumexp.

    Rows have ``q_lengths`` and ``k_lengths`` tokens, padded at the end; those of a cache begin at ``leftpad``. A query
    that sees no key has 0 and −inf.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, heads, d = q.shape
    S = k.shape[1]
    k, v = (np.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    sq = np.full(B, T) if q_lengths is None else np.asarray(q_lengths)
    sk = np.full(B, S) if k_lengths is None else np.asarray(k_lengths)
    first = np.zeros(B, int) if leftpad is None else np.asarray(leftpad)
    left, right = (np.inf if x < 0 else x for x in window)
    right = 0 if causal else right
    scores = np.einsum("bthd,bshd->bhts", q, k) * (d**-0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    row, col = np.arange(T)[None, :, None] + (sk - sq)[:, None, None], np.arange(S)
    if slopes is not None:
        slopes = np.broadcast_to(np.asarray(slopes, np.float64), (B, heads))
        scores = scores - slopes[:, :, None, None] * abs(row - col)[:, None]
    seen = (col <= row + right) & (col >= row - left) & (col < sk[:, None, None]) & (col >= first[:, None, None])
    seen = (seen & (np.arange(T)[None, :, None] < sq[:, None, None]))[:, None]
    scores = np.where(seen, scores, -np.inf)
    maximum = np.maximum(scores.max(-1, keepdims=True), -1e300)
    weights = np.exp(scores - maximum)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, maximum + np.log(total), -np.inf)[..., 0]
    return np.einsum("bhts,bshd->bthd", weights / np.where(total > 0, total, 1), v), lse


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-5, rtol=2e-5)


SLOPES = np.array([0.5, 0.25, 0.1, 0.0], np.float32)
ARGUMENTS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "window to the left": {"window_size": (2, -1)},
    "causal window, cap, scale": {"causal": True, "window_size": (3, 5), "softcap": 2.0, "softmax_scale": 0.4},
    "ALiBi": {"alibi_slopes": SLOPES, "causal": True},
}
ALL = "causal window, cap, scale"


def of_reference(arguments):
    names = {"window_size": "window", "alibi_slopes": "slopes", "softmax_scale": "scale"}
    return {names.get(name, name): x for name, x in arguments.items()}


@pytest.mark.parametrize("lengths", [(5, 7), (7, 5)], ids=str)
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.tier(quick=["causal window, cap, scale-(7, 5)"], every=3)
def test_a_batch(name, lengths):
    (T, S), arguments = lengths, ARGUMENTS[name]
    q, k, v = normal(2, T, H, D), normal(2, S, K, D, seed=1), normal(2, S, K, D, seed=2)
    out, lse, nothing = jax.jit(
        lambda *qkv: flash_attn.flash_attn_func(*qkv, **arguments, return_attn_probs=True, deterministic=True)
    )(q, k, v)
    want = reference(q, k, v, **of_reference(arguments))
    close(out, want[0])
    close(lse, want[1])
    assert nothing is None


@pytest.mark.slow
def test_slopes_by_row_and_packed_arguments():
    qkv, slopes = normal(2, 6, 3, H, D), np.stack([SLOPES, 2 * SLOPES])
    want, _ = reference(*(qkv[:, :, i] for i in range(3)), slopes=slopes)
    close(flash_attn.flash_attn_qkvpacked_func(qkv, alibi_slopes=slopes), want)
    close(flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], alibi_slopes=slopes), want)
    total = qkv.reshape(12, 3, H, D)
    ends = np.array([0, 6, 12], np.int32)
    want, _ = reference(*(qkv[:, :, i] for i in range(3)), causal=True)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(total, ends, 6, causal=True)
    close(packed, want.reshape(12, H, D))
    both = flash_attn.flash_attn_varlen_kvpacked_func(total[:, 0], total[:, 1:], ends, ends, 6, 6, causal=True)
    close(both, packed)


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.tier(quick=[ALL], every=2)
def test_sequences_of_different_lengths(name):
    arguments = ARGUMENTS[name]
    q_lengths, k_lengths = np.array([3, 6, 0, 1]), np.array([5, 2, 3, 7])
    q, k, v = normal(4, 6, H, D), normal(4, 7, K, D, seed=1), normal(4, 7, K, D, seed=2)
    in_q, in_k = np.arange(6) < q_lengths[:, None], np.arange(7) < k_lengths[:, None]
    ends_q, ends_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (q_lengths, k_lengths))

    @jax.jit
    def run(q, k, v, ends_q, ends_k):
        def attend(q, k, v):
            out, lse, _ = flash_attn.flash_attn_varlen_func(
                q, k, v, ends_q, ends_k, 6, 7, **arguments, return_attn_probs=True
            )
            return out, lse

        out, pull_back, lse = jax.vjp(attend, q, k, v, has_aux=True)
        return out, lse, pull_back(out)

    out, lse, grads = run(q[in_q], k[in_k], v[in_k], ends_q, ends_k)
    want, want_lse = reference(q, k, v, q_lengths=q_lengths, k_lengths=k_lengths, **of_reference(arguments))
    close(out, want[in_q])
    close(lse, want_lse.swapaxes(1, 2)[in_q].T)
    assert [g.shape for g in grads] == [q[in_q].shape, k[in_k].shape, v[in_k].shape]
    assert all(np.isfinite(g).all() for g in grads)


def cache_case(paged, leftpad):
    batch, slots, block = 3, 12, 4
    rng = np.random.default_rng(3)
    k_rows, v_rows = normal(batch, slots, K, D, seed=1), normal(batch, slots, K, D, seed=2)
    if not paged:
        rows = np.array([2, 0, 3])
        caches = [np.full((4, slots, K, D), np.nan, np.float32) for _ in range(2)]
        for cache, x in zip(caches, (k_rows, v_rows), strict=True):
            cache[rows] = x
        first = {"cache_leftpad": np.array([1, 0, 2])} if leftpad else {}
        return k_rows, v_rows, caches, {"cache_batch_idx": rows, **first}
    table = rng.permutation(batch * slots // block).reshape(batch, -1)
    caches = [np.empty((table.size, block, K, D), np.float32) for _ in range(2)]
    for cache, x in zip(caches, (k_rows, v_rows), strict=True):
        cache[table.reshape(-1)] = x.reshape(-1, block, K, D)
    return k_rows, v_rows, caches, {"block_table": table}


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("name", ["plain", ALL, "ALiBi"])
@pytest.mark.parametrize("new", [True, False], ids=["new", "old"])
@pytest.mark.tier(quick=[f"new-{ALL}-pages", f"old-{ALL}-rows"], every=3)
def test_a_cache(name, paged, new):
    arguments = ARGUMENTS[name]
    k_rows, v_rows, caches, where = cache_case(paged, leftpad=True)
    lengths, q = np.array([4, 9, 7]), normal(3, 2, H, D)
    k, v = normal(3, 3, K, D, seed=5), normal(3, 3, K, D, seed=6)
    added = {"k": k, "v": v} if new else {}

    @jax.jit
    def run(q, caches, added, lengths, where):
        return flash_attn.flash_attn_with_kvcache(
            q, *caches, **added, cache_seqlens=lengths, **where, **arguments, return_softmax_lse=True
        )

    out, lse, *after = run(q, caches, added, lengths, where)
    after_rows = [x.copy() for x in (k_rows, v_rows)]
    if new:
        for x, tokens in zip(after_rows, (k, v), strict=True):
            for b in range(3):
                x[b, lengths[b] : lengths[b] + 3] = tokens[b]
        index = where["block_table"] if paged else where["cache_batch_idx"]
        for got, x in zip(after, after_rows, strict=True):
            np.testing.assert_array_equal(np.asarray(got)[index].reshape(x.shape), x)
        lengths = lengths + 3
    want, want_lse = reference(
        q, *after_rows, k_lengths=lengths, leftpad=where.get("cache_leftpad"), **of_reference(arguments)
    )
    close(out, want)
    close(lse, want_lse)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.slow
def test_rotary_embeddings(interleaved, causal):
    q, k, v = normal(2, 3, H, D), normal(2, 3, K, D, seed=1), normal(2, 3, K, D, seed=2)
    caches = normal(2, 10, K, D, seed=3), normal(2, 10, K, D, seed=4)
    angles = np.arange(10)[:, None] / np.array([1.0, 10.0])
    lengths = np.array([2, 7])

    def rotated(x, position):
        """Two pairs of features of one token, as complex numbers."""
        out = x.copy()
        for pair, angle in enumerate(angles[position]):
            one, two = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 2)
            z = (x[:, one] + 1j * x[:, two]) * np.exp(1j * angle)
            out[:, one], out[:, two] = z.real, z.imag
        return out

    out, k_after, _ = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, np.cos(angles), np.sin(angles), lengths, causal=causal, rotary_interleaved=interleaved
    )
    k_want, v_want, q_want = caches[0].copy(), caches[1].copy(), q.copy()
    for b, i in np.ndindex(2, 3):
        k_want[b, lengths[b] + i] = rotated(k[b, i], lengths[b] + i)
        v_want[b, lengths[b] + i] = v[b, i]
        q_want[b, i] = rotated(q[b, i], lengths[b] + (i if causal else 0))
    close(k_after, k_want)
    close(out, reference(q_want, k_want, v_want, k_lengths=lengths + 3, causal=causal)[0])


Q, KV = normal(1, 4, H, D), normal(1, 6, K, D)
TOTAL, ENDS = normal(8, H, D), np.array([0, 5, 8])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.flash_attn_func(Q, KV, KV, dropout_p=0.1), "dropout_p=0.1 needs dropout_key=jax.random.key(...)"),
        (lambda f: f.flash_attn_func(Q, KV, KV, 0.1, return_attn_probs=True, dropout_key=jax.random.key(0)), "S_dmask"),
        (lambda f: f.flash_attn_func(Q, KV, KV, window_size=4), "window_size=4 must be (left, right), ints"),
        (lambda f: f.flash_attn_func(Q, KV, KV, causal=1), "causal=1 must be True or False"),
        (lambda f: f.flash_attn_func(Q, KV, KV, softcap=None), "softcap=None must be a number"),
        (lambda f: f.flash_attn_func(Q, KV, KV, alibi_slopes=SLOPES[:3]), "alibi_slopes has shape (3,), but must have"),
        (
            lambda f: f.flash_attn_func(Q[0], KV, KV),
            "q has shape (4, 4, 8), but must be [batch, seqlen, heads",
        ),
        (lambda f: f.flash_attn_qkvpacked_func(Q), "qkv has shape (1, 4, 4, 8), but must be [batch, seqlen, 3, heads"),
        (
            lambda f: f.flash_attn_varlen_func(TOTAL, TOTAL, TOTAL, ENDS, ENDS, 5, 4),
            "max_seqlen_k=4, but a sequence of cu_seqlens_k has 5 tokens: give at least that",
        ),
        (
            lambda f: f.flash_attn_varlen_func(TOTAL, TOTAL, TOTAL, [0, 5, 3], ENDS, 5, 5),
            "cu_seqlens_q=[0, 5, 3] must begin with 0, not decrease",
        ),
        (
            lambda f: f.flash_attn_varlen_func(TOTAL, TOTAL, TOTAL, ENDS, ENDS, 5, 5, block_table=[[0]]),
            "block_table is given, but varlen functions have no pages here",
        ),
        (
            lambda f: f.flash_attn_varlen_func(TOTAL, TOTAL, TOTAL, ENDS, ENDS, 5, 5, alibi_slopes=[SLOPES, SLOPES]),
            "alibi_slopes has shape (2, 4), but must have shape [4]; for slopes by document",
        ),
        (
            lambda f: f.flash_attn_with_kvcache(Q, KV, KV, Q[:, :, :K], Q[:, :, :K], cache_seqlens=3),
            "cache_seqlens has values from 3 to 3, but they must be from 0 to 2: a row of the cache has 6 slots, and 4",
        ),
        (lambda f: f.flash_attn_with_kvcache(Q, KV, KV, KV, KV), "must be given together, but cache_seqlens is None"),
        (
            lambda f: f.flash_attn_with_kvcache(Q, KV, KV, block_table=[[0]], cache_leftpad=[0]),
            "block_table and cache_leftpad are both given",
        ),
        (lambda f: f.flash_attn_with_kvcache(Q, KV, KV, rotary_cos=SLOPES[None]), "are given without k and v"),
        (lambda f: f.flash_attn_with_kvcache(Q, KV[[0, 0]], KV[[0, 0]]), "k_cache has 2 rows and q has batch 1"),
        (
            lambda f: f.flash_attn_with_kvcache(Q, KV, KV[:, :5]),
            "k_cache has shape (1, 6, 2, 8) and v_cache (1, 5, 2, ",
        ),
        (
            lambda f: f.flash_attn_with_kvcache(Q, KV, KV, cache_batch_idx=[1]),
            "cache_batch_idx has values from 1 to 1, but they must be from 0 to 0: the cache has 1 rows",
        ),
        (
            lambda f: f.flash_attn_with_kvcache(Q, KV, KV, cache_leftpad=[-1]),
            "cache_leftpad has values from -1 to -1, but they must be from 0 to 6",
        ),
        (  # the third block has no token
            lambda f: f.flash_attn_with_kvcache(Q, KV, KV, block_table=[[0, 3, -1]], cache_seqlens=12),
            "block_table has values from 0 to 3, but they must be from 0 to 0: the cache has 1 blocks",
        ),
        (
            lambda f: f.flash_attn_with_kvcache(Q, KV, KV, Q[:, :, :1], Q[:, :, :1], cache_seqlens=2),
            "k has shape (1, 4, 1, 8), but must be [batch=1, seqlen_new, kv heads, head_dim], the last two (2, 8)",
        ),
        (lambda f: f.flash_attn_func(Q, KV, KV, softcap=float("nan")), "softcap is NaN"),
        (
            lambda f: f.flash_attn_func(Q, KV, KV, metadata=OperationMetadata(dropout_prob=0.5)),
            "metadata.dropout_prob=0.5 must not be given: the function's arguments determine it",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises((ValueError, UnsupportedError), match=re.escape(message)):
        call(flash_attn)


@pytest.mark.slow
def test_dropout_has_a_key():
    def run(seed):
        return flash_attn.flash_attn_func(Q, KV, KV, 0.5, dropout_key=jax.random.key(seed))

    assert (run(0) == run(0)).all()
    assert not (run(0) == run(1)).all()


def test_half_precision_is_kept():
    q, kv = jnp.zeros((1, 4, H, D), jnp.bfloat16), jnp.zeros((1, 6, K, D), jnp.bfloat16)
    out, lse = jax.eval_shape(lambda q, kv: flash_attn.flash_attn_func(q, kv, kv, return_attn_probs=True)[:2], q, kv)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
