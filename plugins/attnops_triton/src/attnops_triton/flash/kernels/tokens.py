"""What a program computes, its tokens and tiles, and loads and stores of their rows.

Gluon kernels call these functions too. They make no tensors of a given shape, except those with an index of features.
"""

# Tuples are joined, and conditions nested, as Triton's language requires.

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Program(NamedTuple):
    """What a program computes."""

    b: Any  # the batch
    h: Any  # the query head
    k: Any  # the kv head
    row: Any  # the index of its tile of queries, or of keys


class Tokens(NamedTuple):
    """The queries, or the keys, of a tile."""

    first: Any  # the first of them
    index: Any  # [n], their indices
    spread: Any  # the same, broadcasting to the tile of scores
    stop: Any  # T or S


class Row(NamedTuple):
    """A row of the tile schedule."""

    index: Any  # its index among those of all maps
    columns: Any  # a pointer to its columns


@triton.jit
def place_by_query(n, options: tl.constexpr):
    """The `Program` for one tile of queries.

    The last rows come first, since they are the longest with a causal mask.
    """
    place, bh = locate(n)
    row = n.rows - 1 - place
    b = bh // options.plan.H
    h = bh % options.plan.H
    return Program(b, h, h // options.plan.G, row)


@triton.jit
def place_by_key(n, options: tl.constexpr):
    """The `Program` for one tile of keys; ``h`` has a meaning only if ``options.splits_groups``."""
    place, bh = locate(n)
    if options.splits_groups:
        b = bh // options.plan.H
        h = bh % options.plan.H
        program = Program(b, h, h // options.plan.G, place)
    else:
        b = bh // options.plan.K
        k = bh % options.plan.K
        program = Program(b, k, k, place)
    return program


@triton.jit
def locate(n):
    """An index below ``rows``, and an index of batch and head.

    Programs iterate over ``together`` heads first, then over the rows, then over further heads.
    """
    pid = tl.program_id(0)
    section = pid // (n.together * n.rows)
    within = pid % (n.together * n.rows)
    size = tl.minimum(n.together, n.heads - section * n.together)
    return within // size, section * n.together + within % size


@triton.jit
def queries(first, n, options: tl.constexpr):
    """The `Tokens` of a tile of queries; not for Gluon."""
    index = first + tl.arange(0, options.bq)
    return Tokens(first, index, by_query(index, options), n.T)


@triton.jit
def keys(first, n, options: tl.constexpr):
    """The `Tokens` of a tile of keys; not for Gluon."""
    index = first + tl.arange(0, options.bk)
    return Tokens(first, index, by_key(index, options), n.S)


@triton.jit
def by_query(x, options: tl.constexpr):
    """A tensor per query, broadcasting to the tile of scores."""
    return x[None, :] if options.transposed else x[:, None]


@triton.jit
def by_key(x, options: tl.constexpr):
    """A tensor per key, broadcasting to the tile of scores."""
    return x[:, None] if options.transposed else x[None, :]


@triton.jit
def base(array, n, program, size, layout: tl.constexpr, columns=1):
    """The pointer to the program's ``size · columns`` elements in an array [B or 1, H or 1, …]."""
    b = program.b
    if layout.bit >= 0:
        # Under `jax.vmap` all slices may share one array.
        b = b * (n.batched >> layout.bit & 1)
    at = array + b.to(tl.int64) * layout.heads * size * columns
    if layout.heads > 1:
        at = at + program.h.to(tl.int64) * size * columns
    return at


@triton.jit
def load_token(array, n, program, tokens, layout: tl.constexpr, edge: tl.constexpr):
    """The elements of tokens in an array [B or 1, H or 1, T or S].

    Tokens beyond the last one have its element: with zeros a function might divide by 0.
    """
    index = tokens.index
    if edge:
        index = tl.minimum(index, tokens.stop - 1)
    return tl.load(base(array, n, program, tokens.stop, layout) + index)


@triton.jit
def rows_at(
    array, n, program, tokens, bit: tl.constexpr, heads: tl.constexpr, by_query_head: tl.constexpr, dim: tl.constexpr
):  # fmt: skip
    """Pointers to the rows of tokens in an array [B or 1, length, heads, dim], [n, 1]."""
    stride: tl.constexpr = heads * dim
    b = program.b
    if bit >= 0:
        b = b * (n.batched >> bit & 1)
    head = program.h if by_query_head else program.k
    at = array + b.to(tl.int64) * tokens.stop * stride + head.to(tl.int64) * dim
    return at + tokens.first.to(tl.int64) * stride + (tokens.index - tokens.first)[:, None] * stride


@triton.jit
def columns_of(i: tl.constexpr, of_value: tl.constexpr, options: tl.constexpr):
    """The features of a chunk of D or Dv, [1, width]; not for Gluon."""
    chunks: tl.constexpr = options.value_chunks if of_value else options.chunks
    return (chunks[i][0] + tl.arange(0, chunks[i][1]))[None, :]


@triton.jit
def load_rows(
    array, n, program, tokens, bit: tl.constexpr, by_query_head: tl.constexpr, of_value: tl.constexpr,
    edge: tl.constexpr, options: tl.constexpr,
):  # fmt: skip
    """The chunks of the rows of tokens in an array [B or 1, length, heads, dim], [n, width] each; not for Gluon.

    ``edge``: whether tokens may be beyond the last one.
    """
    heads: tl.constexpr = options.plan.H if by_query_head else options.plan.K
    dim: tl.constexpr = options.plan.Dv if of_value else options.plan.D
    at = rows_at(array, n, program, tokens, bit, heads, by_query_head, dim)
    loaded = ()
    for i in tl.static_range(len(options.value_chunks if of_value else options.chunks)):
        columns = columns_of(i, of_value, options)
        mask = rows_mask(tokens, columns, i, of_value, edge, options)
        loaded = loaded + (tl.load(at + columns, mask=mask, other=None if mask is None else 0.0),)
    return loaded


@triton.jit
def rows_mask(
    tokens, columns, i: tl.constexpr, of_value: tl.constexpr, edge: tl.constexpr, options: tl.constexpr
):  # fmt: skip
    """Which elements of a chunk exist, of tokens that may be beyond the last one if ``edge``; None if all do."""
    chunks: tl.constexpr = options.value_chunks if of_value else options.chunks
    dim: tl.constexpr = options.plan.Dv if of_value else options.plan.D
    mask = None
    if edge:
        mask = (tokens.index < tokens.stop)[:, None]
    if chunks[i][0] + chunks[i][1] > dim:
        inside = columns < dim
        mask = mask & inside if edge else inside
    return mask


@triton.jit
def store_rows(
    array, n, program, tokens, values, factor, heads: tl.constexpr, by_query_head: tl.constexpr,
    of_value: tl.constexpr, dtype: tl.constexpr, options: tl.constexpr,
):  # fmt: skip
    """Store chunks [n, width], times a factor, in an array [B, length, heads, dim]; not for Gluon."""
    dim: tl.constexpr = options.plan.Dv if of_value else options.plan.D
    at = rows_at(array, n, program, tokens, -1, heads, by_query_head, dim)
    for i in tl.static_range(len(values)):
        columns = columns_of(i, of_value, options)
        mask = rows_mask(tokens, columns, i, of_value, not options.is_even, options)
        tl.store(at + columns, (values[i] * factor).to(dtype), mask=mask)


@triton.jit
def load_statistic(array, n, program, q, edge: tl.constexpr, other: tl.constexpr, layout: tl.constexpr):
    """A statistic of the backward pass per query, [bq]; ``other`` for queries beyond the last one."""
    mask = q.index < n.T if edge else None
    return tl.load(base(array, n, program, n.T, layout) + q.index, mask=mask, other=other if edge else None)


@triton.jit
def store_token(array, n, program, tokens, values, options: tl.constexpr):
    """Store an element per token in an array [B, H, T or S]."""
    at = base(array, n, program, tokens.stop, options.output) + tokens.index
    tl.store(at, values, mask=None if options.is_even else tokens.index < tokens.stop)


@triton.jit
def find_row(x, n, program, options: tl.constexpr):
    """The program's `Row`."""
    index = program.row
    columns = 0
    if x.ranges is not None:
        map_index = program.b * n.map_batch
        if options.map_by_head:
            map_index = map_index + program.h
        index = map_index * n.rows + program.row
    if x.columns is not None:
        columns = x.columns + index.to(tl.int64) * n.width
    return Row(index, columns)


@triton.jit
def full_tiles(x, n, row):
    """Start and stop of the FULL tiles of a row."""
    if x.ranges is None:
        start = n.full_start
        stop = n.full_stop
    else:
        start = tl.load(x.ranges + row.index * 4)
        stop = tl.load(x.ranges + row.index * 4 + 1)
    return start, stop


@triton.jit
def partial_tiles(x, n, row):
    """Start and stop of the PARTIAL tiles of a row."""
    if x.ranges is None:
        start = n.partial_start
        stop = n.partial_stop
    else:
        start = tl.load(x.ranges + row.index * 4 + 2)
        stop = tl.load(x.ranges + row.index * 4 + 3)
    return start, stop


@triton.jit
def column(x, row, i):
    """The column of the tile ``i`` of a row."""
    if x.columns is not None:
        i = tl.load(row.columns + i)
    return i


@triton.jit
def over_tiles(
    step: tl.constexpr, state, x, n, program, tokens, given, values, options: tl.constexpr
):  # fmt: skip
    """The state after the steps of the program's active tiles, FULL ones first; not for Gluon.

    If ``options.flat``, each tile has a step for each of the kv head's query heads.
    """
    heads: tl.constexpr = options.plan.G if options.flat else 1
    row = find_row(x, n, program, options)
    start, stop = full_tiles(x, n, row)
    for t in range(start * heads, stop * heads):
        tile, here = place_tile(x, program, row, t, options)
        state = step(state, x, n, here, tokens, given, values, tile, 0, options, False)
    # Otherwise no tile is PARTIAL.
    if x.ranges is not None or not options.is_even:
        start, stop = partial_tiles(x, n, row)
        for t in range(start * heads, stop * heads):
            tile, here = place_tile(x, program, row, t, options)
            bits_at = 0
            if x.words is not None:
                bits_at = tl.load(x.first + row.index) + (t // heads - start)
            state = step(state, x, n, here, tokens, given, values, tile, bits_at, options, True)
    return state


@triton.jit
def place_tile(x, program, row, t, options: tl.constexpr):
    """The column of the tile at index ``t`` of a loop, and the `Program` of its head."""
    i = t
    if options.flat:
        program = Program(program.b, program.k * options.plan.G + t % options.plan.G, program.k, program.row)
        i = t // options.plan.G
    # The interpreter's loops count in Python's integers.
    return tl.cast(column(x, row, i), tl.int32), program


@triton.jit
def zeros(rows: tl.constexpr, of_value: tl.constexpr, options: tl.constexpr):
    """Sums for the chunks of D or Dv, [rows, width] each."""
    chunks: tl.constexpr = options.value_chunks if of_value else options.chunks
    sums = ()
    for i in tl.static_range(len(chunks)):
        sums = sums + (tl.full([rows, chunks[i][1]], 0.0, tl.float32),)
    return sums
