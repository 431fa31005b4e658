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
    return (kv >= values[0]) & (kv < values[1])
