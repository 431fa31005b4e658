"""The table of tiles, warps and stages; by architecture, dtype, head dim and kernel."""

from __future__ import annotations

import dataclasses
from typing import Final

from attnops_triton.flash.plan import Tiles

T = Tiles
Row = tuple[Tiles, Tiles, Tiles, Tiles]  # of forward, by query, by key, by score
# By architecture, bytes an element, and the larger head dim, up to. Each was compiled: at head dims up to 128 none
# spills in 16 bits. Fewer instructions a score decided among those that do not; none was timed, see NOTES.md.
TABLE: Final[dict[str, dict[int, dict[int, Row]]]] = {
    "sm_80": {
        2: {
            64: (T(128, 64, 4, 3), T(128, 64, 8, 2), T(64, 128, 8, 2), T(64, 64, 4, 1)),
            128: (T(128, 64, 8, 3), T(128, 64, 8, 2), T(32, 128, 8, 2), T(64, 64, 8, 1)),
            192: (T(128, 64, 8, 2), T(32, 64, 4, 2), T(32, 32, 4, 2), T(32, 32, 4, 1)),
            256: (T(64, 64, 8, 2), T(64, 64, 8, 1), T(32, 64, 8, 1), T(32, 32, 4, 1)),
            576: (T(32, 32, 8, 1), T(32, 32, 8, 1), T(16, 32, 8, 1), T(16, 16, 4, 1)),
        },
    },
    "sm_86": {  # 99 KB of shared memory; the consumer GPUs after it too
        2: {
            64: (T(128, 64, 4, 2), T(128, 64, 8, 1), T(64, 64, 8, 2), T(64, 64, 4, 1)),
            128: (T(128, 32, 8, 2), T(64, 32, 8, 2), T(32, 64, 4, 2), T(32, 32, 4, 1)),
            192: (T(64, 32, 8, 2), T(32, 64, 4, 1), T(32, 32, 4, 1), T(32, 32, 4, 1)),
            256: (T(64, 32, 8, 1), T(32, 32, 8, 1), T(32, 32, 8, 1), T(32, 32, 4, 1)),
            576: (T(16, 16, 8, 1), T(16, 16, 8, 1), T(16, 16, 8, 1), T(16, 16, 4, 1)),
        },
    },
    "sm_90": {
        2: {
            128: (T(128, 128, 8, 2), T(128, 64, 8, 2), T(64, 128, 8, 2), T(64, 64, 8, 1)),
            192: (T(128, 64, 8, 2), T(64, 64, 8, 1), T(32, 64, 8, 1), T(64, 64, 8, 1)),
            256: (T(128, 64, 8, 2), T(64, 32, 4, 1), T(32, 32, 4, 1), T(32, 32, 4, 1)),
            576: (T(64, 32, 8, 1), T(32, 32, 8, 1), T(16, 32, 8, 1), T(16, 16, 4, 1)),
        },
    },
    "sm_100": {
        2: {
            64: (T(128, 128, 8, 3), T(128, 64, 8, 2), T(64, 128, 8, 2), T(64, 64, 8, 1)),
            128: (T(128, 64, 8, 3), T(128, 64, 8, 2), T(64, 128, 8, 2), T(64, 64, 8, 1)),
            256: (T(128, 64, 8, 1), T(64, 64, 8, 1), T(32, 64, 8, 1), T(32, 32, 4, 1)),
            576: (T(64, 32, 8, 1), T(32, 32, 8, 1), T(16, 32, 8, 1), T(16, 16, 4, 1)),
        },
    },
    "gfx942": {  # a wave may have 512 registers where there are 4 of them, and a program 64 KB of shared memory
        2: {
            64: (T(128, 64, 4, 2), T(128, 64, 8, 2), T(64, 64, 4, 1), T(64, 64, 4, 1)),
            128: (T(128, 64, 4, 2), T(64, 64, 4, 2), T(64, 64, 4, 1), T(64, 64, 4, 1)),
            256: (T(64, 64, 4, 1), T(64, 32, 4, 1), T(32, 64, 4, 1), T(32, 32, 4, 1)),
            576: (T(32, 32, 4, 1), T(16, 16, 4, 1), T(16, 16, 4, 1), T(16, 16, 4, 1)),
        },
    },
}  # fmt: skip
_SINGLE: Final[dict[int, Row]] = {
    64: (T(64, 32, 8, 2), T(32, 32, 8, 1), T(32, 32, 8, 1), T(32, 32, 4, 1)),
    128: (T(64, 32, 8, 2), T(32, 32, 8, 1), T(16, 32, 8, 1), T(32, 32, 8, 1)),
    256: (T(32, 32, 8, 1), T(16, 32, 8, 1), T(16, 32, 8, 1), T(16, 16, 4, 1)),
    576: (T(16, 16, 8, 1), T(16, 16, 8, 1), T(16, 16, 8, 1), T(16, 16, 4, 1)),
}
for _arch, _by_size in TABLE.items():
    # Products of float32 have no tensor cores; registers, which they need most of, are alike everywhere but on AMD.
    _by_size[4] = dict(_SINGLE) if _arch != "gfx942" else {
        limit: tuple(T(t.bq, t.bk, 4, 1) for t in row) for limit, row in _SINGLE.items()  # type: ignore[misc]
    }  # fmt: skip

# Where float16 takes more registers than bfloat16, so that the row above would spill.
_FLOAT16: Final[dict[str, dict[int, Row]]] = {
    "gfx942": {128: (*TABLE["gfx942"][2][128][:2], T(32, 64, 4, 1), TABLE["gfx942"][2][128][3])},
}


def choose(
    arch: str, dtype: str, dim: int, block_q: int | None, block_k: int | None, by_score: bool = False
) -> tuple[Tiles, ...]:
    """The tiles of each pass.

    Args:
        arch: such as ``"sm_90"``; one that the table lacks gets the nearest one's.
        dtype: of query, key and value.
        dim: the larger of D and Dv.
        block_q: what the metadata states, for all passes.
        block_k: likewise.
        by_score: whether the forward loads elements of its own for each score: masks and biases that are arrays. They
            take shared memory, so that the table's tiles of keys are halved.
    """
    by_dim = TABLE[known(arch)][4 if dtype == "float32" else 2]
    if dtype == "float16":
        by_dim = by_dim | _FLOAT16.get(known(arch), {})
    row = by_dim[min(limit for limit in by_dim if dim <= limit)]
    if by_score:
        row = (dataclasses.replace(row[0], bk=max(16, row[0].bk // 2)), *row[1:])
    *passes, last = (T(block_q or t.bq, block_k or t.bk, t.warps, t.stages) for t in row)
    square = min(last.bq, last.bk)
    return (*passes, T(square, square, last.warps, last.stages))


def known(arch: str) -> str:
    """The architecture of the table that is nearest."""
    if arch in TABLE:
        return arch
    if arch.startswith("gfx"):
        return "gfx942"
    if arch in ("sm_86", "sm_89", "sm_120", "sm_121"):
        return "sm_86"
    number = int("".join(c for c in arch if c.isdigit()) or 90)
    return "sm_100" if number >= 100 else "sm_90" if number >= 90 else "sm_80"
