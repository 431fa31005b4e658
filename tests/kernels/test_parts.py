"""A softmax over parts of its keys: each part, its share of the whole, and gradients from the whole's logsumexp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.errors import NotDifferentiableError
from attnops.kernels.parts import Share, Whole, partial, share, share_gradients
from attnops.sharding import create_mesh
from attnops.testing.parts import check_parts


@pytest.mark.parametrize(
    ("operation", "features"),
    [
        *(("attnops:flash", features) for features in ("plain", "bias", "low", "dropout")),
        # By what any operation has, which is exact where logsumexps are not large.
        *(("attnops:vanilla", features) for features in ("plain", "bias", "dropout")),
    ],
)
def test_parts_of_keys_add_up_to_the_whole(operation: str, features: str) -> None:
    check_parts(operation, "cpu", features)


def test_results_are_not_rounded() -> None:
    x, d = (jax.random.normal(jax.random.key(i), (1, 40, 2, 16), jnp.bfloat16) for i in (0, 1))
    flash: Any = OperationRegistry.create("attnops:flash")
    wide = x.astype(jnp.float32)
    exact, pull_back = jax.vjp(lambda q: flash(q, wide, wide).attention_outputs, wide)
    part = partial(flash, x, x, x)
    assert part.out.dtype == jnp.float32
    assert abs(part.out - exact).max() < 2e-3 * abs(exact).max()
    rounded = flash(x, x, x).attention_outputs
    assert rounded.dtype == jnp.bfloat16
    assert (part.out.astype(jnp.bfloat16) == rounded).all()
    assert (part.out != rounded).any()

    d = d.astype(jnp.float32)
    cotangents = Share(d, -(d * part.out).sum(-1).swapaxes(1, 2))
    d_query, *others, _ = share_gradients(flash, x, x, x, Whole(part.lse, part.rest), cotangents, None, lambda _: {})
    assert {y.dtype.name for y in (d_query, *others)} == {"float32"}
    (expected,) = pull_back(d)
    assert (d_query != d_query.astype(jnp.bfloat16)).any()
    assert abs(d_query - expected).max() < 5e-3 * abs(expected).max()


def test_gradients_of_a_share_compute_no_forward() -> None:
    """The compiler leaves it out: the rule saves nothing of the output."""
    x = jax.ShapeDtypeStruct((1, 256, 2, 32), jnp.float32)
    lse = jax.ShapeDtypeStruct((1, 2, 256), jnp.float32)
    flash = OperationRegistry.create("attnops:flash", OperationMetadata(block_q=64, block_k=64))

    def run(q: Any, k: Any, v: Any, lse: Any) -> Any:
        return share(flash, q, k, v, Whole(lse, lse))

    def pulled(q: Any, k: Any, v: Any, lse: Any, d: Any) -> Any:
        return share_gradients(flash, q, k, v, Whole(lse, lse), d, None, lambda _: {})

    def loops(function: Any, *arguments: Any) -> int:
        return int(jax.jit(function).lower(*arguments).compile().as_text().count(" while("))

    def both(*arguments: Any) -> Any:
        return run(*arguments[:4]), pulled(*arguments)

    d = jax.eval_shape(run, x, x, x, lse)
    forward, backward, together = loops(run, x, x, x, lse), loops(pulled, x, x, x, lse, d), loops(both, x, x, x, lse, d)
    assert forward > 0
    assert together == forward + backward


ROWS = jnp.zeros((1, 2, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"whole": Whole(jnp.zeros((1, 8, 2)), ROWS)}, r"whole.lse is float32 \(1, 8, 2\), .* \[B, H, T\]=\(1, 2, 8\)"),
        ({"whole": Whole(ROWS, ROWS.astype(jnp.bfloat16))}, r"whole.rest is bfloat16"),
        ({"whole": Whole([0.0], ROWS)}, r"whole.lse is \[0.0\]"),  # type: ignore[arg-type]
        ({"whole": ROWS}, r"whole is a ArrayImpl, but must be an attnops.kernels.parts.Whole"),
        ({"whole": Whole(ROWS, ROWS), "sinks": jnp.zeros(2)}, r"sinks can't be given with whole"),
        ({"as_part": True, "sinks": jnp.zeros(2)}, r"sinks can't be given with as_part"),
        ({"as_part": True, "return_weights": True}, r"return_weights can't be given with as_part"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    x = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        OperationRegistry.create("attnops:flash")(x, x, x, **options)


def test_the_whole_is_of_a_device() -> None:
    mesh = create_mesh((2,), ("dp",), devices=jax.devices()[:2])
    x = jnp.ones((2, 8, 2, 16))
    with pytest.raises(ValueError, match=r"give it inside jax.shard_map"):
        OperationRegistry.create("attnops:flash", OperationMetadata(mesh=mesh))(x, x, x, whole=Whole(ROWS, ROWS))


def test_the_whole_has_no_gradient_here() -> None:
    x = jnp.ones((1, 8, 2, 16))
    flash: Any = OperationRegistry.create("attnops:flash")
    with pytest.raises(NotDifferentiableError, match=r"the logsumexp of the whole has no gradient"):
        jax.grad(lambda lse: share(flash, x, x, x, Whole(lse, ROWS)).out.sum())(ROWS)


def test_gradients_of_a_part_have_the_dtype_of_what_they_are_of() -> None:
    x = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    flash: Any = OperationRegistry.create("attnops:flash")
    found = jax.grad(lambda *qkv: partial(flash, *qkv).out.sum(), argnums=(0, 1, 2))(x, x, x)
    assert {d.dtype.name for d in found} == {"bfloat16"}
