"""The kernels that pass on a state: from chunk to chunk, and from token to token.

A program has some columns of a head's state, in registers, which no other columns depend on.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.standard import _sum_combine as total

from attnops_triton.linear.kernels.parts import (
    load_flags,
    load_keys,
    locate,
    narrowed,
    parts,
    product,
    token_of,
)


@triton.jit
def attnops_linear_chunks(x, n, options: tl.constexpr):
    """The outputs and the last state, chunk by chunk."""
    pid = tl.program_id(0)
    program = locate(pid // n.columns, options)
    first = pid % n.columns * options.tiles.columns
    state = load_state(x.initial, program, first, options)
    for chunk in range(0, n.chunks):
        start = chunk * options.tiles.C
        index = program.state * n.chunks + chunk
        if x.states is not None:
            store_state(x.states, index, first, narrowed(state, options), options)
        real, _ = load_flags(x, n, program, start, options.tiles.C, options)
        query = load_keys(x.query, n, program, start, real, options.tiles.C, 0, options.width, options)
        key = load_keys(x.key, n, program, start, real, options.tiles.C, 0, options.width, options)
        at, mask = places(n, program, start, first, real, options)
        value = load_masked(x.value + at, mask, options)
        states = parts(state, options.parts, options)
        output = product((query,), (states[0],), 1, options)
        if options.gated:
            kept = load_gates(x, index, 0, options)
            output = output * kept[:, None]
        if x.inverse is not None:
            past = product((key,), states, options.parts, options)
            if options.gated:
                past = past * kept[:, None]
            change = parts(value.to(tl.float32) - past, options.parts, options)
            inverse = load_square(x.inverse, index, False, options)
            solved = product(parts(inverse.to(tl.float32), options.parts, options), change, options.parts, options)
        else:
            solved = value.to(tl.float32)
        scores = load_square(x.scores, index, False, options)
        output = output + tl.dot(scores, narrowed(solved, options), input_precision=options.precision)
        output = output * options.scale
        if x.flags is not None:  # also where the state is infinite
            output = tl.where(real[:, None], output, 0.0)
        store_values(x.out, at, output.to(x.out.dtype.element_ty), n, start, first, options)
        if x.solved is not None:
            store_values(x.solved, at, narrowed(solved, options), n, start, first, options)
        update = solved
        if x.gates is not None:
            update = solved * load_gates(x, index, 1, options)[:, None]
        if options.gated:
            state = state * load_whole(x, index, options)
        state = state + product((tl.trans(key),), parts(update, options.parts, options), options.parts, options)
    store_state(x.state, program.state, first, state, options)


@triton.jit
def attnops_linear_tokens(x, n, options: tl.constexpr):
    """The outputs of few tokens and the last state, token by token, in float32."""
    pid = tl.program_id(0)
    program = locate(pid // n.columns, options)
    first = pid % n.columns * options.tiles.columns
    feature = tl.arange(0, options.width)
    column = first + tl.arange(0, options.tiles.columns)
    state = load_state(x.initial, program, first, options)
    tokens: tl.constexpr = options.T
    for t in tl.static_range(tokens):
        token = token_of(n, program, t)
        real, begins = load_flags(x, n, program, t, 1, options)
        at = (token * options.K + program.h // options.G) * options.D + feature
        query = tl.load(x.query + at, mask=(feature < options.D) & real, other=0.0).to(tl.float32)
        key = tl.load(x.key + at, mask=(feature < options.D) & real, other=0.0).to(tl.float32)
        at = token * options.H + program.h
        update = tl.load(x.value + at * options.Dv + column, mask=(column < options.Dv) & real, other=0.0)
        update = update.to(tl.float32)[None, :]
        if options.gated:
            kept = tl.full([1, 1], 1.0, tl.float32)
            if options.decay == "constant":
                kept = kept * tl.exp(tl.load(x.decay + program.h))
            elif options.decay == "head":
                kept = kept * tl.exp(tl.load(x.decay + at))
            elif options.decay == "channel":
                decay = tl.load(x.decay + at * options.D + feature, mask=feature < options.D, other=0.0)
                kept = tl.exp(decay)[:, None]
            kept = tl.where(begins[:, None], 0.0, tl.where(real[:, None], kept, 1.0))
            state = tl.where(kept == 0.0, 0.0, state * kept)
        if x.beta is not None:
            past = tl.reduce(state * key[:, None], 0, total)[None, :]
            beta = tl.load(x.beta + at)
            update = tl.where(real[:, None], beta * (update - past), 0.0)
        state = state + key[:, None] * update
        output = options.scale * tl.reduce(state * query[:, None], 0, total)
        output = tl.where(real, output, 0.0)
        tl.store(x.out + at * options.Dv + column, output.to(x.out.dtype.element_ty), mask=column < options.Dv)
    store_state(x.state, program.state, first, state, options)


@triton.jit
def places(n, program, start, first, real, options: tl.constexpr):
    """The places of a chunk's values in [B, T, H, Dv], and which of them are there; [C, columns]."""
    column = first + tl.arange(0, options.tiles.columns)
    at = (token_of(n, program, start) * options.H + program.h) * options.Dv
    at = at + tl.arange(0, options.tiles.C)[:, None] * (options.H * options.Dv) + column[None, :]
    return at, real[:, None] & (column < options.Dv)[None, :]


@triton.jit
def load_masked(pointer, mask, options: tl.constexpr):
    """A chunk's values; 0 for those that are not there."""
    if options.is_even and options.Dv % options.tiles.columns == 0:
        return tl.load(pointer)
    return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def store_values(pointer, at, values, n, start, first, options: tl.constexpr):
    """Store a chunk's values, of padding too."""
    if options.is_even and options.Dv % options.tiles.columns == 0:
        tl.store(pointer + at, values)
    else:
        column = first + tl.arange(0, options.tiles.columns)
        there = (start + tl.arange(0, options.tiles.C) < n.T)[:, None] & (column < options.Dv)[None, :]
        tl.store(pointer + at, values, mask=there)


@triton.jit
def load_gates(x, index, row: tl.constexpr, options: tl.constexpr):
    """A row of `LinearOptions.gates`, [C]."""
    at = index * (options.gates * options.tiles.C) + row * options.tiles.C
    return tl.load(x.gates + at + tl.arange(0, options.tiles.C))


@triton.jit
def load_whole(x, index, options: tl.constexpr):
    """The product of a chunk's decays: what is kept up to its last token."""
    return tl.load(x.gates + index * (options.gates * options.tiles.C) + (options.tiles.C - 1))


@triton.jit
def load_square(pointer, index, transposed: tl.constexpr, options: tl.constexpr):
    """A chunk's matrix, [C, C]."""
    C: tl.constexpr = options.tiles.C
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    return tl.load(pointer + index * (C * C) + (column * C + row if transposed else row * C + column))


@triton.jit
def places_of_state(index, row: tl.constexpr, rows: tl.constexpr, first, options: tl.constexpr):
    """The places of ``rows`` features from ``row`` on of a program's columns of the state ``index``, and which of them
    are there; [rows, columns].
    """
    feature = row + tl.arange(0, rows)
    column = first + tl.arange(0, options.tiles.columns)
    at = index * (options.D * options.Dv) + feature[:, None] * options.Dv + column[None, :]
    return at, (feature < options.D)[:, None] & (column < options.Dv)[None, :]


@triton.jit
def load_state(pointer, program, first, options: tl.constexpr):
    """A program's columns of the first state; 0 for None."""
    if pointer is None:
        state = tl.full([options.width, options.tiles.columns], 0.0, tl.float32)
    else:  # Triton also compiles what follows a return
        at, mask = places_of_state(program.state, 0, options.width, first, options)
        state = tl.load(pointer + at, mask=mask, other=0.0)
    return state


@triton.jit
def store_state(pointer, index, first, state, options: tl.constexpr):
    """Store a program's columns of the state ``index``."""
    at, mask = places_of_state(index, 0, options.width, first, options)
    tl.store(pointer + at, state, mask=mask)
