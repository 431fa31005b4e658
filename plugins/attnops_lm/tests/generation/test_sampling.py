"""Tokens are drawn from the distribution that is asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops_lm.generation.sampling import Sampling, limited, row_keys, sample


def reference(scores: np.ndarray, temperature: float, k: int, p: float, m: float) -> np.ndarray:
    """Probabilities of one row, by sorting."""
    x = scores.astype(np.float64) / temperature
    order = np.argsort(-x)
    kept = order[: k or len(x)]
    shares = np.exp(x[kept] - x.max())
    shares /= shares.sum()
    before = np.cumsum(shares) - shares
    largest = shares[0]
    chosen = [(i, s) for i, s, b in zip(kept, shares, before, strict=True) if b < p and s >= m * largest]
    result = np.zeros(len(x))
    for i, s in chosen:
        result[i] = s
    return result / result.sum()


CASES = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 9, 0.6, 0.0),
    (1.0, 0, 1.0, 0.2),
    (2, 20, 0.9, 0.1),
]


@pytest.mark.parametrize(("temperature", "k", "p", "m"), CASES)
def test_limits_are_those_of_a_sort(temperature: float, k: int, p: float, m: float) -> None:
    scores = np.random.default_rng(0).normal(0, 2, (4, 64)).astype(np.float32)
    left = limited(jnp.asarray(scores / np.float32(temperature)), Sampling.create(temperature, k, p, m))
    found = np.asarray(jax.nn.softmax(left, axis=-1))
    wanted = np.stack([reference(row, temperature, k, p, m) for row in scores])
    np.testing.assert_array_equal(found > 0, wanted > 0)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.slow
def test_draws_have_the_frequencies_of_the_distribution() -> None:
    N = 20_000
    scores = np.random.default_rng(1).normal(0, 2, 16).astype(np.float32)
    keys = row_keys(jax.random.key(5), N)
    tokens = sample(jnp.broadcast_to(scores, (N, 16)), keys, Sampling.create(0.8, 6, 0.9))
    wanted = reference(scores, 0.8, 6, 0.9, 0.0)
    found = np.bincount(np.asarray(tokens), minlength=16) / N
    assert not found[wanted == 0].any()
    np.testing.assert_allclose(found, wanted, atol=4 * np.sqrt(0.25 / N))


@pytest.mark.slow
def test_rows_have_their_own_limits_and_temperature_0_takes_the_largest() -> None:
    scores = jnp.asarray(np.random.default_rng(2).normal(size=(64, 32)), jnp.float32)
    k = np.where(np.arange(64) < 32, 1, 0)
    temperature = np.where(np.arange(64) % 2, 5.0, 0.0)
    tokens = np.asarray(sample(scores, row_keys(jax.random.key(0), 64), Sampling.create(temperature, k)))
    largest = np.asarray(scores.argmax(-1))
    fixed = (k == 1) | (temperature == 0)
    np.testing.assert_array_equal(tokens[fixed], largest[fixed])
    assert (tokens[~fixed] != largest[~fixed]).sum() > 8


@pytest.mark.slow
def test_forbidden_tokens_are_never_drawn_and_ties_are_kept() -> None:
    scores = jnp.asarray([[0.0, -jnp.inf, 1.0, 1.0, 1.0]] * 500)
    tokens = np.asarray(sample(scores, row_keys(jax.random.key(0), 500), Sampling.create(1.0, top_k=2)))
    assert set(tokens.tolist()) == {2, 3, 4}
    assert 1 not in np.asarray(sample(scores, row_keys(jax.random.key(0), 500), Sampling.create(100.0)))


def test_keys_of_another_shape_are_refused() -> None:
    assert row_keys(jax.random.PRNGKey(0), 3).shape == (3,)
    with pytest.raises(ValueError, match=r"prng_key has \(2,\) keys, but must be one key, or one for each of 3 rows"):
        row_keys(jax.random.split(jax.random.key(0), 2), 3)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 2}])
def test_a_temperature_near_zero_draws_the_largest_score(options: dict[str, float]) -> None:
    scores, keys = jnp.array([[1.0, 90.0, 100.0, -2.0]]), row_keys(jax.random.key(0), 1)
    assert sample(scores, keys, Sampling.create(1e-37, **options)).tolist() == [2]


@pytest.mark.slow
def test_a_top_p_near_zero_draws_the_largest_score() -> None:
    scores, keys = jnp.array([[1.0, 3.0, 3.5, -2.0]]), row_keys(jax.random.key(0), 1)
    assert sample(scores, keys, Sampling.create(1.0, top_p=1e-300)).tolist() == [2]
