"""What the ring refuses, and with which words."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attnops import OperationMetadata, OperationRegistry, UnsupportedError
from attnops.masks import Causal
from attnops.sharding import AxisRules, create_mesh
from attnops_ring import positions


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"order": "spiral"}, ValueError, r"order='spiral' is unknown; use one of"),
        ({"strategy": "star"}, ValueError, r"strategy='star' is unknown; use one of"),
        ({"strategy": "ulysses"}, UnsupportedError, r"H=2: a device's query heads must be a multiple of 4; use 'ring'"),
        ({"strategy": "usp"}, UnsupportedError, r"needs a sequence sharded over two mesh axes"),
        ({"order": "zigzag", "length": 60}, ValueError, r"T=60 and S=60 must be multiples of 8"),
        ({"return_weights": True}, UnsupportedError, r"return_weights"),
        ({"orde": "zigzag"}, TypeError, r"no option 'orde'"),
    ],
)
def test_what_the_ring_can_not_serve_is_refused_with_reasons(
    call: dict[str, Any], error: type[Exception], message: str
) -> None:
    mesh = create_mesh((4,), ("sp",), devices=jax.devices()[:4])
    ring = OperationRegistry.create("ring", OperationMetadata(mesh=mesh, on_unsupported="error"))
    x = jnp.ones((1, call.pop("length", 64), 2, 16))
    with pytest.raises(error, match=message):
        ring(x, x, x, mask=Causal(), **call)


@pytest.mark.parametrize("rules", [{"kv_length": None}, {"query_length": "a", "kv_length": "sp"}])
def test_rules_that_it_can_not_follow_are_refused(rules: dict[str, Any]) -> None:
    mesh = create_mesh((2, 2), ("a", "sp"), devices=jax.devices()[:4])
    metadata = OperationMetadata(mesh=mesh, axis_rules=AxisRules(**rules))
    x = jnp.ones((1, 16, 2, 16))
    with pytest.raises(UnsupportedError, match=r"must shard keys, and queries over the same axes"):
        OperationRegistry.create("ring", metadata)(x, x, x)


def test_replicated_queries_over_keys_in_the_order_of_two_axes_are_refused() -> None:
    """Their order would be taken for that of all devices in a row."""
    mesh = create_mesh((2, 2), ("r", "u"), devices=jax.devices()[:4])
    rules = AxisRules(query_length=None, kv_length=("r", "u"))
    ring = OperationRegistry.create("ring", OperationMetadata(mesh=mesh, axis_rules=rules))
    x = jnp.ones((1, 16, 4, 16))
    with pytest.raises(UnsupportedError, match=r"order=zigzag: of replicated queries, must be 'contiguous'"):
        ring(x[:, :1], x, x, strategy="usp", order="zigzag")
    assert ring(x[:, :1], x, x, strategy="usp").attention_outputs.shape == (1, 1, 4, 16)


def test_without_a_mesh_the_error_names_what_to_do() -> None:
    x = jnp.ones((1, 16, 2, 16))
    with pytest.raises(
        UnsupportedError, match=r"mesh=none, or sequences not sharded: must shard the keys; create 'flash'"
    ):
        OperationRegistry.create("ring")(x, x, x)
    with pytest.raises(ValueError, match=r"length=10 must be a multiple of 8"):
        positions(10, 4, "zigzag")
