"""Repeating kv heads: query head h reads kv head h // n_rep, in either layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.models.heads import repeat_kv_bnsh, repeat_kv_bsnh, repeat_kv_heads

B, S, K, D, DV = 2, 5, 3, 4, 6
BSKD = np.arange(B * S * K * D, dtype=np.float32).reshape(B, S, K, D)


@pytest.mark.parametrize("n_rep", [2, 3, np.int64(4)])
@pytest.mark.parametrize(("repeat", "axis"), [(repeat_kv_bsnh, 2), (repeat_kv_bnsh, 1)])
def test_each_head_is_repeated_consecutively(repeat, axis, n_rep):
    x = np.moveaxis(BSKD, 2, axis)
    out = np.moveaxis(np.asarray(repeat(jnp.asarray(x), n_rep)), axis, 2)
    assert out.shape == (B, S, K * n_rep, D)
    for h in range(K * n_rep):
        np.testing.assert_array_equal(out[:, :, h], BSKD[:, :, h // n_rep])


@pytest.mark.parametrize("repeat", [repeat_kv_bsnh, repeat_kv_bnsh])
def test_one_repetition_returns_x_in_its_own_layout(repeat):
    x = jnp.asarray(BSKD, jnp.bfloat16)
    assert repeat(x, 1) is x


def test_key_and_value_of_different_head_dims():
    k, v = jnp.asarray(BSKD), jax.random.normal(jax.random.key(0), (B, S, K, DV), jnp.bfloat16)
    k2, v2 = repeat_kv_heads(k, v, 2)
    np.testing.assert_array_equal(k2, np.repeat(BSKD, 2, axis=2))
    np.testing.assert_array_equal(v2, np.repeat(np.asarray(v), 2, axis=2))
    assert v2.dtype == jnp.bfloat16
    assert all(a is b for a, b in zip(repeat_kv_heads(k, v, 1), (k, v), strict=True))


def test_the_gradient_sums_over_a_group():
    cotangent = jax.random.normal(jax.random.key(1), (B, S, K * 2, D))
    _, vjp = jax.vjp(jax.jit(lambda x: repeat_kv_bsnh(x, 2)), jnp.asarray(BSKD))
    np.testing.assert_allclose(vjp(cotangent)[0], cotangent.reshape(B, S, K, 2, D).sum(3), rtol=1e-6)


def test_vmap_adds_a_dimension():
    x = jnp.stack([jnp.asarray(BSKD)] * 2)
    np.testing.assert_array_equal(jax.vmap(lambda y: repeat_kv_bsnh(y, 2))(x)[1], np.repeat(BSKD, 2, axis=2))


@pytest.mark.parametrize("count", [0, -1, 1.0, 2.5, None, "2"])
def test_a_count_that_is_no_positive_integer_is_refused(count):
    with pytest.raises(ValueError, match=rf"n_rep={count!r} must be an integer >= 1"):
        repeat_kv_bsnh(jnp.asarray(BSKD), count)
    with pytest.raises(ValueError, match=rf"num_reps={count!r} must be an integer >= 1"):
        repeat_kv_heads(jnp.asarray(BSKD), jnp.asarray(BSKD), count)


def test_other_ranks_are_refused_even_where_nothing_is_to_be_repeated():
    with pytest.raises(ValueError, match=r"x of shape \(5, 3, 4\) must have rank 4, \[B, S, K, D\], not 3"):
        repeat_kv_bsnh(jnp.ones((5, 3, 4)), 1)
    with pytest.raises(ValueError, match=r"rank 4, \[B, K, S, D\], not 5"):
        repeat_kv_bnsh(jnp.ones((1, 5, 3, 4, 2)), 2)
    with pytest.raises(ValueError, match=r"v of shape \(5, 3, 4\) must have rank 4"):
        repeat_kv_heads(jnp.ones((1, 5, 3, 4)), jnp.ones((5, 3, 4)), 2)


@pytest.mark.slow
def test_a_value_of_other_tokens_or_heads_is_refused():
    with pytest.raises(ValueError, match=r"k of shape \(2, 5, 3, 4\) and v of shape \(2, 5, 1, 4\) must agree"):
        repeat_kv_heads(jnp.asarray(BSKD), jnp.ones((2, 5, 1, 4)), 1)
