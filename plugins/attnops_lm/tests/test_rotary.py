"""Rotary embeddings against complex multiplication in float64, and the properties that make them rotary."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops_lm.rotary import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    RotaryConfig,
    RotaryScaling,
    YarnScaling,
    apply_rotary,
    apply_rotary_pos_emb,
    inverse_frequencies,
    rotary_tables,
    rotate_half,
    yarn_mscale,
)

DYNAMIC = DynamicNTKScaling(factor=3.0, max_position_embeddings=2048)
YARN = YarnScaling(factor=8.0, original_max_position_embeddings=4096)
SCALINGS = [
    RotaryScaling(),
    LinearScaling(factor=2.5),
    DYNAMIC,
    YARN,
    Llama3Scaling(factor=8.0, original_max_position_embeddings=8192),
]

B, T, H, D = 2, 7, 3, 16
X = np.asarray(jax.random.normal(jax.random.key(0), (B, T, H, D)))
POSITIONS = np.array([[0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 0, 1, 100]])  # left padding, a packed batch, a decode far on


def rotate64(x, positions, frequencies, *, interleaved, scaling=1.0):
    """Pairs as complex numbers, turned by e^(i·angle); x ``[B, T, H, D]``, positions ``[B, T]``."""
    half = len(frequencies)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    x = np.asarray(x, np.float64)
    turn = np.exp(1j * positions[:, :, None, None] * frequencies.astype(np.float64)) * scaling
    turned, out = (x[..., first] + 1j * x[..., second]) * turn, x.copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("layout", ["BTHD", "BHTD"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 4, 16])
@pytest.mark.parametrize("scaling", [RotaryScaling(), YARN])
def test_rotation_equals_complex_multiplication(layout, interleaved, rotary_dim, scaling):
    config = RotaryConfig(head_dim=D, rotary_dim=rotary_dim, scaling=scaling, interleaved=interleaved)
    sin, cos = rotary_tables(config, jnp.asarray(POSITIONS))
    assert sin.shape == cos.shape == (B, T, config.rotated_dim // 2)
    x = X if layout == "BTHD" else X.swapaxes(1, 2)
    out = np.asarray(apply_rotary(jnp.asarray(x), sin, cos, layout=layout, interleaved=interleaved))
    frequencies, factor = inverse_frequencies(config)
    expected = rotate64(X, POSITIONS, frequencies, interleaved=interleaved, scaling=factor)
    np.testing.assert_allclose(out if layout == "BTHD" else out.swapaxes(1, 2), expected, atol=3e-5)
    np.testing.assert_array_equal(out[..., config.rotated_dim :], x[..., config.rotated_dim :])


def test_the_two_styles_are_one_rotation_of_permuted_features():
    sin, cos = rotary_tables(RotaryConfig(head_dim=D), POSITIONS)
    apart = np.concatenate([X[..., ::2], X[..., 1::2]], axis=-1)
    out = np.asarray(apply_rotary(jnp.asarray(X), sin, cos, interleaved=True))
    np.testing.assert_allclose(
        np.concatenate([out[..., ::2], out[..., 1::2]], axis=-1), apply_rotary(jnp.asarray(apart), sin, cos), atol=1e-6
    )
    assert not np.allclose(out, apply_rotary(jnp.asarray(X), sin, cos), atol=0.1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_norms_are_kept(interleaved):
    out = apply_rotary(jnp.asarray(X), *rotary_tables(RotaryConfig(head_dim=D), POSITIONS), interleaved=interleaved)
    np.testing.assert_allclose(np.linalg.norm(out, axis=-1), np.linalg.norm(X, axis=-1), rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: type(s).__name__)
def test_scores_depend_on_the_relative_position_only(scaling, interleaved):
    config = RotaryConfig(head_dim=D, rotary_dim=8, scaling=scaling)
    query, key = (jax.random.normal(jax.random.key(i), (1, 1, H, D)) for i in (1, 2))

    def score(q_position, k_position):
        q, k = (
            apply_rotary(x, *rotary_tables(config, jnp.array([p]), seq_len=3000), interleaved=interleaved)
            for x, p in ((query, q_position), (key, k_position))
        )
        return np.asarray((q * k).sum(-1))

    np.testing.assert_allclose(score(105, 100), score(1105, 1100), atol=2e-3)
    np.testing.assert_allclose(score(5, 0), score(2005, 2000), atol=2e-3)
    assert np.abs(score(105, 100) - score(106, 100)).max() > 0.05


def test_yarn_scales_the_scores_by_its_temperature_squared():
    sin, cos = rotary_tables(RotaryConfig(head_dim=D, scaling=YARN), POSITIONS)
    np.testing.assert_allclose(sin**2 + cos**2, yarn_mscale(8.0) ** 2, rtol=1e-5)
    assert yarn_mscale(8.0) == pytest.approx(0.1 * math.log(8) + 1)
    assert yarn_mscale(0.5) == 1.0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_computed_in_float32_and_returned_in_the_tensors_dtype(dtype):
    x = jnp.asarray(X, dtype)
    positions = POSITIONS + 1000
    sin, cos = rotary_tables(RotaryConfig(head_dim=D), positions)
    out = apply_rotary(x, sin, cos)
    assert out.dtype == dtype
    wide = apply_rotary(x.astype(jnp.float32), sin, cos)
    np.testing.assert_array_equal(out.astype(jnp.float32), wide.astype(dtype).astype(jnp.float32))
    full = [jnp.concatenate([t, t], axis=-1)[:, None] for t in (sin, cos)]
    whole = apply_rotary_pos_emb(x.swapaxes(1, 2), *full)
    assert whole.dtype == dtype
    np.testing.assert_array_equal(whole.swapaxes(1, 2).astype(jnp.float32), wide.astype(dtype).astype(jnp.float32))


def test_one_row_of_positions_serves_the_batch_and_jit_takes_the_config_as_static():
    config = RotaryConfig(head_dim=D, scaling=YARN)

    @partial(jax.jit, static_argnums=0)
    def rotate(config, x, positions):
        return apply_rotary(x, *rotary_tables(config, positions))

    shared, each = rotate(config, X, POSITIONS[1]), rotate(config, X, np.stack([POSITIONS[1]] * B))
    np.testing.assert_array_equal(shared, each)
    np.testing.assert_array_equal(shared, rotate(replace(config, base=10000.0), X, POSITIONS[1:]))


@pytest.mark.slow
def test_gradients_turn_back():
    sin, cos = rotary_tables(RotaryConfig(head_dim=D, rotary_dim=8), POSITIONS)
    _, vjp = jax.vjp(lambda x: apply_rotary(x, sin, cos), jnp.asarray(X))
    np.testing.assert_allclose(vjp(jnp.asarray(X))[0], apply_rotary(jnp.asarray(X), -sin, cos), atol=1e-6)


# Tables from position 0 on.


def test_rotate_half_swaps_halves_with_a_sign():
    np.testing.assert_array_equal(rotate_half(jnp.arange(1, 7)), [-4, -5, -6, 1, 2, 3])
    np.testing.assert_array_equal(rotate_half(rotate_half(jnp.asarray(X))), -X)
    with pytest.raises(ValueError, match=r"x of shape \(2, 5\) must have an even last dimension, not 5"):
        rotate_half(jnp.ones((2, 5)))


@pytest.mark.parametrize("rank", [2, 4])
def test_apply_rotary_pos_emb_takes_sin_first_and_the_first_positions(rank):
    frequencies = 1e4 ** (-np.arange(0, D, 2) / D)
    angles = np.concatenate([np.outer(np.arange(20), frequencies)] * 2, axis=-1)
    sin, cos = (jnp.asarray(f(angles), jnp.float32) for f in (np.sin, np.cos))
    if rank == 4:
        sin, cos = sin[None, None], cos[None, None]
    out = apply_rotary_pos_emb(jnp.asarray(X.swapaxes(1, 2)), sin, cos)
    expected = rotate64(X, np.stack([np.arange(T)] * B), frequencies, interleaved=False)
    np.testing.assert_allclose(out.swapaxes(1, 2), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("tensor", "table"),
    [
        ((B, H, T, D), (1, 1, T - 1, D)),  # too short
        ((B, H, T, D), (1, 1, T, D // 2)),  # half a table
        ((B, H, T, D), (B, T, D)),  # would broadcast over heads what is meant for the batch
        ((1, H, T, D), (B, 1, T, D)),  # would enlarge the batch
        ((H, T, D), (T, D)),
    ],
)
def test_apply_rotary_pos_emb_refuses_tables_that_do_not_fit(tensor, table):
    with pytest.raises(
        ValueError, match=r"x of shape .* must fit: x must be floating, sin and cos \[1 or B, 1 or H, >= S, D\]"
    ):
        apply_rotary_pos_emb(jnp.ones(tensor), jnp.ones(table), jnp.ones(table))


@pytest.mark.parametrize(
    ("x", "sin", "cos", "dtype"),
    [
        ((B, T, H, D), (B, H, D // 2), (B, H, D // 2), "float32"),  # the other layout
        ((B, T, H, D), (B, 1, D // 2), (B, 1, D // 2), "float32"),  # one position for every token
        ((B, T, H, D), (3, T, D // 2), (3, T, D // 2), "float32"),
        ((B, T, H, D), (B, T, D), (B, T, D), "float32"),  # R = 2 D
        ((B, T, H, D), (B, T, D // 2), (B, T, D // 4), "float32"),
        ((T, H, D), (T, D // 2), (T, D // 2), "float32"),
        ((B, T, H, D), (B, T, D // 2), (B, T, D // 2), "int32"),
    ],
)
def test_apply_rotary_refuses_tables_that_do_not_fit(x, sin, cos, dtype):
    with pytest.raises(
        ValueError, match=r"must fit: x must be floating, sin and cos \[B, T, R // 2\] or \[T, R // 2\]"
    ):
        apply_rotary(jnp.ones(x, dtype), jnp.ones(sin), jnp.ones(cos))


def test_other_layouts_and_positions_are_refused():
    tables = rotary_tables(RotaryConfig(head_dim=D), POSITIONS)
    with pytest.raises(ValueError, match='layout=\'TBHD\' must be "BTHD" or "BHTD"'):
        apply_rotary(jnp.asarray(X), *tables, layout="TBHD")
    with pytest.raises(ValueError, match=r"positions of shape \(2, 7\) and dtype float32 must be integers"):
        rotary_tables(RotaryConfig(head_dim=D), jnp.asarray(POSITIONS, jnp.float32))
    with pytest.raises(ValueError, match=r"positions of shape \(\) and dtype int32"):
        rotary_tables(RotaryConfig(head_dim=D), jnp.int32(3))


@pytest.mark.slow
def test_dynamic_scaling_asks_for_the_length():
    config = RotaryConfig(head_dim=D, scaling=DYNAMIC)
    with pytest.raises(ValueError, match=r"seq_len=None must be a static int .* \(up to 2048 the base is unchanged\)"):
        rotary_tables(config, POSITIONS)
    plain = inverse_frequencies(RotaryConfig(head_dim=D))[0]
    for length in (1, 2047, 2048):
        np.testing.assert_array_equal(inverse_frequencies(config, seq_len=length)[0], plain)
    assert (inverse_frequencies(config, seq_len=2049)[0][1:] < plain[1:]).all()
