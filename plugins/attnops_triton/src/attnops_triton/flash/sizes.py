"""Which lengths share one compiled program.

Lengths, batch, strides and numbers of tiles are arguments of kernels. A kernel has one program for lengths that are
multiples of its tile sizes, and one for other lengths, which checks the last tokens. With arrays of T × S elements
there is a third: the rows of such an array are aligned or not.
"""

from __future__ import annotations

from attnops_triton.flash.plan import FlashPlan, TileSizes

# Alignment in bytes of a load of several elements. Elements of a dense mask have one byte.
_ALIGNED = 16


def is_even(plan: FlashPlan, tiles: TileSizes) -> bool:
    """Whether both lengths are multiples of both tile sizes, so that no tile reaches beyond the last token."""
    return not plan.T % max(tiles.bq, tiles.bk) and not plan.S % max(tiles.bq, tiles.bk)


def divisible(plan: FlashPlan, tiles: TileSizes) -> frozenset[str]:
    """The integer arguments of a kernel that are multiples of 16 in all calls of its program."""
    lengths = frozenset("TS")
    if is_even(plan, tiles):
        return lengths
    loads_rows = plan.scoring.array or plan.scoring.dense > 0
    return lengths if loads_rows and not plan.T % _ALIGNED and not plan.S % _ALIGNED else frozenset()
