"""A forward's result has the contract's shapes and dtypes, or an error names the implementation."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from attnops import OperationMetadata, OperationOutput
from attnops.operations.vanilla import VanillaAttention

B, T, S, H, D, Dv = 2, 4, 6, 2, 8, 3
QUERY = jnp.ones((B, T, H, D))
KEY, VALUE = jnp.ones((B, S, H, D)), jnp.ones((B, S, H, Dv))
OUT, LSE, WEIGHTS = jnp.zeros((B, T, H, Dv)), jnp.zeros((B, H, T)), jnp.zeros((B, H, T, S))
ASKED = {"return_lse": True, "return_weights": True, "return_max_logits": True}


def returning(result: Any, metadata: OperationMetadata | None = None) -> VanillaAttention:
    def forward_native(
        self: Any, query: Any, key: Any, value: Any, *, return_lse: bool = False, return_weights: bool = False,
        return_max_logits: bool = False,
    ) -> Any:  # fmt: skip
        return result

    return type("Kernel", (VanillaAttention,), {"forward_native": forward_native})(metadata)


WRONG = [
    (OperationOutput(OUT.swapaxes(1, 2)), "attention_outputs of shape (2, 2, 4, 3), but must return [B, T, H, Dv]=(2,"),
    (OperationOutput(OUT[..., 0]), "attention_outputs of shape (2, 4, 2), but must return [B, T, H, Dv]=(2, 4, 2, 3)"),
    (OperationOutput(jnp.float32(0)), "attention_outputs of shape (), but must return [B, T, H, Dv]=(2, 4, 2, 3)"),
    (OperationOutput(OUT.astype(jnp.bfloat16)), "attention_outputs of dtype bfloat16, but must return float32: the qu"),
    (OperationOutput(None), "None as attention_outputs, but must return an array [B, T, H, Dv]=(2, 4, 2, 3)"),
    (OperationOutput(0.0), "a float as attention_outputs, but must return an array"),
    (OperationOutput(OUT, WEIGHTS, LSE[..., 0]), "logsumexp of shape (2, 2), but must return [B, H, T]=(2, 2, 4)"),
    (OperationOutput(OUT, WEIGHTS, LSE.astype(jnp.float16)), "logsumexp of dtype float16, but must return float32: al"),
    (OperationOutput(OUT, WEIGHTS.swapaxes(2, 3), LSE), "attention_weights of shape (2, 2, 6, 4), but must return [B,"),
    (OperationOutput(OUT, WEIGHTS > 0, LSE), "attention_weights of dtype bool, but must return float32: the query's"),
    (OperationOutput(OUT, WEIGHTS.astype(jnp.bfloat16), LSE), "attention_weights of dtype bfloat16, but must return f"),
    (OperationOutput(OUT, WEIGHTS, LSE, LSE[..., 0]), "max_logits of shape (2, 2), but must return [B, H, T]=(2, 2,"),
    (OperationOutput(OUT, WEIGHTS, LSE, LSE.astype(jnp.bfloat16)), "max_logits of dtype bfloat16, but must return flo"),
    (OUT, "a ArrayImpl, but must return OperationOutput"),
]  # fmt: skip


@pytest.mark.parametrize(("result", "text"), WRONG)
def test_another_shape_or_dtype_is_refused(result: Any, text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"Kernel returned {text}")):
        returning(result)(QUERY, KEY, VALUE, **ASKED)


def test_what_is_right_passes() -> None:
    found = returning(OperationOutput(OUT, WEIGHTS, LSE, LSE))(QUERY, KEY, VALUE, **ASKED)
    assert (found.attention_outputs.shape, found.attention_weights.shape) == (OUT.shape, WEIGHTS.shape)
    # A host's array is one too; what was not asked for is dropped unseen.
    unasked = returning(OperationOutput(np.asarray(OUT), None, LSE[0], LSE[0]))(QUERY, KEY, VALUE)
    assert (unasked.logsumexp, unasked.max_logits) == (None, None)


def test_runtime_dtype_is_the_querys_dtype() -> None:
    metadata = OperationMetadata(runtime_dtype=jnp.bfloat16)
    with pytest.raises(TypeError, match="attention_outputs of dtype float32, but must return bfloat16"):
        returning(OperationOutput(OUT), metadata)(QUERY, KEY, VALUE)
    assert returning(OperationOutput(OUT.astype(jnp.bfloat16)), metadata)(QUERY, KEY, VALUE)


def test_the_layout_plays_no_part() -> None:
    metadata = OperationMetadata(layout="BHTD")
    swapped = [x.swapaxes(1, 2) for x in (QUERY, KEY, VALUE)]
    assert returning(OperationOutput(OUT), metadata)(*swapped).attention_outputs.shape == (B, H, T, Dv)
    with pytest.raises(TypeError, match=r"of shape \(2, 2, 4, 3\), but must return \[B, T, H, Dv\]"):
        returning(OperationOutput(OUT.swapaxes(1, 2)), metadata)(*swapped)


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap])
def test_it_is_checked_while_it_is_traced(wrap: Any) -> None:
    operation = returning(OperationOutput(OUT[0]))
    arrays = [x[None] for x in (QUERY, KEY, VALUE)] if wrap is jax.vmap else [QUERY, KEY, VALUE]
    with pytest.raises(TypeError, match=r"Kernel returned attention_outputs of shape \(4, 2, 3\)"):
        wrap(lambda *x: operation(*x))(*arrays)


@pytest.mark.slow
def test_under_a_mesh_each_devices_part_is_checked() -> None:
    class Kernel(VanillaAttention):
        def forward_native(self, query: Any, key: Any, value: Any, **_: Any) -> OperationOutput:
            return OperationOutput(jnp.zeros((*query.shape[:1], 1, *query.shape[2:])))

    mesh = Mesh(np.array(jax.devices()[:2]), ("dp",))
    operation = Kernel(OperationMetadata(mesh=mesh))
    with pytest.raises(TypeError, match=r"Kernel returned .* \(1, 1, 2, 8\), but must return .*=\(1, 4, 2, 8\)"):
        operation(QUERY, QUERY, QUERY)
