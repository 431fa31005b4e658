"""Tiles of tokens, their flags, and products of float32 matrices by bfloat16 operands.

A float32 number is the sum of three bfloat16 numbers; a product is the sum of products of parts, without the terms that
are less than a rounding error.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Arrays(NamedTuple):
    """The arrays of kernels in their order, of N chunks of C tokens; None for those that a call does not have."""

    query: Any = None  # [B, T, K, D]
    key: Any = None  # [B, T, K, D]
    value: Any = None  # [B, T, H, Dv]
    decay: Any = None  # see `LinearOptions.decay`; float32
    beta: Any = None  # [B, T, H] float32
    flags: Any = None  # [B, T] int8: 1 for a token that begins with an empty state, 2 for padding, else 0
    initial: Any = None  # [B, H, D, Dv] float32
    gates: Any = None  # [B, H, N, `LinearOptions.gates`, C] float32
    inverse: Any = None  # [B, H, N, C, C], that of the delta rule's system I + M B
    scores: Any = None  # [B, H, N, C, C], products of queries and keys up to the query, times decays and betas
    earlier: Any = None  # [C, C], 1 where a column's token is before a row's
    d_out: Any = None  # [B, T, H, Dv]
    out: Any = None  # [B, T, H, Dv]
    state: Any = None  # [B, H, D, Dv] float32
    states: Any = None  # [B, H, N, D, Dv], before each chunk
    solved: Any = None  # [B, T, H, Dv], the inverse times what values differ by from the state's; else the values
    d_value: Any = None  # [B, T, H, Dv]
    d_states: Any = None  # [B, H, N, D, Dv], of the state after each chunk
    d_query: Any = None  # [B, T, H, D], a part of each value head
    d_key: Any = None  # [B, T, H, D]
    d_decay: Any = None  # [B, T, H] float32
    d_beta: Any = None  # [B, T, H] float32


class Sizes(NamedTuple):
    """The integers of kernels."""

    T: Any  # tokens of a row
    chunks: Any  # of a row
    columns: Any  # programs of a head, each with other columns of values


class Program(NamedTuple):
    """What a program computes."""

    b: Any
    h: Any
    state: Any  # b · H + h, int64


@triton.jit
def locate(rest, options: tl.constexpr):
    """The `Program` of the state ``rest``, b · H + h."""
    return Program(rest // options.H, rest % options.H, rest.to(tl.int64))


@triton.jit
def token_of(n, program, start):
    """The index of a row's token ``start`` among the tokens of all rows, int64."""
    return program.b.to(tl.int64) * n.T + start


@triton.jit
def load_flags(x, n, program, start, size: tl.constexpr, options: tl.constexpr):
    """Which of ``size`` tokens from ``start`` on are there, and which of them begin a segment; [size]."""
    at = tl.arange(0, size)
    real = start + at < n.T
    begins = at < 0
    if x.flags is not None:
        flags = tl.load(x.flags + token_of(n, program, start) + at, mask=real, other=2)
        real = flags != 2
        begins = flags == 1
    return real, begins


@triton.jit
def load_gate(pointer, n, program, start, real, size: tl.constexpr, options: tl.constexpr):
    """The values of ``size`` tokens in an array [B, T, H], [size] float32; 0 for padding."""
    at = token_of(n, program, start) * options.H + program.h + tl.arange(0, size) * options.H
    return tl.load(pointer + at, mask=real, other=0.0)


@triton.jit
def load_keys(
    pointer, n, program, start, real, size: tl.constexpr, first: tl.constexpr, width: tl.constexpr,
    options: tl.constexpr,
):  # fmt: skip
    """``width`` features from ``first`` on of the queries or keys of ``size`` tokens, operands; 0 for padding."""
    column = first + tl.arange(0, width)
    at = (token_of(n, program, start) * options.K + program.h // options.G) * options.D
    at = pointer + at + tl.arange(0, size)[:, None] * (options.K * options.D) + column[None, :]
    if first + width > options.D:
        return tl.load(at, mask=real[:, None] & (column < options.D)[None, :], other=0.0)
    if options.is_even:
        return tl.load(at)
    return tl.load(at, mask=real[:, None], other=0.0)


@triton.jit
def narrowed(x, options: tl.constexpr):
    """float32 as operands of products."""
    if options.emulated:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(options.operand)


@triton.jit
def parts(x, count: tl.constexpr, options: tl.constexpr):
    """At most ``count`` operands with the sum ``x``, float32, the largest first."""
    if options.dtype == "float32":
        return (x,)
    found = ()
    for i in tl.static_range(count):
        part = narrowed(x, options)
        found = found + (part,)
        if i + 1 < count:
            x = x - part.to(tl.float32)
    return found


@triton.jit
def product(a, b, count: tl.constexpr, options: tl.constexpr):
    """The product of two matrices of which these are the `parts`, without terms beyond ``count`` parts; float32."""
    found = tl.dot(a[0], b[0], input_precision=options.precision)
    for i in tl.static_range(len(a)):
        for j in tl.static_range(len(b)):
            if i + j > 0 and i + j < count:
                found = tl.dot(a[i], b[j], found, input_precision=options.precision)
    return found
