"""Exponentials of base 2, some of them by polynomials, as in FlashAttention-4: the special function units bound some
kernels, whose other units have time left.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def exp2(x, options: gl.constexpr):
    """``2 ** x`` [rows, columns] for x at most 0; ``options.by_polynomial`` of each 8 columns by polynomials.

    A thread has whole rows, so that the compiler knows each column, and computes each exponential in one way.
    """
    found = gl.exp2(x)
    if options.by_polynomial > 0:
        column = gl.arange(0, options.columns, layout=options.column_layout)[None, :]
        found = gl.where(column % 8 < options.by_polynomial, polynomial(x), found)
    return found


@gluon.jit
def polynomial(x):
    """``2 ** x`` for x at most 0: the power of the nearest integer, times a polynomial of the rest (Cody and Waite).

    The polynomial, of degree 3, has the smallest relative error between −0.5 and 0.5, which is 7.5e-5. Below −126.5 the
    result is 0; that of NaN is NaN.
    """
    # A number from 2^23 on has no digits after the point: its last bits are those of the integer, with the bias of an
    # exponent.
    near: gl.constexpr = 8388608.0 + 127.0
    x = gl.maximum(x, -127.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = x + near
    rest = x - (shifted - near)
    power = (shifted.to(gl.int32, bitcast=True) << 23).to(gl.float32, bitcast=True)
    return (((0.05517167 * rest + 0.24261112) * rest + 0.69326099) * rest + 0.99992807) * power
