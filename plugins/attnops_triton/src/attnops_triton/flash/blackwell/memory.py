"""Tensor memory, and opaque copies of numbers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory


@gluon.jit
def allocate(copies: gl.constexpr, columns: gl.constexpr, options: gl.constexpr):
    """Tensor memory of float32, [copies, rows, columns]."""
    layout: gl.constexpr = TensorMemoryLayout([options.rows, columns], col_stride=1)
    return allocate_tensor_memory(gl.float32, [copies, options.rows, columns], layout)


@gluon.jit
def operands(memory, width: gl.constexpr, options: gl.constexpr):
    """Tensor memory of ``width`` float32 columns as operands of products."""
    return memory.reinterpret(options.dtype, [options.rows, width * options.packed], options.operand_layout)


@gluon.jit
def moved(x):
    """An opaque copy of a number. The compiler can't move what depends on it out of a loop or a partition, where it
    would be spilled.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)
