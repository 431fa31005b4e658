"""`mosaic`: what it refuses, and that its calls of tokamax mean what the contract says.

tokamax's function is replaced by one that computes what its documentation says, in JAX, since the kernel needs a GPU.
`tests/parity/test_tokamax_plugin.py` calls tokamax itself.
"""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata
from attnops.masks import Causal, Full, KeyPadding, Segments, SlidingWindow
from attnops_testing.features import FEATURES
from attnops_testing.runner import Status, Subject
from attnops_tokamax import MosaicAttention, operation

CUDA = OperationMetadata(platform="cuda", on_unsupported="error")
Q = jax.ShapeDtypeStruct((2, 40, 4, 64), jnp.bfloat16)
SUBJECT = Subject(operation=MosaicAttention, platform="cuda")
SERVED = {
    "bfloat16", "runtime_dtype", "GQA", "MQA", "T < S", "T > S", "T = 1", "odd lengths", "Causal",
    "softmax_scale", "large logits", "soft cap", "layout BHTD",
}  # fmt: skip


def documented(query, key, value, *, scale, is_causal, key_value_seq_lengths, logits_soft_cap, implementation):
    """`tokamax.dot_product_attention`: query [B, T, N, D], key and value [B, S, K, D]."""
    assert implementation == "mosaic"
    assert query.shape[1] % 256 == key.shape[1] % 256 == 0
    T, S = query.shape[1], key.shape[1]
    seen = jnp.tril(jnp.ones((T, S), bool)) if is_causal else jnp.ones((T, S), bool)
    seen = jnp.broadcast_to(seen, (query.shape[0], 1, T, S))
    if key_value_seq_lengths is not None:
        seen &= jnp.arange(S) < key_value_seq_lengths[:, None, None, None]
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], 2).astype(jnp.float32) for x in (key, value))
    scores = scale * jnp.einsum("btnd,bsnd->bnts", query.astype(jnp.float32), key)
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min))
    return jnp.einsum("bnts,bsnd->btnd", weights, value).astype(query.dtype)


@pytest.fixture(autouse=True)
def tokamax(monkeypatch):
    module = types.ModuleType("tokamax")
    module.__spec__ = types.SimpleNamespace()
    module.dot_product_attention = documented
    monkeypatch.setitem(sys.modules, "tokamax", module)
    monkeypatch.setattr(operation, "capability", lambda: 9.0)
    return module


@pytest.mark.slow
def test_what_it_serves_is_right():
    assert {name for name in FEATURES if SUBJECT.refusal([name]) is None} == SERVED
    outcomes = [SUBJECT.check([name]) for name in sorted(SERVED)]
    assert all(outcome.status is Status.RIGHT for outcome in outcomes), outcomes


def test_a_causal_mask_that_hides_a_key_too_many_is_wrong(monkeypatch):
    attend = operation.attend
    monkeypatch.setattr(operation, "attend", lambda q, k, v, length, *others: attend(q, k, v, length - 1, *others))
    assert SUBJECT.check(["T < S"]).status is Status.WRONG


@pytest.mark.parametrize(
    ("mask", "options", "rule"),
    [
        (KeyPadding(np.ones((2, 40), bool)), {}, "must be absent or plain causal"),
        (Causal(offset=1), {}, "must be absent or plain causal"),
        (SlidingWindow(5, 2), {}, "must be absent or plain causal"),
        (Causal() & Segments(np.arange(80).reshape(2, 40) // 9), {}, "must be absent or plain causal"),
        (None, {"softmax_scale": -1.0}, "must not be negative"),
        (None, {"return_lse": True}, "forward_cuda has no such option"),
    ],
)
def test_refusals_have_reasons(mask, options, rule):
    op = MosaicAttention(CUDA)
    (reason,) = op.reasons(op.request(Q, Q, Q, mask=mask, **options))
    assert rule in str(reason)


@pytest.mark.slow
def test_keys_that_no_query_sees_may_hold_nan():
    q, k = jnp.ones((1, 3, 2, 64), jnp.bfloat16), jnp.ones((1, 5, 1, 64), jnp.bfloat16).at[:, 3:].set(jnp.nan)
    op = MosaicAttention(CUDA)
    out, pull_back = jax.vjp(lambda *x: op(*x, mask=Causal(offset=0)).attention_outputs, q, k, k)
    np.testing.assert_array_equal(out, jnp.ones_like(q))
    _, dk, dv = pull_back(out)
    np.testing.assert_array_equal(dk[:, 3:], jnp.zeros_like(dk[:, 3:]))
    np.testing.assert_allclose(dv.astype(np.float32).sum(), 3 * 2 * 64, rtol=0.01)


@pytest.mark.parametrize("mask", [None, Full(), Causal()])
def test_plain_and_causal_calls_are_served(mask):
    op = MosaicAttention(CUDA)
    assert op.reasons(op.request(Q, Q, Q, mask=mask, logits_soft_cap=5.0)) == []


@pytest.mark.parametrize("found", [None, 8.9, 12.0])
def test_other_devices_are_refused(monkeypatch, found):
    monkeypatch.setattr(operation, "capability", lambda: found)
    op = MosaicAttention(CUDA)
    (reason,) = op.reasons(op.request(Q, Q, Q))
    assert f"={found!r}: must be Hopper (9.0) or Blackwell" in str(reason)


def test_without_tokamax_it_is_refused(monkeypatch):
    monkeypatch.delitem(sys.modules, "tokamax")
    monkeypatch.setattr(operation.importlib.util, "find_spec", lambda name: None)
    op = MosaicAttention(CUDA)
    (reason,) = op.reasons(op.request(Q, Q, Q))
    assert "pip install tokamax" in str(reason)


def test_a_second_derivative_is_refused():
    x = jnp.ones((1, 4, 1, 64), jnp.bfloat16)
    op = MosaicAttention(CUDA)

    def total(x):
        return op(x, x, x).attention_outputs.sum()

    with pytest.raises(Exception, match="tokamax's kernel has no second derivative"):
        jax.grad(lambda x: jax.grad(total)(x).sum())(x)


def test_auto_does_not_pick_it():
    assert MosaicAttention.rank(MosaicAttention(CUDA).request(Q, Q, Q)) is None


def test_the_capability_is_that_of_the_default_device(monkeypatch):
    monkeypatch.undo()
    assert operation.capability() is None
    for stated, found in (("9.0", 9.0), ("10.3", 10.3), ("gfx942", None)):
        device = types.SimpleNamespace(compute_capability=stated)
        monkeypatch.setattr(operation, "get_default_device", lambda device=device: device)
        assert operation.capability() == found
