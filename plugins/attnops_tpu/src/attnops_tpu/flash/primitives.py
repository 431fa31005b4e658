"""What kernels evaluate for each score."""

from __future__ import annotations

from typing import Final

# The primitives of a `MaskFn` or a `ScoreFn` that kernels evaluate for each score; the tests compile each of them.
PRIMITIVES: Final = frozenset({
    "abs", "add", "and", "ceil", "clamp", "convert_element_type", "cos", "div", "eq", "erf", "exp", "exp2",
    "floor", "ge", "gt", "integer_pow", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne",
    "neg", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square",
    "stop_gradient", "sub", "tanh", "xor",
})  # fmt: skip
