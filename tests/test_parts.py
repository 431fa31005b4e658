"""A softmax over parts of its keys: each part, its share of the whole, and gradients from the whole's logsumexp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.errors import NotDifferentiableError
from attnops.kernels.parts import partial, share
from attnops.masks import Causal
from attnops.testing.parts import check_parts


@pytest.mark.parametrize("operation", ["attnops:flash", "attnops:vanilla"])
@pytest.mark.parametrize("features", ["plain", "bias", "dropout"])
def test_parts_of_keys_add_up_to_the_whole(operation: str, features: str) -> None:
    check_parts(operation, "cpu", features)


def test_output_is_not_rounded() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 40, 2, 16), jnp.bfloat16)
    flash = OperationRegistry.create("attnops:flash")
    whole = flash(*(x.astype(jnp.float32),) * 3).attention_outputs
    out, _ = partial(flash, x, x, x)
    assert out.dtype == jnp.float32
    assert abs(out - whole).max() < 2e-3 * abs(whole).max()
    rounded = flash(x, x, x).attention_outputs
    assert rounded.dtype == jnp.bfloat16
    assert (out.astype(jnp.bfloat16) == rounded).all()
    assert (out != rounded).any()


def test_gradients_of_a_share_compute_no_forward() -> None:
    """The compiler leaves it out: the rule saves nothing of the output."""
    x = jax.ShapeDtypeStruct((1, 256, 2, 32), jnp.float32)
    lse = jax.ShapeDtypeStruct((1, 2, 256), jnp.float32)
    flash = OperationRegistry.create("attnops:flash", OperationMetadata(block_q=64, block_k=64))

    def run(q: Any, k: Any, v: Any, lse: Any) -> Any:
        return share(flash, q, k, v, lse)

    def pulled(q: Any, k: Any, v: Any, lse: Any, d: Any) -> Any:
        return jax.vjp(lambda q, k, v: run(q, k, v, lse), q, k, v)[1](d)

    def loops(function: Any, *arguments: Any) -> int:
        return int(jax.jit(function).lower(*arguments).compile().as_text().count(" while("))

    def both(*arguments: Any) -> Any:
        return run(*arguments[:4]), pulled(*arguments)

    d = jax.eval_shape(run, x, x, x, lse)
    forward, backward, together = loops(run, x, x, x, lse), loops(pulled, x, x, x, lse, d), loops(both, x, x, x, lse, d)
    assert forward > 0
    assert together == forward + backward


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"output_dtype": jnp.float16}, ValueError, r"float16, but must be float32 or the query's bfloat16"),
        ({"total_lse": jnp.zeros((1, 8, 2))}, ValueError, r"but must be float32 \[B, H, T\]=\(1, 2, 8\)"),
        ({"total_lse": jnp.zeros((1, 2, 8), jnp.bfloat16)}, ValueError, r"total_lse is bfloat16"),
        ({"total_lse": jnp.zeros((1, 2, 8)), "sinks": jnp.zeros(2)}, ValueError, r"sinks can't be given with"),
        ({"total_lse": jnp.zeros((1, 2, 8)), "return_weights": True}, ValueError, r"return_weights can't be given"),
    ],
)  # fmt: skip
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    x = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    with pytest.raises(error, match=message):
        OperationRegistry.create("attnops:flash")(x, x, x, **options)


def test_the_whole_has_no_gradient_here() -> None:
    x = jnp.ones((1, 8, 2, 16))
    flash: Any = OperationRegistry.create("attnops:flash")
    with pytest.raises(NotDifferentiableError, match=r"total_lse has no gradient"):
        jax.grad(lambda lse: share(flash, x, x, x, lse).out.sum())(jnp.zeros((1, 2, 8)))


def test_weights_may_be_had_unrounded() -> None:
    x = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    flash = OperationRegistry.create("attnops:flash")
    found = flash(x, x, x, mask=Causal(), return_weights=True, output_dtype=jnp.float32)
    assert found.attention_outputs.dtype == jnp.float32
    np.testing.assert_allclose(found.attention_weights.sum(-1), 1.0, rtol=1e-5)
