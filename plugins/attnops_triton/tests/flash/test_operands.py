"""The pointers to the elements of a batch and head, evaluated as numbers."""

from __future__ import annotations

import types

import jax.numpy as jnp
import numpy as np
import pytest
from triton_plans import TILES, make_plan

from attnops_triton.flash.kernels.parameters import ArrayLayout, Sizes, options_of
from attnops_triton.flash.kernels.tokens import Program, base
from attnops_triton.flash.operands import Arrays, Operand, score_operands, value_layout


@pytest.mark.parametrize(("B", "H"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_pointers_are_those_of_the_batch_and_head_or_of_what_they_share(B: int, H: int) -> None:
    array = np.arange(B * H * 5).reshape(B, H, 5)
    # The bits of other arrays must not matter.
    layout, sizes = ArrayLayout(H, bit=1), Sizes(T=5, S=5, batched=0b101 | (B > 1) << 1)
    for b, h in np.ndindex(2, 3):
        program = Program(*(np.asarray(x) for x in (b, h, h, 0)))
        assert at(sizes, program, layout) == np.broadcast_to(array, (2, 3, 5))[b, h, 0]


def at(sizes: Sizes, program: Program, layout: ArrayLayout) -> int:
    """The index of the first element of the program's batch and head in an array [B or 1, H or 1, 5]."""
    found = base.fn.__globals__ | {"tl": types.SimpleNamespace(int64=np.int64)}
    text = base.src.replace(".to(", ".astype(")
    exec(text, found)
    return int(found["base"](0, sizes, program, 5, layout))


def test_whether_operands_have_a_batch_axis_are_the_bits_of_one_argument() -> None:
    shapes = {"mask0": (2, 1, 7), "array": (1, 3, 7), "mask1": (2, 3, 7)}
    operands = [Operand(name, jnp.zeros(shape)) for name, shape in shapes.items()]
    layouts = options_of(make_plan(), TILES, operands).layouts
    assert layouts.mask == (ArrayLayout(1, 0), ArrayLayout(3, 2))
    assert layouts.array == ArrayLayout(3, 1)


def test_values_have_one_axis_of_tokens_and_elements_of_32_bits() -> None:
    for dtype, expected in {"bool": "int32", "int8": "int32", "uint32": "uint32", "bfloat16": "float32"}.items():
        value = value_layout(jnp.zeros((2, 1, 5, 1), dtype))
        assert (value.shape, value.dtype) == ((2, 1, 5), expected)
    assert value_layout(jnp.zeros((1, 3, 1, 1))).shape == (1, 3, 1)


def test_only_arrays_that_a_call_has_are_operands() -> None:
    assert score_operands(Arrays()) == []
    x = jnp.zeros((1, 1, 1))
    arrays = Arrays(mask=(x, x), bias=(x,), array=x, sinks=x, dropout=x)
    assert [o.name for o in score_operands(arrays)] == ["mask0", "mask1", "bias0", "array", "dropout"]
