"""Arguments are honoured or refused with both values and the rule."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnops
from attnops import OperationMetadata, OperationRegistry, UnsupportedError
from attnops.masks import Causal, Segments
from attnops_linear import CausalConv1d, LinearAttention

Q = np.ones((2, 5, 2, 3), np.float32)
V = np.ones((2, 5, 4, 6), np.float32)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"query": Q[0]}, "query has shape (5, 2, 3), but must have 4 dimensions, [B, T, K, D]"),
        ({"query": Q.astype(int)}, "query has dtype int64, but must be one of float32, bfloat16, float16; cast it"),
        ({"key": Q[:, :4]}, "key has shape (2, 4, 2, 3), but must have the query's, [B, T, K, D]=(2, 5, 2, 3)"),
        ({"key": Q[:, :, :1]}, "repeated key heads are not needed, since Hv may be a multiple of K"),
        ({"value": V[:, :4]}, "value has shape (2, 4, 4, 6), but must begin with the query's [B, T]=(2, 5)"),
        ({"value": V[:, :, :3]}, "value has Hv=3 heads and query K=2, but K must divide Hv"),
        ({"decay": -V}, "decay has shape (2, 5, 4, 6), but must have shape [Hv]=(4,), [B, T, Hv]=(2, 5, 4) or"),
        ({"decay": V[..., 0]}, "decay has the value 1, but must be at most 0: it is the natural logarithm of what is"),
        ({"decay": np.array([np.nan, 0.5, 0, 0], np.float32)}, "decay has the value 0.5, but must be at most 0"),
        ({"beta": V}, "beta has shape (2, 5, 4, 6), but must have shape [B, T, Hv]=(2, 5, 4)"),
        ({"initial_state": np.ones((2, 4, 6, 3), np.float32)}, "[B, Hv, D, Dv]=(2, 4, 3, 6); swap its last two axes"),
        ({"scale": float("nan")}, "scale=nan must be a finite number; leave it out for head_dim ** -0.5"),
        ({"scale": [1]}, "scale=[1] must be a finite number"),
        ({"mask": Causal()}, "mask is Causal(), but must be made of Segments and KeyPadding: a recurrence is causal"),
        ({"mask": np.ones((2, 4, 5, 5), bool)}, "mask is an array of shape (2, 4, 5, 5), but must be made of"),
        ({"mask": Segments([0] * 5, [1] * 5)}, "has two arrays of ids, but a recurrence has one: give Segments(ids)"),
        ({"return_state": 1}, "return_state=1 must be True or False"),
    ],
)  # fmt: skip
def test_what_fits_nothing_is_refused(changes: dict[str, Any], text: str) -> None:
    arguments = {"query": Q, "key": Q, "value": V} | changes
    with pytest.raises(ValueError, match=re.escape(text)):
        LinearAttention()(**arguments)


def test_a_traced_decay_above_zero_is_computed_as_it_stands() -> None:
    decay = jnp.full((2, 5, 4), 0.5)
    found = jax.jit(lambda a: LinearAttention()(Q, Q, V, decay=a, scale=1.0).attention_outputs)(decay)
    expected = 3 * np.cumsum(np.exp(0.5 * np.arange(5)))
    np.testing.assert_allclose(found[0, :, 0, 0], expected, rtol=1e-6)


def test_metadata_that_is_not_read_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=re.escape("metadata.layout=BHTD: LinearAttention does not read it")):
        LinearAttention(OperationMetadata(layout="BHTD"))(Q, Q, V)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"x": V}, "x has shape (2, 5, 4, 6), but must have shape [B, T, C]"),
        ({"x": V[:, :, 0].astype(int)}, "x has dtype int64, but must be one of float32, bfloat16, float16; cast it"),
        (
            {"weight": np.ones((6, 1, 4), np.float32)},
            "[C, W]=(6, W); leave out its axis 1: weight[:, 0]",
        ),
        ({"bias": [1.0]}, "bias is a list, but must be an array"),
        ({"return_state": 1}, "return_state=1 must be True or False"),
        ({"bias": np.ones(5, np.float32)}, "bias has shape (5,), but must have shape [C]=(6,)"),
        (
            {"state": np.ones((2, 4, 6), np.float32)},
            "(2, 4, 6), but must have shape [B, W - 1, C]=(2, 3, 6)",
        ),
    ],
)
def test_what_fits_no_convolution_is_refused(changes: dict[str, Any], text: str) -> None:
    arguments = {"x": V[:, :, 0], "weight": np.ones((6, 4), np.float32)} | changes
    with pytest.raises(ValueError, match=re.escape(text)):
        CausalConv1d()(**arguments)


def test_they_are_created_by_name_and_explained() -> None:
    operation = OperationRegistry.create("linear_attention")
    assert type(operation) is LinearAttention
    assert type(OperationRegistry.create("causal_conv1d")) is CausalConv1d
    request = operation.request(*(jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (Q, Q, V)), beta=V[..., 0])
    assert str(request) == "B2 T5 K2 Hv4 D3 Dv6 bfloat16 train on cpu with beta, decay by none"
    found = attnops.explain(request, "linear_attention")
    assert str(found).splitlines()[1] == "runs attnops-linear:linear_attention (forward_native)"
    with pytest.raises(ValueError, match="operation='flash' has computes='attention', but the request is of 'linear_a"):
        attnops.explain(request, "flash")
