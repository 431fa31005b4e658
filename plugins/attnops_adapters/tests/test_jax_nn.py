"""`attnops_adapters.jax_nn`: the conventions of `jax.nn.dot_product_attention`, and what differs on purpose."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from framework_attention import assert_same, normal

from attnops import UnsupportedError
from attnops_adapters.jax_nn import dot_product_attention, use

OF_JAX = jax.nn.dot_product_attention

# T ≠ S, GQA: B 2, T 5, S 7, N 4, K 2, H 8.
QUERY, KEY, VALUE = normal(2, 5, 4, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 8, seed=1)
BIAS = normal(1, 4, 5, 7)
SEEN = np.random.default_rng(0).random((2, 1, 5, 7)) < 0.7
SEEN[..., 0] = True


def lengths(*numbers: int) -> jax.Array:
    return jnp.array(numbers, jnp.int32)


# In each of them all queries that count see some key.
CASES = {
    "plain": {},
    "scale": {"scale": 0.5},
    "causal": {"is_causal": True},
    "causal, more queries than keys": {"is_causal": True, "swapped": True},
    "window": {"local_window_size": 2},
    "window of two sides": {"local_window_size": (3, 1), "is_causal": True},
    "key lengths": {"key_value_seq_lengths": lengths(3, 7)},
    "lengths": {"key_value_seq_lengths": lengths(3, 7), "query_seq_lengths": lengths(5, 2)},
    "mask": {"mask": SEEN},
    "mask by head": {"mask": np.repeat(SEEN, 4, 1), "is_causal": True},
    "mask of three dimensions": {"mask": SEEN[0], "bias": BIAS[0]},
    "mask of two dimensions": {"mask": SEEN[0, 0], "bias": BIAS[0, 0, 0]},
    "integer bias": {"bias": np.arange(7, dtype=np.int32).reshape(1, 1, 1, 7)},
    "all": {
        "bias": BIAS,
        "mask": SEEN,
        "is_causal": True,
        "scale": 0.3,
        "local_window_size": (4, 0),
        "key_value_seq_lengths": lengths(6, 7),
        "query_seq_lengths": lengths(5, 3),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n == "all" else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
@pytest.mark.tier(every=7)
def test_values_and_gradients_are_those_of_jax(name: str) -> None:
    case = dict(CASES[name])
    arrays = (KEY.repeat(2, 2), QUERY[:, :, :2], VALUE[:, :5]) if case.pop("swapped", False) else (QUERY, KEY, VALUE)

    def ours(query, key, value):
        return dot_product_attention(query, key, value, implementation="vanilla", **case)

    assert_same(ours, lambda *a: OF_JAX(*a, **case), *arrays)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.tier(every=3)
def test_flash_has_the_values_and_residuals_of_jax(dtype) -> None:
    def attend(function, **options):
        return lambda *a: function(*a, bias=BIAS.astype(a[0].dtype), is_causal=True, return_residual=True, **options)

    ours, theirs = attend(dot_product_attention, implementation="flash"), attend(OF_JAX)
    assert [x.dtype for x in ours(*(jnp.asarray(x, dtype) for x in (QUERY, KEY, VALUE)))] == [dtype, dtype]
    assert_same(ours, theirs, QUERY, KEY, VALUE, dtype=dtype)


@pytest.mark.slow
def test_the_gradient_of_a_bias_is_that_of_jax() -> None:
    def attend(function, **options):
        return lambda bias: function(QUERY.astype(bias.dtype), *(x.astype(bias.dtype) for x in (KEY, VALUE)), bias)

    assert_same(attend(dot_product_attention), attend(OF_JAX), BIAS)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.tier(quick=["True"])
def test_arrays_without_a_batch(residual: bool) -> None:
    given = {"return_residual": residual, "query_seq_lengths": lengths(3)}
    found, expected = (f(QUERY[0], KEY[0], VALUE[0], **given) for f in (dot_product_attention, OF_JAX))
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert [x.shape for x in found] == [x.shape for x in expected]
    np.testing.assert_allclose(found[0], expected[0], atol=1e-6)


def test_the_signature_is_that_of_jax() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (dot_product_attention, OF_JAX))
    assert {n: (p.kind, p.default) for n, p in ours.items()} == {n: (p.kind, p.default) for n, p in theirs.items()}


@pytest.mark.parametrize("hidden", [{"mask": np.zeros((1, 1, 5, 7), bool)}, {"key_value_seq_lengths": lengths(0, 7)}])
@pytest.mark.slow
def test_a_fully_masked_row_is_0_where_jax_has_the_mean(hidden) -> None:
    (out, residual), mean = dot_product_attention(QUERY, KEY, VALUE, return_residual=True, **hidden), VALUE[0].mean(0)
    assert (np.asarray(out[0]) == 0).all()
    assert (np.asarray(residual[0]) == -np.inf).all()
    np.testing.assert_allclose(OF_JAX(QUERY, KEY, VALUE, **hidden)[0, 0], mean.repeat(2, 0), atol=1e-5)


@pytest.mark.slow
def test_values_may_have_a_head_dim_of_their_own() -> None:
    out = dot_product_attention(QUERY, KEY, VALUE[..., :3])
    np.testing.assert_allclose(out, OF_JAX(QUERY, KEY, VALUE)[..., :3], atol=1e-6)
    with pytest.raises(ValueError, match="value shape"):
        OF_JAX(QUERY, KEY, VALUE[..., :3])


@pytest.mark.slow
def test_xla_is_jax_itself() -> None:
    options = {"implementation": "xla", "key_value_seq_lengths": lengths(0, 7)}
    found, expected = (f(QUERY, KEY, VALUE, **options) for f in (dot_product_attention, OF_JAX))
    np.testing.assert_array_equal(found, expected)


def test_within_use_jax_nn_is_the_operation() -> None:
    hidden = {"key_value_seq_lengths": lengths(0, 7)}  # where the two differ
    with use("flash", on_unsupported="error"):
        assert (np.asarray(jax.nn.dot_product_attention(QUERY, KEY, VALUE, **hidden)[0]) == 0).all()
        with use("vanilla"):
            assert jax.nn.dot_product_attention is dot_product_attention
        with pytest.raises(RuntimeError, match="of its own"), use("vanilla"):
            raise RuntimeError("of its own")
        assert jax.nn.dot_product_attention is dot_product_attention
        out = jax.nn.dot_product_attention(QUERY, KEY, VALUE, implementation="xla", **hidden)
        assert np.asarray(out[0]).any()
    assert jax.nn.dot_product_attention is OF_JAX


def test_uses_may_end_in_any_order() -> None:
    """As those of two threads do."""
    first, second = use("vanilla"), use("flash")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert jax.nn.dot_product_attention is dot_product_attention
    second.__exit__(None, None, None)
    assert jax.nn.dot_product_attention is OF_JAX
    with pytest.raises(ValueError, match="layout"), use("flash", layout="BHTD"):
        pass


def test_use_names_the_operation_and_its_metadata() -> None:
    with use("sdpa", on_unsupported="error"), pytest.raises(UnsupportedError, match="return_lse"):
        jax.nn.dot_product_attention(QUERY, KEY, VALUE, return_residual=True)
    with pytest.raises(ValueError, match="flsh"), use("flsh"):
        pass
    assert jax.nn.dot_product_attention is OF_JAX


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask": SEEN.astype(np.float32)}, "float32.*boolean.*bias"),
        ({"mask": SEEN[..., :5]}, r"\(2, 1, 5, 5\): its dimension S is 5"),
        ({"bias": BIAS[None]}, r"bias has shape \(1, 1, 4, 5, 7\)"),
        ({"query": QUERY[0]}, "same batch"),
        ({"query": QUERY[0, 0]}, r"query has shape \(4, 8\)"),
        ({"key": KEY[:, :6]}, "value"),
        ({"key_value_seq_lengths": lengths(1)}, "shape"),
        ({"local_window_size": -1}, "left"),
        ({"implementation": "fast"}, "fast"),
        ({"scale": np.nan}, "nan"),
    ],
)
def test_what_does_not_fit_is_refused(change, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dot_product_attention(**{"query": QUERY, "key": KEY, "value": VALUE} | change)
