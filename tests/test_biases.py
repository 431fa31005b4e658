"""Structured biases: their values against other derivations, and what they refuse."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry, UnsupportedError
from attnops.biases import ALiBi, RelativePosition, ScoreFn, alibi_slopes
from attnops_testing import oracle
from attnops_testing.problem import Problem


def dense(bias, B, H, T, S):
    bound = bias.bind(B, H, T, S)
    b, h, q, kv = (jnp.arange(n).reshape([-1 if a == i else 1 for a in range(4)]) for i, n in enumerate((B, H, T, S)))
    return np.asarray(bound.apply(jnp.zeros((B, H, T, S), jnp.float32), b, h, q, kv))


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        (1, [1 / 256]),
        # From the ALiBi authors' get_slopes(12): those of 8 heads, then every other of 16.
        (12, [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625,
              0.7071067811865476, 0.35355339059327384, 0.17677669529663692, 0.08838834764831849]),
    ],
)  # fmt: skip
def test_alibi_slopes_are_those_of_the_paper(heads, expected):
    np.testing.assert_allclose(alibi_slopes(heads), expected, rtol=1e-6)


@pytest.mark.parametrize(("T", "S"), [(5, 5), (3, 7), (7, 3), (1, 9)])
@pytest.mark.tier(quick=["3-7"])
def test_alibi_equals_the_oracle(T, S):
    slopes = alibi_slopes(4)
    expected = oracle.alibi(slopes, T, S)
    np.testing.assert_allclose(dense(ALiBi(slopes), 1, 4, T, S), expected, rtol=1e-6)
    assert expected[0, 0, -1, -1] == 0  # the last query stands at the last key


@pytest.mark.slow
def test_buckets_are_those_of_t5():
    """Made by transformers 5.23: T5Attention._relative_position_bucket(distance, bidirectional, 8, 16)."""
    distance = np.array([-40, -16, -9, -6, -5, -3, -2, -1, 0, 1, 2, 3, 5, 6, 9, 16, 40])
    both = RelativePosition(jnp.zeros((8, 1)), bidirectional=True, max_distance=16).bucket(distance)
    behind = RelativePosition(jnp.zeros((8, 1)), bidirectional=False, max_distance=16).bucket(distance)
    np.testing.assert_array_equal(both, BOTH)
    np.testing.assert_array_equal(behind, BEHIND)


BOTH = [3, 3, 3, 3, 2, 2, 2, 1, 0, 5, 6, 6, 6, 7, 7, 7, 7]
BEHIND = [7, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("T", "S"), [(40, 40), (20, 150), (150, 20)])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets", [8, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.tier(quick=["8-False-150-20"], every=3)
def test_relative_position_equals_the_oracle(T, S, bidirectional, buckets):
    table = np.random.default_rng(0).normal(size=(buckets, 3)).astype(np.float32)
    bias = RelativePosition(jnp.asarray(table), bidirectional=bidirectional, max_distance=64)
    np.testing.assert_array_equal(
        dense(bias, 1, 3, T, S), oracle.relative_position(table, T, S, bidirectional, 64).astype(np.float32)
    )


@pytest.mark.parametrize("operation", ["vanilla", "flash"])
@pytest.mark.parametrize("kind", ["alibi", "relative position"])
@pytest.mark.parametrize(
    ("T", "S"), [(17, 53), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((40, 40), (53, 17)))]
)
@pytest.mark.slow
@pytest.mark.tier(every=5)
def test_gradients_of_structured_biases_equal_the_oracle(operation, kind, T, S):
    rng = np.random.default_rng(T)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    bias = ALiBi(jnp.asarray(alibi_slopes(4))) if kind == "alibi" else RelativePosition(jnp.asarray(normal(8, 4)))
    problem = Problem(
        query=normal(2, T, 4, 8), key=normal(2, S, 2, 8), value=normal(2, S, 2, 8),
        options={"bias": bias}, metadata=OperationMetadata(block_q=16, block_k=16),
    )  # fmt: skip
    problem.check(OperationRegistry.create(operation, problem.metadata))


def test_a_bias_is_a_pytree_of_its_arrays():
    for bias in (ALiBi(jnp.ones(2)), RelativePosition(jnp.ones((8, 2)), max_distance=9), ScoreFn(jnp.add, (1.0,))):
        leaves, tree = jax.tree.flatten(bias)
        assert len(leaves) == 1
        assert type(jax.tree.unflatten(tree, leaves)) is type(bias)
    assert jax.tree.unflatten(*reversed(jax.tree.flatten(RelativePosition(0.0, max_distance=9)))).max_distance == 9


@pytest.mark.slow
def test_parameters_may_be_lists():
    q = jnp.ones((1, 4, 2, 8))
    slopes, table = [0.5, 0.25], [[0.1 * i, 0.2] for i in range(8)]
    for kind, values in ((ALiBi, slopes), (RelativePosition, table)):
        biases = kind(values), kind(jnp.array(values))
        results = [OperationRegistry.create("vanilla")(q, q, q, bias=bias).attention_outputs for bias in biases]
        np.testing.assert_array_equal(*results)


@pytest.mark.slow
def test_a_bias_may_be_subclassed():
    class Named(ALiBi):
        """Neither a dataclass of its own, nor with fields of its own."""

    @dataclasses.dataclass(frozen=True, eq=False)
    class Shifted(ALiBi):
        shift: float = 0.0

        def at_distance(self, h, distance):
            return super().at_distance(h, distance) + self.shift

    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 20, 2, 8)), jnp.float32)

    def logsumexp(operation, bias):
        found = operation(q, q, q, bias=bias, return_lse=True).logsumexp
        return found.sum(), found

    slopes = jnp.array([0.5, 0.25])
    for name in ("vanilla", "flash"):
        operation = OperationRegistry.create(name)
        run = jax.jit(jax.grad(functools.partial(logsumexp, operation), has_aux=True))
        expected, lse = run(ALiBi(slopes))
        named, _ = run(Named(slopes))
        shifted, shifted_lse = run(Shifted(slopes, shift=2.0))
        np.testing.assert_allclose(named.slopes, expected.slopes)
        np.testing.assert_allclose(shifted.slopes, expected.slopes, rtol=1e-5)
        np.testing.assert_allclose(shifted_lse, lse + 2, rtol=1e-5)
        np.testing.assert_allclose(shifted.shift, lse.size, rtol=1e-5)  # each logsumexp grows with it


@pytest.mark.parametrize("leaf", [None, jax.sharding.PartitionSpec(), object(), jax.ShapeDtypeStruct((), np.int32)])
def test_an_array_offset_is_a_leaf_whatever_stands_in_its_place(leaf):
    bias = ALiBi(jnp.ones(2), jnp.int32(3))
    leaves, tree = jax.tree.flatten(bias)
    assert len(leaves) == 2
    other = jax.tree.unflatten(tree, [leaves[0], leaf])
    assert jax.tree.structure(other, is_leaf=lambda x: x is None) == tree


def test_impossible_biases_are_refused_with_a_reason():
    q = jnp.ones((1, 4, 2, 8))
    vanilla = OperationRegistry.create("vanilla")
    with pytest.raises(ValueError, match=r"ALiBi's slopes has shape \(3,\), but must have shape \[H\]=\(2,\)"):
        vanilla(q, q, q, bias=ALiBi(jnp.ones(3)))
    with pytest.raises(ValueError, match=r"table has shape \(8, 3\), but must be \[buckets, H=2\]"):
        vanilla(q, q, q, bias=RelativePosition(jnp.ones((8, 3))))
    for buckets, far in ((2, 128), (32, 8), (32, 4)):
        text = f"{buckets} buckets hold {buckets // 4} exact distances a direction, and max_distance={far}: there must"
        with pytest.raises(ValueError, match=text):
            vanilla(q, q, q, bias=RelativePosition(jnp.ones((buckets, 2)), max_distance=far))
    for offset in (True, 1.5, "1", 2**31, -(2**40), np.int64(2**31)):
        with pytest.raises(ValueError, match=r"ALiBi's offset=.* must be"):
            vanilla(q, q, q, bias=ALiBi(jnp.ones(2), offset))
    strict = OperationRegistry.create("sdpa", OperationMetadata(on_unsupported="error"))
    with pytest.raises(UnsupportedError, match=r"bias=ALiBi: must be one of \['array'\]"):
        strict(q, q, q, bias=ALiBi(jnp.ones(2)))


@pytest.mark.slow
def test_relative_position_under_strict_promotion():
    table = jnp.arange(8, dtype=jnp.float32).reshape(8, 1)
    expected = RelativePosition(table).bind(1, 1, 3, 3).by_distance(1, 3, 3)
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(RelativePosition(table).bind(1, 1, 3, 3).by_distance(1, 3, 3), expected)
