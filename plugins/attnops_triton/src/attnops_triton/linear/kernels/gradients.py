"""The kernels of reverse mode: one passes on the gradient of a state from chunk to chunk, one has all other gradients.

The formulas are those of `attnops_tpu.linear.backward`. With S the state before a chunk, dS' the gradient of the one
after it, e the products of decays between two tokens, "kept" those from the chunk's start, "rest" those up to its end
and "whole" the product of all, B the betas, s the scale, A = tril(Q Kᵀ ∘ e), M = strict tril(K Kᵀ ∘ e),
L = (I + M B)⁻¹ and Y = L (V − kept K S), a chunk is O = s (kept Q S + A B Y), S' = whole S + Kᵀ (rest B Y)::

    dV = Z = Lᵀ (s (A B)ᵀ dO + rest B K dS')            dS = whole dS' + s Qᵀ kept dO − Kᵀ kept Z
    P = s (dO Yᵀ) ∘ e    W = −(Z Yᵀ) ∘ e, strictly lower
    dQ = s kept dO Sᵀ + P B K
    dK = rest B Y dS'ᵀ + (P B)ᵀ Q + (W B + (W B)ᵀ) K − kept Z Sᵀ

The first line needs no state, so that it goes from the last chunk to the first one; all others are of chunks alone.
With X = P ∘ Q Kᵀ + W ∘ K Kᵀ the gradients of token j's beta and of the logarithm of token t's decay are ::

    Σ_i X_ij + rest_j K_j · (dS' Y_j)
    Σ_{i ≥ t} (Σ_{j < t} (X B)_ij + kept_i (s Q_i · S dO_i − K_i · S Z_i))
        + Σ_{j < t} rest_j β_j K_j · (dS' Y_j) + whole S · dS'

Without beta, B = I, Y = V, W = 0, there is no system, and nothing has a factor Z.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.standard import _sum_combine as total

from attnops_triton.linear.kernels.parts import (
    load_flags,
    load_gate,
    load_keys,
    locate,
    narrowed,
    parts,
    product,
    token_of,
)
from attnops_triton.linear.kernels.states import (
    load_gates,
    load_masked,
    load_square,
    load_state,
    load_whole,
    places,
    places_of_state,
    store_state,
    store_values,
)


@triton.jit
def attnops_linear_chunks_backward(x, n, options: tl.constexpr):
    """The gradients of values and of states, chunk by chunk from the last one on.

    ``x.initial`` is the gradient of the last state, and ``x.state`` that of the first one.
    """
    pid = tl.program_id(0)
    program = locate(pid // n.columns, options)
    first = pid % n.columns * options.tiles.columns
    d_state = load_state(x.initial, program, first, options)
    for i in range(0, n.chunks):
        chunk = n.chunks - 1 - i
        start = chunk * options.tiles.C
        index = program.state * n.chunks + chunk
        store_state(x.d_states, index, first, narrowed(d_state, options), options)
        real, _ = load_flags(x, n, program, start, options.tiles.C, options)
        # Loaded as products need them, and so by copies of shared memory while the chunk before is computed.
        query = load_transposed(x.query, n, program, start, real, options)
        key = load_keys(x.key, n, program, start, real, options.tiles.C, 0, options.width, options)
        at, mask = places(n, program, start, first, real, options)
        d_out = load_masked(x.d_out + at, mask, options)
        d_value = product((key,), parts(d_state, options.parts, options), options.parts, options)
        if x.gates is not None:
            d_value = d_value * load_gates(x, index, 1, options)[:, None]
        scores = parts(load_square(x.scores, index, True, options).to(tl.float32), options.parts, options)
        d_value = d_value + options.scale * product(scores, (d_out,), options.parts, options)
        if x.inverse is not None:
            inverse = load_square(x.inverse, index, True, options).to(tl.float32)
            right = parts(d_value, options.parts, options)
            d_value = product(parts(inverse, options.parts, options), right, options.parts, options)
        if x.flags is not None:  # also where a gradient is not finite
            d_value = tl.where(real[:, None], d_value, 0.0)
        store_values(x.d_value, at, narrowed(d_value, options), n, start, first, options)
        of_query = d_out.to(tl.float32) * options.scale
        of_key = d_value
        if options.gated:
            kept = load_gates(x, index, 0, options)[:, None]
            of_query = of_query * kept
            of_key = of_key * kept
            d_state = d_state * load_whole(x, index, options)
        added = product((query,), parts(of_query, options.parts, options), options.parts, options)
        d_state = d_state + added
        if x.inverse is not None:
            added = product((tl.trans(key),), parts(of_key, options.parts, options), options.parts, options)
            d_state = d_state - added
    store_state(x.state, program.state, first, d_state, options)


@triton.jit
def load_transposed(pointer, n, program, start, real, options: tl.constexpr):
    """The queries or keys of a chunk's tokens, [width, C] operands; 0 for padding."""
    feature = tl.arange(0, options.width)[:, None]
    at = (token_of(n, program, start) * options.K + program.h // options.G) * options.D
    at = pointer + at + tl.arange(0, options.tiles.C)[None, :] * (options.K * options.D) + feature
    if options.width > options.D:
        return tl.load(at, mask=real[None, :] & (feature < options.D), other=0.0)
    if options.is_even:
        return tl.load(at)
    return tl.load(at, mask=real[None, :], other=0.0)


@triton.jit
def attnops_linear_gradients(x, n, options: tl.constexpr):
    """The gradients of a chunk's queries, keys, decays and betas."""
    pid = tl.program_id(0)
    chunk = pid % n.chunks
    program = locate(pid // n.chunks, options)
    index = program.state * n.chunks + chunk
    start = chunk * options.tiles.C
    C: tl.constexpr = options.tiles.C
    real, _ = load_flags(x, n, program, start, C, options)
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]

    of_outputs = tl.full([C, C], 0.0, tl.float32)
    of_values = tl.full([C, C], 0.0, tl.float32)
    for i in range(0, n.columns):
        at, mask = places(n, program, start, i * options.tiles.columns, real, options)
        solved = tl.trans(load_masked(x.solved + at, mask, options))
        d_out = load_masked(x.d_out + at, mask, options)
        of_outputs = tl.dot(d_out, solved, of_outputs, input_precision=options.precision)
        if x.beta is not None:
            d_value = load_masked(x.d_value + at, mask, options)
            of_values = tl.dot(d_value, solved, of_values, input_precision=options.precision)
    of_outputs = of_outputs * options.scale
    if options.gated:
        coarse = load_gates(x, index, 3, options)
        fine = load_gates(x, index, 4, options)
        resets = load_gates(x, index, 5, options)
        keeps = (row >= column) & (resets[:, None] == resets[None, :])
        logarithm = coarse[:, None] - coarse[None, :] + (fine[:, None] - fine[None, :])
        decays = tl.exp(tl.where(keeps, logarithm, float("-inf")))
        of_outputs = of_outputs * decays
        of_values = of_values * decays
    else:
        of_outputs = tl.where(row >= column, of_outputs, 0.0)
    of_values = tl.where(row > column, -of_values, 0.0)

    features: tl.constexpr = options.tiles.features
    blocks: tl.constexpr = options.width // features
    if options.gated or x.beta is not None:
        found = of_outputs * scores_of(x.query, x, n, program, start, real, options)
    if x.beta is not None:
        beta = load_gate(x.beta, n, program, start, real, C, options)
        found = found + of_values * scores_of(x.key, x, n, program, start, real, options)
        d_beta = tl.reduce(found, 0, total)
        found = found * beta[None, :]
        of_outputs = of_outputs * beta[None, :]
        of_values = narrowed(of_values * beta[None, :], options)
        of_values = of_values + tl.trans(of_values)
    of_outputs = narrowed(of_outputs, options)
    if options.gated:
        earlier = tl.load(x.earlier + row * C + column)
        before = tl.dot(earlier, tl.trans(narrowed(found, options)), input_precision=options.precision)
        d_decay = tl.reduce(tl.where(row <= column, before, 0.0), 1, total)
        kept = load_gates(x, index, 0, options)[None, :]
        rest = load_gates(x, index, 2, options)[None, :]
    of_kept = tl.full([C], 0.0, tl.float32)
    of_rest = tl.full([C], 0.0, tl.float32)
    of_whole = tl.full([features], 0.0, tl.float32)
    # Products have tokens as columns: so what is in registers is a right operand, and goes to shared memory. Assemblers
    # before CUDA 13.3 may reuse registers that products on Hopper still read as left operands; see NOTES.md.
    for i in tl.static_range(blocks):
        of_query = tl.full([features, C], 0.0, tl.float32)
        of_key = tl.full([features, C], 0.0, tl.float32)
        of_update = tl.full([features, C], 0.0, tl.float32)
        for j in range(0, n.columns):
            first = j * options.tiles.columns
            at, mask = places_of_state(index, i * features, features, first, options)
            if options.D % features == 0 and options.Dv % options.tiles.columns == 0:
                state = tl.load(x.states + at)
                d_state = tl.load(x.d_states + at)
            else:
                state = tl.load(x.states + at, mask=mask, other=0.0)
                d_state = tl.load(x.d_states + at, mask=mask, other=0.0)
            at, mask = places(n, program, start, first, real, options)
            d_out = tl.trans(load_masked(x.d_out + at, mask, options))
            solved = tl.trans(load_masked(x.solved + at, mask, options))
            of_query = tl.dot(state, d_out, of_query, input_precision=options.precision)
            of_update = tl.dot(d_state, solved, of_update, input_precision=options.precision)
            if x.beta is not None:
                d_value = tl.trans(load_masked(x.d_value + at, mask, options))
                of_key = tl.dot(state, d_value, of_key, input_precision=options.precision)
            if options.gated:
                of_whole += tl.reduce(state.to(tl.float32) * d_state.to(tl.float32), 1, total)
        query = tl.trans(load_keys(x.query, n, program, start, real, C, i * features, features, options))
        key = tl.trans(load_keys(x.key, n, program, start, real, C, i * features, features, options))
        of_query = of_query * options.scale
        if options.gated:
            of_query = of_query * kept
            of_key = of_key * kept
            of_update = of_update * rest
            of_kept += tl.reduce(of_query * query.to(tl.float32) - of_key * key.to(tl.float32), 0, total)
        if options.gated or x.beta is not None:
            of_rest += tl.reduce(of_update * key.to(tl.float32), 0, total)
        if x.beta is not None:
            of_update = of_update * beta[None, :] - of_key
            of_update = tl.dot(key, of_values, of_update, input_precision=options.precision)
        of_query = tl.dot(key, tl.trans(of_outputs), of_query, input_precision=options.precision)
        of_update = tl.dot(query, of_outputs, of_update, input_precision=options.precision)
        store_keys(x.d_query, of_query, n, program, start, real, i * features, options)
        store_keys(x.d_key, of_update, n, program, start, real, i * features, options)
    if x.beta is not None:
        store_gate(x.d_beta, d_beta + of_rest, n, program, start, real, options)
        of_rest = of_rest * beta
    if options.gated and x.d_decay is not None:
        d_decay += tl.reduce(tl.where(row <= column, of_kept[None, :], of_rest[None, :]), 1, total)
        d_decay += tl.reduce(of_whole, 0, total) * load_whole(x, index, options)
        store_gate(x.d_decay, d_decay, n, program, start, real, options)


@triton.jit
def scores_of(pointer, x, n, program, start, real, options: tl.constexpr):
    """The products of a chunk's queries or keys with its keys, [C, C]."""
    C: tl.constexpr = options.tiles.C
    features: tl.constexpr = options.tiles.features
    blocks: tl.constexpr = options.width // features
    found = tl.full([C, C], 0.0, tl.float32)
    for i in tl.static_range(blocks):
        left = load_keys(pointer, n, program, start, real, C, i * features, features, options)
        right = load_keys(x.key, n, program, start, real, C, i * features, features, options)
        found = tl.dot(left, tl.trans(right), found, input_precision=options.precision)
    return found


@triton.jit
def store_keys(pointer, block, n, program, start, real, first: tl.constexpr, options: tl.constexpr):
    """Store features from ``first`` on, rows of ``block``, of a chunk's tokens in [B, T, H, D]; 0 for padding."""
    C: tl.constexpr = options.tiles.C
    column = first + tl.arange(0, options.tiles.features)
    at = (token_of(n, program, start) * options.H + program.h) * options.D
    at = pointer + at + tl.arange(0, C)[:, None] * (options.H * options.D) + column[None, :]
    block = tl.trans(block.to(pointer.dtype.element_ty))
    if options.is_even and options.D % options.tiles.features == 0:
        tl.store(at, block)
    else:
        there = (start + tl.arange(0, C) < n.T)[:, None] & (column < options.D)[None, :]
        tl.store(at, tl.where(real[:, None], block, 0.0), mask=there)


@triton.jit
def store_gate(pointer, values, n, program, start, real, options: tl.constexpr):
    """Store a chunk's values in [B, T, H]; 0 for padding."""
    token = tl.arange(0, options.tiles.C)
    at = token_of(n, program, start) * options.H + program.h + token * options.H
    tl.store(pointer + at, tl.where(real, values, 0.0), mask=start + token < n.T)
