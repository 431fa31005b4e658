"""Soft cap, bias and mask of a tile of scores.

Parameters: ``program``, a `attention.Program`; ``kx`` [bk], the indices of keys for masks and biases, clamped to the
valid range.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_values(
    pointers, program, kx, before, n, options: tl.constexpr, of_mask: tl.constexpr, by_key: tl.constexpr
):  # fmt: skip
    """The values of a mask or bias, each of which broadcasts to a tile.

    With ``by_key`` those that vary by key, and the others from ``before``; else 0 for those that vary by key.
    """
    values: tl.constexpr = options.masks if of_mask else options.biases
    loaded = ()
    for i in tl.static_range(len(values)):
        if (values[i].axis == "kv") == by_key:
            loaded = loaded + (load_value(pointers[i], i, program, kx, n, options, of_mask),)
        elif by_key:
            loaded = loaded + (before[i],)
        else:
            loaded = loaded + (0,)
    return loaded


@triton.jit
def load_value(at, i: tl.constexpr, program, kx, n, options: tl.constexpr, of_mask: tl.constexpr):
    """The value ``i`` of a mask or bias."""
    value: tl.constexpr = options.masks[i] if of_mask else options.biases[i]
    count = 1
    if value.axis == "kv":
        count = n.key_axis
    elif value.axis == "q":
        count = n.T
    if value.by_batch:
        if value.by_head:
            at = at + program.b.to(tl.int64) * options.H * count
        else:
            at = at + program.b.to(tl.int64) * count
    if value.by_head:
        at = at + (program.hr.to(tl.int64) * count)[:, None]
    if value.axis == "q":
        at = at + program.qr[:, None]
    if value.axis == "kv":
        at = at + kx[None, :]
    return tl.load(at).to(value.dtype)


@triton.jit
def load_by_score(array, strides, program, kx, n):
    """A tile of an array [B or 1, H or 1, T, S]."""
    rows = (program.b * strides[0] + program.hr * strides[1]).to(tl.int64) * n.T + program.qr
    return tl.load(array + rows[:, None] * n.key_axis + kx[None, :])


@triton.jit
def apply_score(x, n, program, s, kx, values, options: tl.constexpr):
    """The scores with soft cap and bias."""
    if options.score is not None:
        s = options.score(s, program.b, program.hr[:, None], program.qr[:, None], kx[None, :], values)[0]
        s = s + tl.full([options.tiles.rows, options.tiles.bk], 0.0, tl.float32)
    if x.array is not None:
        s = s + load_by_score(x.array, n.array, program, kx, n)
    return s


@triton.jit
def allowed(x, n, program, tile, kx, values, options: tl.constexpr):
    """True where a score is not masked, [rows, bk]."""
    ok = program.real[:, None] & tl.full([options.tiles.rows, options.tiles.bk], 1, tl.int1)
    if options.by_page:
        ok = tile.present & ok
    elif options.page > 0:
        ok = tile.present[None, :] & ok
    if not options.is_even:
        ok = (tile.slot < n.S)[None, :] & ok
    if options.mask is not None:
        dense = ()
        for i in tl.static_range(len(n.dense)):
            dense = dense + (load_by_score(x.dense[i], n.dense[i], program, kx, n) != 0,)
        ok = ok & options.mask(program.b, program.hr[:, None], program.qr[:, None], kx[None, :], values, dense)
    return ok


@triton.jit
def within(b, h, q, kv, values, dense):
    """The mask of an `intervals.Interval`, whose fields are the values."""
    stop = tl.where((q >= values[4]) & (q < values[5]), tl.minimum(values[1], values[3] + q), 0)
    return (kv >= tl.maximum(values[0], values[2] + q)) & (kv < stop)


@triton.jit
def tiles_within(x, n, row, tile, options: tl.constexpr):
    """The `schedule.ItemSchedule.ranges` of a tile of queries, whose mask is an `intervals.Interval`."""
    first = tl.load(x.mask[0] + row)
    stop = tl.load(x.mask[1] + row)
    low = tl.load(x.mask[2] + row)
    high = tl.load(x.mask[3] + row)
    begin = tl.maximum(tile * options.bq, tl.load(x.mask[4] + row))
    end = tl.minimum(tile * options.bq + options.bq, tl.load(x.mask[5] + row))
    # The first and the last query that see slots; slots increase with queries.
    some = tl.maximum(first, low + begin)
    some_stop = tl.minimum(stop, high + end - 1)
    every = tl.maximum(first, low + end - 1)
    every_stop = tl.minimum(stop, high + begin)
    # Queries of padding see nothing, and so need the mask.
    is_whole = (begin == tile * options.bq) & (end == tl.minimum(tile * options.bq + options.bq, n.T))
    every_stop = tl.where(is_whole, every_stop, 0)
    is_some = (begin < end) & (some < some_stop)
    some = tl.where(is_some, some, n.S)
    some_stop = tl.where(is_some, some_stop, 0)
    if options.writes:
        new_stop = tl.load(x.new_stop + row)
        count = tl.load(x.new_size + row)
        some = tl.where(count > 0, tl.minimum(some, new_stop - count), some)
        some_stop = tl.where(count > 0, tl.maximum(some_stop, new_stop), some_stop)
    # The last tile of a row may reach beyond its slots, and then needs a mask.
    bk: tl.constexpr = options.tiles.bk
    return some // bk, (some_stop + bk - 1) // bk, (every + bk - 1) // bk, every_stop // bk
