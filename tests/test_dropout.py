"""The portable dropout: the same mask everywhere, and a fair one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.dropout import ShiftedKey, dropout_keep, dropout_mask, dropout_rows, dropout_seed
from attnops_testing import oracle


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.tier(quick=["rbg"])
def test_equals_the_oracles_arithmetic(impl):
    key = jax.random.key(5, impl=impl)
    shape = (2, 3, 17, 33)
    np.testing.assert_array_equal(dropout_mask(key, 0.3, shape), oracle.dropout_keep(dropout_seed(key)[:2], 0.3, shape))
    raw = jax.random.key_data(key)
    np.testing.assert_array_equal(dropout_mask(raw, 0.3, shape), dropout_mask(key, 0.3, shape))


@pytest.mark.slow
def test_a_tile_is_a_part_of_the_whole():
    key = jax.random.key(1)
    whole = dropout_mask(key, 0.5, (2, 4, 32, 64))
    i, j = jnp.arange(8, 16)[:, None], jnp.arange(48, 64)
    tile = dropout_keep(dropout_rows(dropout_seed(key), 1, 3, i), j, 0.5)
    np.testing.assert_array_equal(tile, whole[1, 3, 8:16, 48:])


@pytest.mark.slow
def test_a_shifted_key_is_of_a_part():
    key = jax.random.key(1)
    whole = dropout_mask(key, 0.5, (3, 4, 32, 64))
    part = dropout_mask(ShiftedKey(key, b=1, h=jnp.int32(2), i=5, j=40), 0.5, (2, 2, 20, 24))
    np.testing.assert_array_equal(part, whole[1:, 2:, 5:25, 40:])
    apart = dropout_mask(ShiftedKey(key, i=1, j=2, i_step=4, j_step=3), 0.5, (3, 4, 7, 20))
    np.testing.assert_array_equal(apart, whole[:, :, 1:29:4, 2:62:3])


@pytest.mark.slow
def test_the_mask_is_the_same_in_every_version():
    """The mask must never change between versions: models that are trained on would diverge from their past."""
    mask = np.asarray(dropout_mask(jax.random.key(0), 0.5, (1, 1, 4, 8)))[0, 0]
    assert ["".join("x."[int(kept)] for kept in row) for row in mask] == KNOWN


KNOWN = ["x.xxxxxx", "x...x..x", "....x.x.", "x..xxx.x"]


@pytest.mark.parametrize("prob", [0.1, 0.5, 0.9])
@pytest.mark.tier(quick=["0.5"])
def test_the_mask_is_fair_and_independent_of_neighbours(prob):
    shape = (2, 2, 256, 256)
    dropped = 1 - np.asarray(dropout_mask(jax.random.key(7), prob, shape)).astype(float)
    deviation = np.sqrt(prob * (1 - prob))
    # Five standard errors of the mean over n draws.
    assert abs(dropped.mean() - prob) < 5 * deviation / np.sqrt(dropped.size)
    normal = (dropped - prob) / deviation
    for axis in range(4):
        assert abs(normal.mean(axis=tuple(a for a in range(4) if a != axis))).max() < 5 / np.sqrt(
            dropped.size / shape[axis]
        )
        for shift in (1, 2):
            if shift < shape[axis]:
                correlation = (normal * np.roll(normal, shift, axis)).mean()
                assert abs(correlation) < 5 / np.sqrt(dropped.size)
    other = 1 - np.asarray(dropout_mask(jax.random.key(8), prob, shape)).astype(float)
    assert abs((normal * (other - prob)).mean() / deviation) < 5 / np.sqrt(dropped.size)


@pytest.mark.slow
def test_under_vmap_each_slice_draws_by_its_own_key():
    """Indices count within a slice: one key draws one mask for all, split keys draw others. So the docstring says."""
    operation = OperationRegistry.create("vanilla", OperationMetadata(dropout_prob=0.5))
    q = jnp.ones((3, 1, 8, 2, 4))

    def dropped(q, key):
        return operation(q, q, q, dropout_key=key, return_weights=True).attention_weights == 0

    key = jax.random.key(0)
    same = jax.vmap(dropped, in_axes=(0, None))(q, key)
    assert (same == dropped(q[0], key)).all()
    keys = jax.random.split(key, 3)
    each = jnp.stack([dropped(q[i], keys[i]) for i in range(3)])
    np.testing.assert_array_equal(jax.vmap(dropped)(q, keys), each)
    assert len({mask.tobytes() for mask in np.asarray(each)}) == 3


@pytest.mark.parametrize("mode", ["decode", "prefill", "insert"])
@pytest.mark.slow
def test_outside_training_a_key_is_optional_and_counts(mode):
    operation = OperationRegistry.create("vanilla", OperationMetadata(dropout_prob=0.5, mode=mode))
    q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 64, 2, 4))
    assert (operation(q, k, k, return_weights=True).attention_weights > 0).all()
    weights = operation(q, k, k, dropout_key=jax.random.key(0), return_weights=True).attention_weights
    kept = dropout_mask(jax.random.key(0), 0.5, (1, 2, 1, 64))
    np.testing.assert_array_equal(weights > 0, kept)
