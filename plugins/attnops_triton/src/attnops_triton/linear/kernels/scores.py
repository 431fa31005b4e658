"""What a chunk computes without a state: products of decays, the inverse of the delta rule's system, and scores.

A program computes one chunk of a head, in blocks of 16 tokens: those above the diagonal are 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.standard import _sum_combine as total

from attnops_triton.linear.kernels.parts import load_flags, load_gate, load_keys, locate, narrowed
from attnops_triton.linear.plan import BLOCK

_BLOCK = tl.constexpr(BLOCK)


class Sums(NamedTuple):
    """Cumulative sums over a chunk's tokens, of one block [16]; see `attnops_linear.gates.Sums`."""

    coarse: Any
    fine: Any
    resets: Any


@triton.jit
def attnops_linear_scores(x, n, options: tl.constexpr):
    """Gates, inverse and scores of a chunk."""
    blocks: tl.constexpr = options.blocks
    pid = tl.program_id(0)
    chunk = pid % n.chunks
    program = locate(pid // n.chunks, options)
    index = program.state * n.chunks + chunk
    real = ()
    begins = ()
    sums = ()
    for b in tl.static_range(blocks):
        flags = load_flags(x, n, program, chunk * options.tiles.C + b * _BLOCK, _BLOCK, options)
        real = real + (flags[0],)
        begins = begins + (flags[1],)
    if options.gated:
        sums = cumulative(x, n, program, chunk, real, begins, options)
    betas = ()
    if x.beta is not None:
        for b in tl.static_range(blocks):
            start = chunk * options.tiles.C + b * _BLOCK
            betas = betas + (load_gate(x.beta, n, program, start, real[b], _BLOCK, options),)
    if x.gates is not None:
        store_gates(x, index, sums, betas, options)
    if x.beta is not None:
        above = ()
        row = tl.arange(0, _BLOCK)
        for b in tl.static_range(blocks):
            found = products_row(x.key, x, n, program, chunk, real, sums, b, options)
            strict = ()
            for c in tl.static_range(b):
                strict = strict + (found[c] * betas[c][None, :],)
            last = tl.where(row[:, None] > row[None, :], found[b] * betas[b][None, :], 0.0)
            found = inverse_row(strict + (last,), above, b, options)
            above = above + found
            for c in tl.static_range(b + 1):
                block = found[c]
                if options.parts == 1:
                    block = narrowed(block, options)
                store_block(x.inverse, index, b, c, block, options)
            for c in tl.static_range(b + 1, blocks):
                store_block(x.inverse, index, b, c, tl.full([_BLOCK, _BLOCK], 0.0, tl.float32), options)
    for b in tl.static_range(blocks):
        found = products_row(x.query, x, n, program, chunk, real, sums, b, options)
        for c in tl.static_range(b + 1):
            block = found[c]
            if x.beta is not None:
                block = block * betas[c][None, :]
            if options.parts == 1 or not options.backward:
                block = narrowed(block, options)
            store_block(x.scores, index, b, c, block, options)
        for c in tl.static_range(b + 1, blocks):
            store_block(x.scores, index, b, c, tl.full([_BLOCK, _BLOCK], 0.0, tl.float32), options)


@triton.jit
def products_row(
    pointer, x, n, program, chunk, real, sums, b: tl.constexpr, options: tl.constexpr
):  # fmt: skip
    """The products of block b's queries or keys with the keys of each block up to it, times decays."""
    found = ()
    for _ in tl.static_range(b + 1):
        found = found + (tl.full([_BLOCK, _BLOCK], 0.0, tl.float32),)
    start = chunk * options.tiles.C
    width: tl.constexpr = options.piece
    pieces: tl.constexpr = options.width // width
    for i in tl.static_range(pieces):
        left = load_keys(pointer, n, program, start + b * _BLOCK, real[b], _BLOCK, i * width, width, options)
        added = ()
        for c in tl.static_range(b + 1):
            right = load_keys(x.key, n, program, start + c * _BLOCK, real[c], _BLOCK, i * width, width, options)
            added = added + (tl.dot(left, tl.trans(right), found[c], input_precision=options.precision),)
        found = added
    product = ()
    for c in tl.static_range(b + 1):
        product = product + (found[c] * products_of_decays(sums, b, c, options),)
    return product


@triton.jit
def cumulative(x, n, program, chunk, real, begins, options: tl.constexpr):
    """The `Sums` of each block."""
    blocks: tl.constexpr = options.blocks
    found = ()
    coarse = 0.0
    fine = 0.0
    resets = 0
    for b in tl.static_range(blocks):
        decay = tl.full([_BLOCK], 0.0, tl.float32)
        if options.decay == "constant":
            decay = tl.where(real[b], tl.load(x.decay + program.h), 0.0)
        elif options.decay == "head":
            start = chunk * options.tiles.C + b * _BLOCK
            decay = load_gate(x.decay, n, program, start, real[b], _BLOCK, options)
        # Multiples of 1/1024, whose sums are exact; a decay below the smallest float32 empties the state.
        empties = (decay < -193.0) | begins[b]
        decay = tl.where(empties, 0.0, tl.where(decay > 193.0, 193.0, decay))
        multiple = tl.floor(decay * 1024.0 + 0.5) * (1.0 / 1024.0)
        of_block = Sums(
            tl.associative_scan(multiple, 0, total) + coarse,
            tl.associative_scan(decay - multiple, 0, total) + fine,
            tl.associative_scan(empties.to(tl.int32), 0, total) + resets,
        )
        found = found + (of_block,)
        coarse = coarse + tl.reduce(multiple, 0, total)
        fine = fine + tl.reduce(decay - multiple, 0, total)
        resets = resets + tl.reduce(empties.to(tl.int32), 0, total)
    return found + (Sums(coarse, fine, resets),)


@triton.jit
def store_gates(x, index, sums, betas, options: tl.constexpr):
    """Store the rows of `LinearOptions.gates`."""
    blocks: tl.constexpr = options.blocks
    at = x.gates + index * (options.gates * options.tiles.C) + tl.arange(0, _BLOCK)
    for b in tl.static_range(blocks):
        token = at + b * _BLOCK
        rest = tl.full([_BLOCK], 1.0, tl.float32)
        if options.gated:
            of_block = sums[b]
            end = sums[options.blocks]
            kept = tl.where(of_block.resets == 0, of_block.coarse + of_block.fine, float("-inf"))
            tl.store(token, tl.exp(kept))
            rest = (end.coarse - of_block.coarse) + (end.fine - of_block.fine)
            rest = tl.exp(tl.where(of_block.resets == end.resets, rest, float("-inf")))
            if options.backward:
                tl.store(token + 2 * options.tiles.C, rest)
                tl.store(token + 3 * options.tiles.C, of_block.coarse)
                tl.store(token + 4 * options.tiles.C, of_block.fine)
                tl.store(token + 5 * options.tiles.C, of_block.resets.to(tl.float32))
        if x.beta is not None:
            rest = rest * betas[b]
        tl.store(token + options.tiles.C, rest)


@triton.jit
def products_of_decays(sums, b: tl.constexpr, c: tl.constexpr, options: tl.constexpr):
    """The products of decays after tokens of block c up to those of block b, 0 for later tokens; [16, 16]."""
    row = tl.arange(0, _BLOCK)
    keeps = row[:, None] >= row[None, :] - (b - c) * _BLOCK
    logarithm = tl.full([_BLOCK, _BLOCK], 0.0, tl.float32)
    if options.gated:
        later = sums[b]
        earlier = sums[c]
        keeps = keeps & (later.resets[:, None] == earlier.resets[None, :])
        logarithm = later.coarse[:, None] - earlier.coarse[None, :] + (later.fine[:, None] - earlier.fine[None, :])
    return tl.exp(tl.where(keeps, logarithm, float("-inf")))


@triton.jit
def inverse_row(strict, above, b: tl.constexpr, options: tl.constexpr):
    """The blocks of row b of (I + A)⁻¹; ``strict`` has row b of A, ``above`` the rows of the inverse above."""
    own = substituted(strict[b])
    found = ()
    for c in tl.static_range(b):
        below = tl.dot(strict[c], above[c * (c + 1) // 2 + c], input_precision=options.solving)
        for m in tl.static_range(c + 1, b):
            below = tl.dot(strict[m], above[m * (m + 1) // 2 + c], below, input_precision=options.solving)
        found = found + (-tl.dot(own, below, input_precision=options.solving),)
    return found + (own,)


@triton.jit
def substituted(strict):
    """(I + A)⁻¹ of a block A, strictly lower triangular: the rows after each row are reduced by it."""
    row = tl.arange(0, _BLOCK)[:, None]
    column = tl.arange(0, _BLOCK)[None, :]
    found = tl.where(row == column, 1.0, 0.0)
    for j in range(_BLOCK - 1):
        factor = tl.reduce(tl.where(column == j, strict, 0.0), 1, total)
        reduced = tl.reduce(tl.where(row == j, found, 0.0), 0, total)
        found = found - factor[:, None] * reduced[None, :]
    return found


@triton.jit
def store_block(pointer, index, b: tl.constexpr, c: tl.constexpr, block, options: tl.constexpr):
    """Store the block of 16 rows and columns b, c of a chunk's matrix."""
    row = tl.arange(0, _BLOCK)
    at = index * (options.tiles.C * options.tiles.C) + b * _BLOCK * options.tiles.C + c * _BLOCK
    tl.store(pointer + at + row[:, None] * options.tiles.C + row[None, :], block)
