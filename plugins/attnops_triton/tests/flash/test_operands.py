"""The pointers to the elements of a batch and head, evaluated as numbers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from triton_plans import TILES, make_plan

from attnops_triton.flash.operands import Arrays, Operand, base, score_operands, value_layout
from attnops_triton.flash.tile import TileWriter
from attnops_triton.language.source import SourceWriter


def offset(text: str, **variables: int) -> int:
    """The value of an expression of a kernel, where pointers are 0."""
    return int(eval(text.replace(".to(tl.int64)", ""), {}, {"x_ptr": 0, "y_ptr": 0, **variables}))


@pytest.mark.parametrize(("B", "H"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_pointers_are_those_of_the_batch_and_head_or_of_what_they_share(B: int, H: int) -> None:
    array = np.arange(B * H * 5).reshape(B, H, 5)
    text = base(SourceWriter(), "x", str(int(B > 1)), H, "5")
    for b, h in np.ndindex(2, 3):
        assert offset(text, b=b, h=h) == np.broadcast_to(array, (2, 3, 5))[b, h, 0]


def test_whether_operands_have_a_batch_axis_are_the_bits_of_one_argument() -> None:
    write = SourceWriter()
    shapes = {"x": (2, 1, 7), "y": (1, 3, 7), "z": (2, 3, 7)}
    tile = TileWriter.make(write, make_plan(), TILES, [Operand(name, np.zeros(s)) for name, s in shapes.items()])
    assert write.integers["batched"] == 0b101
    assert offset(tile.base("x", "7"), b=1, h=2, batched=0b101) == 7
    assert offset(tile.base("y", "7"), b=1, h=2, batched=0b101) == 14


def test_values_have_one_axis_of_tokens_and_elements_of_32_bits() -> None:
    for dtype, expected in {"bool": "int32", "int8": "int32", "uint32": "uint32", "bfloat16": "float32"}.items():
        value = value_layout(jnp.zeros((2, 1, 5, 1), dtype))
        assert (value.shape, value.dtype) == ((2, 1, 5), expected)
    assert value_layout(jnp.zeros((1, 3, 1, 1))).shape == (1, 3, 1)


def test_only_arrays_that_a_call_has_are_operands() -> None:
    assert score_operands(make_plan(), Arrays()) == []
    x = jnp.zeros((1, 1, 1))
    arrays = Arrays(mask=(x, x), bias=(x,), array=x, sinks=x, dropout=x)
    assert [o.name for o in score_operands(make_plan(), arrays)] == ["mask0", "mask1", "bias0", "array", "dropout"]
