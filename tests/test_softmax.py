"""Partial softmaxes: each part, its contribution, and gradients from the logsumexp of all keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.sharding import create_mesh
from attnops.softmax import Contribution
from attnops_testing.partial import check_partial


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "features"),
    [
        *(pytest.param("attnops:flash", features, marks=pytest.mark.slow) for features in ("plain", "bias")),
        *(("attnops:flash", features) for features in ("low", "dropout")),
        # By what any operation has, which is exact where logsumexps are not large.
        *(("attnops:vanilla", features) for features in ("plain", "bias", "dropout")),
    ],
)
@pytest.mark.tier(every=4)
def test_partial_softmaxes_merge_to_vanilla_over_all_keys(operation: str, features: str) -> None:
    check_partial(operation, "cpu", features)


@pytest.mark.slow
def test_results_are_not_rounded() -> None:
    x, d = (jax.random.normal(jax.random.key(i), (1, 40, 2, 16), jnp.bfloat16) for i in (0, 1))
    flash: Any = OperationRegistry.create("attnops:flash")
    wide = x.astype(jnp.float32)
    exact, pull_back = jax.vjp(lambda q: flash(q, wide, wide).attention_outputs, wide)
    part = flash.partial(x, x, x)
    assert part.out.dtype == jnp.float32
    assert abs(part.out - exact).max() < 2e-3 * abs(exact).max()
    rounded = flash(x, x, x).attention_outputs
    assert rounded.dtype == jnp.bfloat16
    assert (part.out.astype(jnp.bfloat16) == rounded).all()
    assert (part.out != rounded).any()

    d = d.astype(jnp.float32)
    cotangents = Contribution(d, -(d * part.out).sum(-1).swapaxes(1, 2))
    d_query, *others, _ = flash.partial_vjp(x, x, x, part.lse, part.lse_residual, cotangents)
    assert {y.dtype.name for y in (d_query, *others)} == {"float32"}
    (expected,) = pull_back(d)
    assert (d_query != d_query.astype(jnp.bfloat16)).any()
    assert abs(d_query - expected).max() < 5e-3 * abs(expected).max()


@pytest.mark.slow
def test_partial_vjp_runs_no_forward_pass() -> None:
    x = jax.ShapeDtypeStruct((1, 256, 2, 32), jnp.float32)
    lse = jax.ShapeDtypeStruct((1, 2, 256), jnp.float32)
    flash: Any = OperationRegistry.create("attnops:flash", OperationMetadata(block_q=64, block_k=64))

    def pulled(q: Any, k: Any, v: Any, lse: Any) -> Any:
        return flash.partial_vjp(q, k, v, lse, lse, Contribution(q, lse))

    def backward(q: Any, k: Any, v: Any) -> Any:
        return jax.vjp(lambda *qkv: flash(*qkv).attention_outputs, q, k, v)[1](q)

    def loops(function: Any, *arguments: Any) -> int:
        return int(jax.jit(function).lower(*arguments).compile().as_text().count(" while("))

    assert 0 < loops(pulled, x, x, x, lse) < loops(backward, x, x, x)


ROWS = jnp.zeros((1, 2, 8))
D = Contribution(jnp.ones((1, 8, 2, 16)), ROWS)


@pytest.mark.parametrize(
    ("lse", "residual", "options", "message"),
    [
        (jnp.zeros((1, 8, 2)), ROWS, {}, r"lse is float32 \(1, 8, 2\), .* \[B, H, T\]=\(1, 2, 8\)"),
        (ROWS, ROWS.astype(jnp.bfloat16), {}, r"lse_residual is bfloat16"),
        ([0.0], ROWS, {}, r"lse is \[0.0\]"),
        (ROWS, ROWS, {"sinks": jnp.zeros(2)}, r"sinks belongs to all keys together"),
        (ROWS, ROWS, {"return_weights": True}, r"return_weights belongs to all keys together"),
    ],
)
def test_what_does_not_fit_a_partial_softmax_is_refused(
    lse: Any, residual: Any, options: dict[str, Any], message: str
) -> None:
    x = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    flash: Any = OperationRegistry.create("attnops:flash")
    with pytest.raises(ValueError, match=message):
        flash.partial_vjp(x, x, x, lse, residual, D, **options)


@pytest.mark.parametrize("operation", ["vanilla", "attnops:flash"])
@pytest.mark.parametrize(
    ("d", "message"),
    [
        (None, r"d.out is None, but must be float32 \[B, T, H, Dv\]=\(1, 8, 2, 16\)"),
        (D._replace(out=jnp.ones((1, 2, 8, 16))), r"d.out is float32 \(1, 2, 8, 16\), but must be"),
        (D._replace(out=D.out.astype(jnp.bfloat16)), r"d.out is bfloat16 "),
        (D._replace(weight=jnp.ones((1, 8, 2))), r"d.weight is float32 \(1, 8, 2\), but must be float32 \[B, H, T\]"),
    ],
)
def test_cotangents_of_another_shape_or_dtype_are_refused(operation: str, d: Any, message: str) -> None:
    x = jnp.ones((1, 8, 2, 16))
    run: Any = OperationRegistry.create(operation)
    with pytest.raises(ValueError, match=message):
        run.partial_vjp(x, x, x, ROWS, ROWS, d)


def test_a_misspelt_option_of_a_partial_softmax_is_refused() -> None:
    x = jnp.ones((1, 8, 2, 16))
    flash: Any = OperationRegistry.create("attnops:flash")
    for call in (lambda: flash.partial(x, x, x, maks=None), lambda: flash.partial_vjp(x, x, x, ROWS, ROWS, D, foo=1)):
        with pytest.raises(TypeError, match=r"has no option '(maks|foo)'"):
            call()


def test_sdpa_computes_a_partial_softmax_with_options_of_its_native_forward_alone() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    found, expected = (
        OperationRegistry.create(name).partial(x, x, x, logits_soft_cap=2.0, return_lse=False)  # type: ignore[attr-defined]
        for name in ("sdpa", "vanilla")
    )
    assert all(jnp.allclose(a, b, atol=1e-6) for a, b in zip(found[:3], expected[:3], strict=True))


def test_a_mesh_and_another_layout_are_refused() -> None:
    mesh = create_mesh((2,), ("dp",), devices=jax.devices()[:2])
    x = jnp.ones((2, 8, 2, 16))
    on_mesh: Any = OperationRegistry.create("attnops:flash", OperationMetadata(mesh=mesh))
    with pytest.raises(ValueError, match=r"call it inside jax.shard_map"):
        on_mesh.partial(x, x, x)
    transposed: Any = OperationRegistry.create("attnops:flash", OperationMetadata(layout="BHTD"))
    with pytest.raises(ValueError, match=r"layout='BHTD', but a partial softmax needs the layout 'BTHD'"):
        transposed.partial(x, x, x)


def test_a_derivative_of_partial_vjp_is_that_of_its_formula() -> None:
    x = jnp.linspace(-1, 1, 128).reshape(1, 8, 2, 8)
    lse, residual, d_out, d_weight = jnp.full((1, 2, 8), 2.0), jnp.zeros((1, 2, 8)), jnp.sin(9 * x), jnp.ones((1, 2, 8))
    flash: Any = OperationRegistry.create("attnops:flash")

    def formula(lse: jax.Array) -> jax.Array:
        weights = jnp.exp(jnp.einsum("bthd,bshd->bhts", x, x) * 8**-0.5 - lse[..., None])
        d_scores = weights * (jnp.einsum("bthd,bshd->bhts", d_out, x) + d_weight[..., None])
        return (jnp.einsum("bhts,bshd->bthd", d_scores, x) * 8**-0.5 * jnp.cos(x)).sum()

    def found(lse: jax.Array) -> jax.Array:
        dq = flash.partial_vjp(x, x, x, lse, residual, Contribution(d_out, d_weight), wants_bias=False)[0]
        return (dq * jnp.cos(x)).sum()

    np.testing.assert_allclose(*(jax.jit(jax.grad(f))(lse) for f in (found, formula)), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_gradients_through_partial_have_the_dtypes_of_their_arguments() -> None:
    x = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    flash: Any = OperationRegistry.create("attnops:flash")
    found = jax.grad(lambda *qkv: flash.partial(*qkv).out.sum(), argnums=(0, 1, 2))(x, x, x)
    assert {d.dtype.name for d in found} == {"bfloat16"}
