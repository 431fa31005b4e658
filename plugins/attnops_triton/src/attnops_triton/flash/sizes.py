"""Which calls one compiled program serves: any lengths and batch, with two programs by divisibility.

Lengths, batch, strides and numbers of tiles are arguments of kernels. Their code differs only between lengths that are
multiples of the tile sizes and lengths that are not, which need checks at the last tokens. With arrays of T × S
elements there is a third, since the rows of such an array are aligned or not.
"""

from __future__ import annotations

from attnops_triton.flash.plan import FlashPlan, TileSizes

# Bytes to which loads of several elements must be aligned; elements of a dense mask have one byte.
_ALIGNED = 16


def is_even(plan: FlashPlan, tiles: TileSizes) -> bool:
    """Whether both lengths are multiples of both tile sizes, so that no tile reaches beyond the last token."""
    return not plan.T % max(tiles.bq, tiles.bk) and not plan.S % max(tiles.bq, tiles.bk)


def divisible(plan: FlashPlan, tiles: TileSizes) -> frozenset[str]:
    """The integer arguments of a kernel that its program may rely on to be multiples of 16."""
    lengths = frozenset("TS")
    if is_even(plan, tiles):
        return lengths
    rows = plan.scoring.array or plan.scoring.dense > 0
    return lengths if rows and not plan.T % _ALIGNED and not plan.S % _ALIGNED else frozenset()
