"""What the wrapper of a kernel needs: each helper makes a plain kernel keep the contract, by the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import NotDifferentiableError, OperationImpl, OperationOutput, kernels
from attnops.kernels import once_differentiable, pad_to_multiple, repair_empty_rows, unpad, zero_unseen
from attnops.masks import KeyPadding, Segments, SlidingWindow
from attnops_testing.runner import Status, Subject


def somebodys_kernel(q, k, v, q_ids, kv_ids, low, high):
    """A kernel as others write them: lengths of 16, no GQA, the mean of the values where no key is seen."""
    assert q.shape[1] % 16 == k.shape[1] % 16 == 0
    scores = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * q.shape[-1] ** -0.5
    difference = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None]
    seen = (difference >= (-999 if low is None else low)) & (difference <= (999 if high is None else high))
    if q_ids is not None:
        seen = seen & (q_ids[:, None, :, None] == kv_ids[:, None, None, :])
    scores = jnp.where(seen, scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest")
    return out, jax.nn.logsumexp(scores, axis=-1), jax.lax.stop_gradient(scores.max(-1))


class Wrapped(OperationImpl):
    """The kernel under the contract, by the kit alone."""

    @classmethod
    def get_impl_name(cls):
        return "wrapped"

    def forward_native(self, query, key, value, *, mask=None, return_lse=False, return_max_logits=False):
        T, S, group = query.shape[1], key.shape[1], query.shape[2] // key.shape[2]
        low = high = segments = None
        if mask is not None:
            (low, high), segments = mask.split().band.limits, mask.split().segments
            rest = mask.split().rest
            assert rest is None or isinstance(rest, KeyPadding)
            if rest is not None:  # keys that are padding are in no query's segment
                q_ids, kv_ids = (segments.q_ids, segments.kv_ids) if segments else (np.ones((1, T), int),) * 2
                segments = Segments(q_ids, jnp.where(rest.is_token, kv_ids, -7))
        arrays = zero_unseen(query, key, value, mask)
        padded = pad_to_multiple(*arrays, 16, segments)
        k, v = (jnp.repeat(x, group, axis=2) for x in (padded.key, padded.value))
        ids = (None, None) if padded.segments is None else (padded.segments.q_ids, padded.segments.kv_ids)
        run = once_differentiable(somebodys_kernel, "the wrapped kernel has no second derivative")
        out, lse, highest = run(padded.query, k, v, *ids, low, high)
        output = unpad(OperationOutput(out.astype(query.dtype), logsumexp=lse, max_logits=highest), T)
        return repair_empty_rows(output, mask, S)

    def unsupported(self, request):
        return ()


SUBJECT = Subject(operation=Wrapped)


@pytest.mark.parametrize(
    "names",
    [("GQA", "odd lengths"), ("T < S", "Causal", "logsumexp"), ("SlidingWindow", "T > S", "max logits"),
     ("GQA", "Segments"), ("KeyPadding",)],
    ids="+".join,
)  # fmt: skip
@pytest.mark.tier(quick=["T < S+Causal+logsumexp", "SlidingWindow+T > S+max logits"])
def test_a_plain_kernel_with_the_kit_keeps_the_contract(names):
    outcome = SUBJECT.check(names)
    assert outcome.status is Status.RIGHT, outcome.detail


@pytest.mark.slow
def test_hidden_tokens_may_hold_nan_and_empty_rows_are_zero():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 16, 2, 4)), jnp.float32) for _ in range(3))
    mask = (SlidingWindow(0, 0, offset=12)).bind(1, 2, 16, 16)  # queries from 4 on see nothing, nor are keys below 12
    k, v, q = k.at[:, :12].set(jnp.nan), v.at[:, :12].set(jnp.nan), q.at[:, 4:].set(jnp.nan)

    def attend(q, k, v, repair=True):
        arrays = zero_unseen(q, k, v, mask) if repair else (q, k, v)
        out, lse, _ = somebodys_kernel(*arrays, None, None, *mask.split().band.limits)
        return repair_empty_rows(OperationOutput(out, logsumexp=lse), mask, 16)

    def both(v):
        return attend(q, k, v), jax.grad(lambda v: attend(q, k, v).attention_outputs.sum())(v)

    out, gradient = jax.jit(both)(v)
    np.testing.assert_allclose(out.attention_outputs[0, :4], v[0, 12:], rtol=1e-6)
    assert (np.asarray(out.attention_outputs[0, 4:]) == 0).all()
    assert (np.asarray(out.logsumexp[0, :, 4:]) == -np.inf).all()
    assert np.isfinite(out.logsumexp[0, :, :4]).all()
    np.testing.assert_allclose(gradient[0, :, 0, 0], [0] * 12 + [1] * 4)
    assert np.isnan(jax.jit(lambda: attend(q, k, v, repair=False))().attention_outputs[0, :4]).any()


@pytest.mark.parametrize("traced", [False, True])
def test_padding_is_in_a_segment_of_its_own(traced):
    largest = np.iinfo(np.int32).max
    for ids in ([[3, 3, 5]], [[largest, 0, 1]]):
        array = np.asarray(ids, np.int32)
        array = jnp.asarray(array) if traced else array
        x = jnp.ones((1, 3, 1, 2))
        q, k, v, segments = pad_to_multiple(x, x, x, (2, 4), Segments(array, array))
        assert (q.shape[1], k.shape[1], v.shape[1]) == (4, 4, 4)
        np.testing.assert_array_equal(segments.q_ids[:, :3], ids)
        assert int(segments.q_ids[0, 3]) not in ids[0]
        assert isinstance(segments.q_ids, np.ndarray) is not traced
        assert (np.asarray(k[:, 3:]) == 0).all()
    assert pad_to_multiple(x, x, x, 3).segments is None
    with pytest.raises(ValueError, match="multiple=0 must be positive"):
        pad_to_multiple(x, x, x, 0)


@pytest.mark.slow
def test_a_second_derivative_is_refused_and_the_first_is_kept():
    @jax.custom_vjp
    def square(x):
        return x * x

    square.defvjp(lambda x: (x * x, x), lambda x, g: (5 * g * x,))  # not the derivative: it is the function's own
    once = once_differentiable(square, "square has none")
    assert once(jnp.float32(3.0)) == 9
    assert jax.jit(jax.grad(once))(jnp.float32(3.0)) == 15
    assert jax.grad(jax.checkpoint(once))(jnp.float32(3.0)) == 15
    np.testing.assert_array_equal(jax.vmap(jax.grad(once))(jnp.arange(3.0)), 5 * np.arange(3.0))
    for second in (jax.grad(jax.grad(once)), jax.hessian(once), jax.jit(jax.grad(jax.grad(once)))):
        with pytest.raises(NotDifferentiableError, match="square has none"):
            second(jnp.float32(3.0))


def test_all_that_is_public_is_there_and_documented():
    for name in kernels.__all__:
        assert getattr(kernels, name).__doc__, name
