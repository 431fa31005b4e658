"""`attnops_adapters.tokamax`: an operation as an implementation of `tokamax.dot_product_attention`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokamax
from absl import flags
from framework_attention import normal
from tokamax._src.ops.attention import base

from attnops import OperationMetadata, OperationRegistry
from attnops_adapters.tokamax import implementation

flags.FLAGS.mark_as_parsed()  # tokamax would take pytest's command line for its own

QUERY, KEY, VALUE = normal(2, 7, 4, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 8, seed=1)
SEEN = np.random.default_rng(0).random((2, 1, 7, 7)) < 0.7
SEEN[..., 0] = True
FLASH = implementation(OperationRegistry.create("flash", OperationMetadata(on_unsupported="error")))

CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (2, 1)},
    "lengths": {"key_value_seq_lengths": jnp.array([3, 7])},
    "mask": {"mask": SEEN, "scale": 0.3},
    "bias": {"bias": jnp.asarray(normal(1, 4, 7, 7)), "is_causal": True},
    "cap": {"logits_soft_cap": 1.5},
    "window, causal and lengths": {
        "local_window_size": 3,
        "is_causal": True,
        "key_value_seq_lengths": jnp.array([6, 7]),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_tokamax(name: str) -> None:
    def attend(chosen):
        def run(*arrays):
            return tokamax.dot_product_attention(*arrays, implementation=chosen, precision="highest", **CASES[name])

        out, pull_back = jax.vjp(jax.jit(run), *(jnp.asarray(x) for x in (QUERY, KEY, VALUE)))
        return out, *pull_back(jnp.asarray(normal(*out.shape, seed=2)))

    for found, expected in zip(attend((FLASH,)), attend("xla"), strict=True):
        np.testing.assert_allclose(found, expected, atol=5e-6, rtol=1e-5)


def test_ranges_by_query_and_key() -> None:
    first, last = jnp.array([0, 0, 1, 2, 3, 3, 2]), jnp.array([7, 1, 2, 5, 6, 7, 7])
    mask = base.Mask(k_start=first[None], k_end=last[None], q_start=jnp.array([[0, 0, 1, 0, 0, 2, 0]]))
    out = FLASH(*(jnp.asarray(x) for x in (QUERY, KEY, VALUE)), mask=mask)
    seen = FLASH(*(jnp.asarray(x) for x in (QUERY, KEY, VALUE)), mask=base.Mask(mask.as_array(7, 7)))
    np.testing.assert_allclose(out, seen, atol=1e-6)


def test_batches_of_several_dimensions() -> None:
    arrays = [x.reshape(2, 1, *x.shape[1:]) for x in (QUERY, KEY, VALUE)]
    lengths = jnp.array([[3], [7]])
    found = FLASH(*map(jnp.asarray, arrays), mask=base.Mask(k_end=lengths[..., None, None]))
    expected = FLASH(*map(jnp.asarray, (QUERY, KEY, VALUE)), mask=base.Mask(k_end=lengths[..., None]))
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-6)


@pytest.mark.parametrize(
    "refused",
    [
        {"bias": jnp.asarray(normal(1, 4, 7, 7)), "logits_soft_cap": 2.0},
        {"precision": (jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT)},
        {"q_sharding": jax.sharding.SingleDeviceSharding(jax.devices()[0])},
    ],
    ids=lambda refused: "-".join(refused),
)
def test_what_is_not_served_is_left_to_the_next_implementation(refused) -> None:
    arrays = [jnp.asarray(x) for x in (QUERY, KEY, VALUE)]
    with pytest.raises(NotImplementedError):
        FLASH(*arrays, mask=base.Mask(), **refused)
    if "bias" in refused:
        found = tokamax.dot_product_attention(*arrays, implementation=(FLASH, "xla"), **refused)
        np.testing.assert_array_equal(found, tokamax.dot_product_attention(*arrays, implementation="xla", **refused))


@pytest.mark.parametrize("scale", [np.float32(0.3), jnp.float32(0.3), 0.3], ids=["numpy", "jax", "python"])
def test_any_number_is_a_scale(scale) -> None:
    arrays = [jnp.asarray(x) for x in (QUERY, KEY, VALUE)]
    found = FLASH(*arrays, mask=base.Mask(), logits_scale=scale)
    expected = tokamax.dot_product_attention(*arrays, scale=0.3, implementation="xla", precision="highest")
    np.testing.assert_allclose(found, expected, atol=5e-6)


def test_the_layout_is_that_of_tokamax() -> None:
    with pytest.raises(ValueError, match="BHTD"):
        implementation(OperationRegistry.create("flash", OperationMetadata(layout="BHTD")))
