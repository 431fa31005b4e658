"""Masks written on the command line."""

from __future__ import annotations

import ast
import operator
import re
from typing import Any

import jax.numpy as jnp

from attnops.masks import (
    Ancestors,
    Blocks,
    Causal,
    Chunked,
    Dense,
    Full,
    KeyPadding,
    Lengths,
    Mask,
    PrefixLM,
    Segments,
    SlidingWindow,
)

# Without `MaskFn`, whose function can't be written on the command line.
_PRIMITIVES = (Ancestors, Blocks, Causal, Chunked, Dense, Full, KeyPadding, Lengths, PrefixLM, Segments, SlidingWindow)
_BY_NAME: dict[str, type[Mask]] = {cls.__name__.lower(): cls for cls in _PRIMITIVES}
_BINARY = {ast.BitAnd: operator.and_, ast.BitOr: operator.or_}


def parse_shape(name: str, text: str) -> tuple[int, ...]:
    """``"4x1x128x128"`` or ``"4,1,128,128"`` as a tuple.

    Raises:
        ValueError: it is not a shape.
    """
    sizes = re.split(r"\s*[x,]\s*", text.strip(" ()[]"))
    if not all(size.isdecimal() for size in sizes):
        raise ValueError(f"{name}={text!r} is not a shape; write it as 4x1x128x128")
    return tuple(map(int, sizes))


def parse_mask(text: str) -> Any:
    """A mask from an expression of `attnops.masks` such as ``"causal"`` or ``"Causal() & SlidingWindow(4095, 0)"``, or
    a boolean array from a shape. A tuple among the arguments, as in ``Lengths((4,))``, becomes an array of that shape.

    Call it while tracing, so that no array is allocated.

    Raises:
        ValueError: it is neither of them.
    """
    if re.match(r"[\s\d(\[]+[x,]", text):
        return jnp.zeros(parse_shape("mask", text), bool)
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"mask={text!r} can't be read: {error}; {_usage()}") from None


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            return _BINARY[type(op)](_evaluate(left), _evaluate(right))
        case ast.UnaryOp(ast.Invert(), operand):
            return ~_evaluate(operand)
        case ast.Name(name):
            return _mask_class(name)()
        case ast.Call(ast.Name(name), arguments, keywords):
            cls = _mask_class(name)
            values = [_argument(cls, argument) for argument in arguments]
            return cls(*values, **{str(keyword.arg): _argument(cls, keyword.value) for keyword in keywords})
    raise ValueError(f"mask={ast.unparse(node)!r} is not a mask; {_usage()}")


def _argument(cls: type[Mask], node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"mask={ast.unparse(node)!r} must be a number, or a tuple for an array's shape") from None
    if isinstance(value, tuple):
        return jnp.zeros(value, bool if cls.__name__ in ("Blocks", "Dense", "KeyPadding") else jnp.int32)
    return value


def _mask_class(name: str) -> type[Mask]:
    try:
        return _BY_NAME[name.lower().replace("_", "")]
    except KeyError:
        raise ValueError(f"mask={name!r} is unknown; {_usage()}") from None


def _usage() -> str:
    names = ", ".join(cls.__name__ for cls in _PRIMITIVES)
    return f"write an expression of {names} with &, | and ~, or an array's shape such as 1x1x128x128"
