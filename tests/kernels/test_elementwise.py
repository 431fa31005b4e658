"""Masks and biases taken apart: what is computed once a token, and what is left for each score."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import Limits, OperationMetadata, OperationRegistry
from attnops.biases import ALiBi, ScoreFn, alibi_slopes
from attnops.kernels.parts import of_bias, of_mask
from attnops.masks import Blocks, Causal, MaskFn, Segments, SlidingWindow
from attnops_testing.feature_masks import MASKS, TRACED_MASKS

SHAPE = B, H, T, S = 2, 4, 24, 40
INDICES = tuple(np.arange(n).reshape([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(SHAPE))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", [*MASKS, *TRACED_MASKS])
@pytest.mark.tier(
    slow=[f"{name}-False" for name in MASKS if name not in ("SlidingWindow", "KeyPadding", "mask & mask")]
)
def test_a_mask_is_put_together_again(name: str, traced: bool) -> None:
    mask, visible = (MASKS | TRACED_MASKS)[name](*SHAPE)

    def whole(mask: Any) -> Any:
        function, leaves, dense = of_mask(mask.bind(*SHAPE))
        assert all(not {"q", "kv"} <= axes for axes in function.values)
        values = function.compute(leaves, SHAPE)
        assert all(x.size <= B * H * max(T, S) for x in values), "nothing of T × S elements"
        tiles = [x.dense(*SHAPE) if isinstance(x, Blocks) else x for x in dense]
        return function.apply(None, *INDICES, values, tiles)

    found = jax.jit(whole)(jax.tree.map(jnp.asarray, mask)) if traced else whole(mask)
    np.testing.assert_array_equal(np.broadcast_to(found, SHAPE), np.broadcast_to(visible, SHAPE))


def test_what_is_looked_up_once_a_token_and_what_is_left() -> None:
    ids = np.arange(B * S).reshape(B, S) // 7
    function, *_ = of_mask((Causal() & Segments(ids)).bind(B, H, S, S))
    assert function.values == (frozenset({"b", "q"}), frozenset({"b", "kv"}))
    assert function.primitives == {"sub", "ge", "eq", "and"}
    # Indices alone are cheaper on the spot than fetched.
    assert of_mask(SlidingWindow(3, 0).bind(*SHAPE))[0].values == ()
    assert of_bias(ALiBi(alibi_slopes(H)).bind(*SHAPE))[0].values == (frozenset({"h"}),)


def test_equal_expressions_share_one_function() -> None:
    first, second = (of_mask((Causal() & Segments(np.arange(T) // n)).bind(B, H, T, T))[0] for n in (3, 5))
    assert first == second
    assert hash(first) == hash(second)


def score(scores: Any, b: Any, h: Any, q: Any, kv: Any, table: Any, factors: Any) -> Any:
    return scores * table[q] + jnp.where(q > kv, factors[b, h], 0.0) * (kv % 3).astype(scores.dtype)


@pytest.mark.slow
def test_a_score_function_and_its_gradients() -> None:
    rng = np.random.default_rng(0)
    table, factors, scores = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((T,), (B, H), SHAPE))

    def taken_apart(table: Any, factors: Any) -> Any:
        function, leaves = of_bias(ScoreFn(score, (table, factors)).bind(*SHAPE))
        return function.apply(scores, *INDICES, function.compute(leaves, SHAPE))

    expected = lambda *args: ScoreFn(score, args).apply(scores, *INDICES)  # noqa: E731
    for one, other in zip(
        jax.tree.leaves(jax.vjp(taken_apart, table, factors)[1](scores)),
        jax.tree.leaves(jax.vjp(expected, table, factors)[1](scores)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(taken_apart(table, factors), expected(table, factors), rtol=1e-6)


def _with_rule(function: Any, rule: Any) -> Any:
    made = jax.custom_jvp(function)
    made.defjvp(lambda given, tangents: (made(*given), rule(*given, *tangents)))
    return made


_OFFSETS = np.arange(3.0, dtype=np.float32)
STRAIGHT_THROUGH = _with_rule(lambda x: jnp.round(x), lambda x, dx: dx)
OWN_DERIVATIVES = {
    "relu": lambda s, i, t: jax.nn.relu(s),
    "softplus": lambda s, i, t: jax.nn.softplus(s) + jnp.logaddexp(s, t),
    "straight through": lambda s, i, t: STRAIGHT_THROUGH(3 * s) + STRAIGHT_THROUGH(5 * t),
    "of three": lambda s, i, t: _with_rule(
        lambda x, y, i: x * y + i, lambda x, y, i, dx, dy, _: 3 * y * dx - jnp.where(i > 3, dy, 0)
    )(s, t, i),
    "a constant": lambda s, i, t: s + _with_rule(lambda x: 0 * x + 2, lambda x, dx: 0.5 * dx)(s),
    "of integers": lambda s, i, t: s * _with_rule(lambda i: (i + 0.5) / 4, lambda i, _: jnp.zeros(i.shape))(i),
    "of nothing": lambda s, i, t: s * _with_rule(lambda: jnp.float32(2), lambda: jnp.float32(0))(),
    "by a derivative": lambda s, i, t: _with_rule(
        lambda x: x * x * x, lambda x, dx: jax.jvp(lambda y: y * y * y + y, (x,), (dx,))[1]
    )(s),
    "nested": lambda s, i, t: _with_rule(jax.nn.softplus, lambda x, dx: dx * jax.nn.relu(x))(jax.nn.relu6(s) - s),
}


@pytest.mark.parametrize("name", OWN_DERIVATIVES)
@pytest.mark.tier(slow=["softplus", "relu", "of three", "nested"])
def test_a_derivative_of_ones_own_is_kept(name: str) -> None:
    rng = np.random.default_rng(0)
    scores, table, d = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (SHAPE, (T,), SHAPE))

    def fn(s: Any, b: Any, h: Any, q: Any, kv: Any, table: Any) -> Any:
        return OWN_DERIVATIVES[name](s, jnp.broadcast_to(q - kv, s.shape), jnp.broadcast_to(table[q], s.shape))

    def taken_apart(scores: Any, table: Any) -> Any:
        function, leaves = of_bias(ScoreFn(fn, (table,)).bind(*SHAPE))
        assert not any("custom" in primitive for primitive in function.primitives), function.primitives
        return function.apply(scores, *INDICES, function.compute(leaves, SHAPE))

    def whole(scores: Any, table: Any) -> Any:
        return ScoreFn(fn, (table,)).apply(scores, *INDICES)

    (one, of_one), (other, of_other) = (jax.vjp(f, scores, table) for f in (taken_apart, whole))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for x, y in zip(of_one(d), of_other(d), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda s: _with_rule(lambda x: x * jnp.asarray(_OFFSETS)[1], lambda x, dx: dx * jnp.asarray(_OFFSETS).sum())(s),
        lambda s: _with_rule(lambda x: jnp.round(x).astype(jnp.int32), lambda x, dx: np.zeros((), jax.dtypes.float0))(
            s
        ).astype(jnp.float32),
    ],
    ids=["arrays", "integers"],
)
def test_a_derivative_that_no_kernel_can_have_is_named(function: Any) -> None:
    found, _ = of_bias(ScoreFn(lambda s, b, h, q, kv: function(s)).bind(*SHAPE))
    assert any(name.startswith("custom_jvp_call") for name in found.primitives)


def test_a_derivative_that_closes_over_an_index_is_named() -> None:
    """Once a token too: it is differentiated where the index is gone."""

    def fn(s: Any, b: Any, h: Any, q: Any, kv: Any, table: Any) -> Any:
        changed = _with_rule(lambda x: x, lambda x, dx: jnp.where(q > 5, dx, 2 * dx))(table[q])
        return s * jnp.broadcast_to(changed, s.shape)

    found, _ = of_bias(ScoreFn(fn, (jnp.ones(T),)).bind(*SHAPE))
    assert "custom_jvp_call" in found.primitives
    x = jnp.ones((B, T, H, 8))
    request = OperationRegistry.create("attnops:flash").request(x, x, x, bias=ScoreFn(fn, (jnp.ones(T),)))
    (reason,) = Limits(bias_primitives=frozenset({"mul"}), bias_kinds=None).reasons(request)
    assert "closes over as arguments, and return floats from it" in str(reason)


def test_a_lookup_by_query_and_key_is_named() -> None:
    table = np.ones(64, bool)
    mask = MaskFn(lambda b, h, q, kv: jnp.asarray(table)[q + kv])
    function, *_ = of_mask(mask.bind(*SHAPE))
    assert any("gather" in name or "dynamic_slice" in name for name in function.primitives)


def test_a_primitive_in_place_of_another() -> None:
    function, *_ = of_mask(MaskFn(lambda b, h, q, kv: jnp.sign(q - kv) > 0).bind(*SHAPE))
    assert "sign" in function.primitives
    seen = []
    function.apply(None, *INDICES, instead={"sign": lambda x: seen.append(x.shape) or x})
    assert seen == [(1, 1, T, S)]


def test_requests_name_the_primitives() -> None:
    operation = OperationRegistry.create("flash", OperationMetadata())
    x = jnp.ones((1, 8, 1, 4))
    request = operation.request(x, x, x, mask=Causal() & MaskFn(lambda b, h, q, kv: (q - kv) % 2 == 0))
    assert {"rem", "sub"} <= request.mask_primitives
    causal = operation.request(x, x, x, mask=Causal())
    assert causal.mask_primitives == frozenset(), "only a caller's functions are traced"
    (reason,) = Limits(mask_primitives=frozenset({"sub"})).reasons(request)
    assert reason.argument == "mask"
    assert "rem" in str(reason)
    # What does not work on scalars still works where it is evaluated on arrays.
    ranked = MaskFn(lambda b, h, q, kv: jnp.concatenate([q, q], axis=-1)[..., :1] >= kv)
    assert any("fails on scalars" in name for name in operation.request(x, x, x, mask=ranked).mask_primitives)


@pytest.mark.slow
def test_each_function_is_blamed_for_its_own_primitives() -> None:
    operation = OperationRegistry.create("flash", OperationMetadata())
    x = jnp.ones((1, 8, 1, 4))
    mask = MaskFn(lambda b, h, q, kv: (q - kv) % 2 == 0)
    request = operation.request(x, x, x, mask=mask, bias=ScoreFn(lambda s, b, h, q, kv: s + jnp.sin(s)))
    some = frozenset({"sub", "add"})
    both = Limits(mask_primitives=some, bias_primitives=some, bias_kinds=None).reasons(request)
    assert [(reason.argument, "sin" in str(reason)) for reason in both] == [("mask", False), ("bias", True)]
    (bias,) = Limits(bias_primitives=some, bias_kinds=None).reasons(request)
    assert bias.argument == "bias"
