import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnops
from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, SlidingWindow
from attnops_caches import DenseCache
from attnops_testing import oracle

B, T, S, H, K, D = 1, 5, 7, 4, 2, 8
QUERY, KEY, VALUE = (
    np.random.default_rng(i).normal(size=(B, n, heads, D)).astype(np.float32)
    for i, (n, heads) in enumerate(((T, H), (S, K), (S, K)))
)
# Positions are aligned at the end.
Q, KV = np.arange(S - T, S)[:, None], np.arange(S)
PADDING = (np.arange(S) != 3)[None, None, None]


def compiled(**options):
    return jax.jit(lambda *arrays: attnops.attention(*arrays, **options))(QUERY, KEY, VALUE)


@pytest.mark.parametrize(
    ("sugar", "seen"),
    [
        ({}, np.ones((T, S), bool)),
        ({"causal": True}, KV <= Q),
        ({"window": (1, None)}, KV >= Q - 1),
        ({"causal": True, "window": (2, 1), "mask": PADDING}, (KV <= Q) & (KV >= Q - 2) & PADDING[0, 0]),
        ({"causal": True, "mask": SlidingWindow(2, 0), "logits_soft_cap": 2.0}, (KV <= Q) & (KV >= Q - 2)),
    ],
    ids=["plain", "causal", "window", "all", "a mask object"],
)
def test_causal_and_window_are_masks_and_the_answer_is_the_oracles(sugar, seen):
    expected = oracle.attention(
        QUERY, KEY, VALUE, mask=np.broadcast_to(seen, (B, H, T, S)), logits_soft_cap=sugar.get("logits_soft_cap")
    )
    out = compiled(**sugar)
    assert isinstance(out, jax.Array)
    assert out.shape == (B, T, H, D)
    np.testing.assert_allclose(out, expected.out, atol=1e-5)


def test_what_is_asked_for_besides_the_output_is_returned_with_it():
    out = jax.eval_shape(lambda: attnops.attention(QUERY, KEY, VALUE, return_lse=True))
    assert out.logsumexp.shape == (B, H, T)
    assert out.attention_outputs.shape == (B, T, H, D)
    largest = jax.eval_shape(lambda: attnops.attention(QUERY, KEY, VALUE, return_max_logits=True))
    assert (largest.max_logits.shape, largest.logsumexp) == ((B, H, T), None)
    weights = jax.eval_shape(lambda: attnops.attention(QUERY, KEY, VALUE, operation="vanilla", return_weights=True))
    assert weights.attention_weights.shape == (B, H, T, S)
    heads_first = OperationMetadata(layout="BHTD")
    arrays = (x.swapaxes(1, 2) for x in (QUERY, KEY, VALUE))
    assert jax.eval_shape(lambda *x: attnops.attention(*x, metadata=heads_first), *arrays).shape == (B, H, T, D)


def test_the_same_function_attends_over_a_cache():
    @jax.jit
    def over_cache(query, key, value):
        cache = DenseCache.create(batch=B, length=16, kv_heads=K, head_dim=D, dtype=jnp.float32).append(key, value)
        return attnops.attention(query, cache, causal=True)

    expected = oracle.attention(QUERY, KEY, VALUE, mask=np.broadcast_to(KV <= Q, (B, H, T, S)))
    np.testing.assert_allclose(over_cache(QUERY, KEY, VALUE), expected.out, atol=1e-5)


def test_dropout_is_that_of_the_call_or_of_the_metadata():
    key, metadata = jax.random.key(3), OperationMetadata(dropout_prob=0.5)
    out = compiled(dropout_key=key, dropout_prob=0.5)
    np.testing.assert_array_equal(out, compiled(dropout_key=key, metadata=metadata))
    assert np.abs(out - oracle.attention(QUERY, KEY, VALUE).out).max() > 0.1
    with pytest.raises(ValueError, match=r"dropout_prob=0.5 needs dropout_key"):
        attnops.attention(QUERY, KEY, VALUE, dropout_prob=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 4}, r"window=4 must be \(left, right\).* sliding_window=n is \(n - 1, 0\)"),
        ({"window": (-1, 0)}, r"left=-1.*None for all"),
        ({"causal": 1}, "causal=1 must be True or False"),
        ({"mask": Causal}, r"mask is the class Causal, but must be an instance: mask=Causal\(...\)"),
        ({"is_causal": True}, r"no option 'is_causal'.*write mask=attnops.masks.Causal\(\), or causal=True"),
        (
            {"window_size": (1, 1)},
            r"write mask=.*SlidingWindow\(left, right\), or window=\(left, right\)",
        ),
        ({"segment_ids": QUERY}, "write mask=attnops.masks.Segments"),
        ({"softcap": 3.0}, "write logits_soft_cap="),
        ({"attn_mask": PADDING}, "write mask="),
        ({"sm_scale": 1.0}, "write softmax_scale="),
        ({"softmax_scal": 1.0}, "did you mean 'softmax_scale'"),
        ({"nonsense": 1.0}, r"\['bias', .*'mode'.*\]$"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_understood_is_refused_in_the_words_to_use(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        attnops.attention(QUERY, KEY, VALUE, **options)


def test_operations_know_the_words_of_other_libraries_too():
    flash = OperationRegistry.create("flash")
    with pytest.raises(TypeError, match=r"FlashAttention has no option 'causal'.*Causal\(\)"):
        flash(QUERY, KEY, VALUE, causal=True)


def test_it_is_differentiable_inside_jit():
    def loss(query):
        return jnp.sum(attnops.attention(query, KEY, VALUE, causal=True) ** 2)

    mask = np.broadcast_to(KV <= Q, (B, H, T, S))
    out = oracle.attention(QUERY, KEY, VALUE, mask=mask).out
    expected = oracle.attention_gradients(QUERY, KEY, VALUE, d_out=2 * out, mask=mask)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(QUERY), expected.values["query"], atol=1e-4)
