"""The table of tiles, warps and stages; by architecture, dtype, head dim and kernel."""

from __future__ import annotations

from typing import Final

from attnops_triton.plan import Plan, Tiles

PASSES: Final = ("forward", "by_query", "by_key", "by_score")
T = Tiles
# By the larger head dim, up to; tiles of each pass.
_HALF: Final = {
    64: (T(128, 64, 4, 3), T(128, 64, 8, 2), T(64, 128, 8, 2), T(64, 64, 4, 1)),
    128: (T(128, 64, 8, 3), T(128, 64, 8, 2), T(64, 128, 8, 2), T(64, 64, 4, 1)),
    256: (T(128, 64, 8, 2), T(64, 64, 8, 1), T(32, 64, 8, 1), T(32, 32, 4, 1)),
    576: (T(64, 32, 8, 1), T(32, 32, 8, 1), T(16, 32, 8, 1), T(16, 16, 4, 1)),
}
_SINGLE: Final = {
    64: (T(64, 32, 4, 2), T(64, 32, 4, 1), T(32, 64, 4, 1), T(32, 32, 4, 1)),
    128: (T(64, 32, 8, 2), T(32, 32, 4, 1), T(32, 32, 4, 1), T(32, 32, 4, 1)),
    256: (T(32, 32, 8, 1), T(16, 32, 8, 1), T(16, 32, 8, 1), T(16, 16, 4, 1)),
    576: (T(16, 16, 8, 1), T(16, 16, 8, 1), T(16, 16, 8, 1), T(16, 16, 4, 1)),
}
TABLE: Final = {arch: {2: _HALF, 4: _SINGLE} for arch in ("sm_80", "sm_90", "sm_100", "gfx942")}


def choose(arch: str, itemsize: int, dim: int, block_q: int | None, block_k: int | None) -> tuple[Tiles, ...]:
    """The tiles of each pass.

    Args:
        arch: such as ``"sm_90"``; one that the table lacks gets the nearest one's.
        itemsize: bytes an element of query, key and value.
        dim: the larger of D and Dv.
        block_q: what the metadata states, for all passes.
        block_k: likewise.
    """
    by_dim = TABLE[known(arch)][itemsize]
    row = by_dim[min(limit for limit in by_dim if dim <= limit)]
    *passes, by_score = (T(block_q or t.bq, block_k or t.bk, t.warps, t.stages) for t in row)
    square = min(by_score.bq, by_score.bk)
    return (*passes, T(square, square, by_score.warps, by_score.stages))


def known(arch: str) -> str:
    """The architecture of the table that is nearest."""
    if arch in TABLE:
        return arch
    if arch.startswith("gfx"):
        return "gfx942"
    number = int("".join(c for c in arch if c.isdigit()) or 90)
    return "sm_100" if number >= 100 else "sm_90" if number >= 90 else "sm_80"
