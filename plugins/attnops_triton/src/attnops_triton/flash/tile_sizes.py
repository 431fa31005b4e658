"""Tile sizes, warps and stages: a table by architecture, dtype, head dim and kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from attnops_triton.flash.plan import TileSizes
from attnops_triton.targets import LIKE, known

T = TileSizes
W = functools.partial(TileSizes, registers=255)  # ptxas may use all registers
KernelTiles = tuple[TileSizes, TileSizes, TileSizes, TileSizes]  # for forward, by_query, by_key, by_score
# By architecture, bytes per element, and upper bound of D and Dv. All rows were compiled: in 16 bits none spills at
# head dims up to 128. Of the tiles without spills, a row has those with the fewest instructions per score. No tile was
# timed (NOTES.md).
TABLE: Final[dict[str, dict[int, dict[int, KernelTiles]]]] = {
    "sm_80": {
        2: {
            64: (T(128, 64, 4, 3), T(128, 64, 8, 3), T(64, 128, 8, 3), T(64, 64, 4, 1)),
            128: (T(128, 64, 8, 3), T(128, 64, 8, 3), T(32, 128, 8, 2), T(64, 64, 8, 1)),
            192: (T(128, 64, 8, 2), T(32, 64, 4, 2), T(32, 32, 4, 2), T(32, 32, 4, 1)),
            256: (T(64, 64, 8, 2), T(64, 64, 8, 2), T(32, 32, 4, 2), T(32, 32, 4, 1)),
            576: (T(32, 32, 8, 1), T(32, 32, 8, 1), T(16, 32, 8, 1), T(16, 16, 4, 1)),
        },
    },
    "sm_86": {  # 99 KB of shared memory, as newer consumer GPUs have
        2: {
            64: (T(128, 64, 4, 3), T(128, 64, 8, 1), T(64, 64, 8, 2), T(64, 64, 4, 1)),
            128: (T(128, 32, 8, 2), T(64, 32, 8, 2), T(32, 64, 4, 2), T(32, 32, 4, 1)),
            192: (T(64, 32, 8, 2), T(32, 64, 4, 1), T(32, 32, 4, 1), T(32, 32, 4, 1)),
            256: (T(64, 32, 8, 2), T(32, 32, 8, 2), T(32, 32, 4, 2), T(32, 32, 4, 1)),
            576: (T(16, 16, 8, 1), T(16, 16, 8, 1), T(16, 16, 8, 1), T(16, 16, 4, 1)),
        },
    },
    "sm_90": {
        2: {
            128: (T(128, 128, 8, 2), T(128, 64, 8, 2), T(64, 128, 8, 2), T(64, 64, 8, 1)),
            192: (T(128, 64, 8, 2), T(64, 64, 8, 2), T(32, 64, 8, 2), T(64, 64, 8, 1)),
            256: (T(128, 64, 8, 2), T(64, 32, 4, 2), T(32, 32, 4, 2), T(32, 32, 4, 1)),
            576: (T(64, 32, 8, 1), T(32, 32, 8, 1), T(16, 32, 8, 1), T(16, 16, 4, 1)),
        },
    },
    "sm_100": {
        2: {
            64: (T(128, 128, 8, 3), T(128, 64, 8, 2), T(64, 128, 8, 2), T(64, 64, 8, 1)),
            # By default ptxas uses 128 registers and spills, though shared memory has room for one program only.
            128: (W(128, 64, 8, 3), W(128, 64, 8, 2), W(64, 128, 8, 2), T(64, 64, 8, 1)),
            256: (T(128, 64, 8, 1), T(64, 64, 8, 1), T(32, 64, 8, 2), T(32, 32, 4, 1)),
            576: (T(64, 32, 8, 1), T(32, 32, 8, 1), T(16, 32, 8, 1), T(16, 16, 4, 1)),
        },
    },
    "gfx942": {  # with 4 waves each may use 512 registers; a program has 64 KB of shared memory
        2: {
            64: (T(128, 64, 4, 2), T(128, 64, 4, 2), T(64, 64, 4, 1), T(64, 64, 4, 1)),
            128: (T(128, 64, 4, 2), T(128, 32, 4, 2), T(64, 64, 4, 1), T(64, 64, 4, 1)),
            256: (T(64, 64, 4, 1), T(64, 32, 4, 1), T(32, 64, 4, 1), T(32, 32, 4, 1)),
            576: (T(32, 32, 4, 1), T(16, 16, 4, 1), T(16, 16, 4, 1), T(16, 16, 4, 1)),
        },
    },
}  # fmt: skip
# As sm_86, except where ptxas would spill. Shared memory has room for one program of D 192, whatever its registers.
TABLE["sm_120"] = {2: TABLE["sm_86"][2] | {
    64: (T(128, 64, 4, 3), *TABLE["sm_86"][2][64][1:]), 192: (W(64, 32, 8, 2), *TABLE["sm_86"][2][192][1:]),
}}  # fmt: skip
_FLOAT32: Final[dict[int, KernelTiles]] = {
    64: (T(64, 32, 8, 2), T(32, 32, 8, 1), T(32, 32, 8, 1), T(32, 32, 4, 1)),
    128: (T(64, 32, 8, 2), T(32, 32, 8, 1), T(16, 32, 8, 1), T(32, 32, 8, 1)),
    256: (T(32, 32, 8, 1), T(16, 32, 8, 1), T(16, 32, 8, 1), T(16, 16, 4, 1)),
    576: (T(16, 16, 8, 1), T(16, 16, 8, 1), T(16, 16, 8, 1), T(16, 16, 4, 1)),
}
for _arch, _by_size in TABLE.items():
    # float32 products use registers rather than tensor cores. All architectures but AMD's have as many registers.
    _by_size[4] = dict(_FLOAT32) if _arch != "gfx942" else {
        limit: tuple(T(t.bq, t.bk, 4, 1) for t in row) for limit, row in _FLOAT32.items()  # type: ignore[misc]
    }  # fmt: skip

# Rows for float16 where it needs more registers than bfloat16, so that the row above would spill.
_FLOAT16: Final[dict[str, dict[int, KernelTiles]]] = {
    "gfx942": {128: (*TABLE["gfx942"][2][128][:2], T(32, 64, 4, 1), TABLE["gfx942"][2][128][3])},
}


# By architecture, upper bound of D and Dv, and kernel (index in `KernelTiles`): tiles for kernels that load an element
# per score, where the tiles of the table would spill in 16 bits. At larger head dims the stages of the table's tiles
# would leave no shared memory for such elements.
_PER_SCORE: Final[dict[str, dict[int, dict[int, TileSizes]]]] = {
    "sm_80": {
        64: {1: T(128, 64, 8, 2), 2: T(64, 128, 8, 2)}, 128: {1: T(128, 32, 8, 2), 2: T(64, 64, 8, 2)},
        192: {}, 256: {1: T(64, 64, 8, 1), 2: T(32, 64, 8, 1)},
    },
    "sm_86": {
        128: {2: T(32, 64, 8, 2)}, 192: {}, 256: {0: T(64, 16, 8, 1), 1: T(32, 32, 8, 1), 2: T(32, 32, 8, 1)},
    },
    "sm_90": {
        64: {}, 128: {2: T(32, 128, 8, 2)}, 192: {1: T(64, 64, 8, 1), 2: T(32, 64, 8, 1)},
        256: {1: T(64, 32, 4, 1), 2: T(32, 32, 4, 1)},
    },
    "sm_100": {
        64: {0: T(64, 64, 4, 2), 1: T(128, 64, 4, 2)}, 128: {0: T(128, 64, 8, 2), 2: T(32, 128, 8, 2)},
        256: {2: T(32, 64, 8, 1)},
    },
}  # fmt: skip
_PER_SCORE["sm_120"] = {64: {0: T(128, 32, 4, 2), 1: T(64, 64, 4, 2), 2: T(32, 64, 8, 2)}} | _PER_SCORE["sm_86"]


# Tiles for lengths that the table's tiles don't divide, where these would spill. The larger side is that of the table,
# so that the tiles here don't divide these lengths either.
_RAGGED: Final[dict[str, dict[int, dict[int, TileSizes]]]] = {
    "sm_80": {64: {0: T(128, 64, 8, 3), 2: T(32, 128, 8, 2)}, 128: {1: T(128, 32, 8, 2)}},
    "sm_86": {64: {0: T(128, 64, 8, 2)}, 128: {2: T(32, 64, 8, 2)}},
}
_RAGGED["sm_120"] = _RAGGED["sm_86"]

# Tiles of specialised kernels (`attnops_triton.flash.hopper`, `attnops_triton.flash.blackwell`) in 16 bits, by
# architecture, head dim (D = Dv) and kernel (index in `KernelTiles`).
SPECIALISED: Final[dict[str, dict[int, dict[int, TileSizes]]]] = {
    "sm_90": {
        64: {0: T(128, 128, 4, 3, True), 1: T(128, 64, 4, 3, True), 2: T(64, 128, 4, 3, True)},
        128: {0: T(128, 128, 4, 3, True), 1: T(128, 64, 4, 3, True), 2: T(64, 128, 4, 3, True)},
        256: {0: T(128, 64, 4, 2, True), 1: T(128, 32, 4, 3, True)},
    },
    "sm_100": {
        64: {0: T(256, 128, 4, 4, True), 1: T(128, 128, 4, 4, True), 2: T(128, 128, 4, 4, True)},
        128: {0: T(256, 128, 4, 2, True), 1: T(128, 128, 4, 2, True), 2: T(128, 128, 4, 2, True)},
    },
}


def specialised_rows(arch: str) -> Mapping[int, Mapping[int, TileSizes]]:
    """`SPECIALISED` of an architecture, by head dim; empty if it has none."""
    return SPECIALISED.get(LIKE.get(arch, arch), {})


def choose(
    arch: str, dtype: str, dim: int, block_q: int | None, block_k: int | None, per_score: bool = False,
    measured: Mapping[int, TileSizes] = MappingProxyType({}), lengths: tuple[int, ...] = (),
) -> tuple[TileSizes, ...]:  # fmt: skip
    """The tiles of each kernel: forward, by_query, by_key and by_score, whose tiles are square.

    Args:
        arch: such as ``"sm_90"``. An architecture that the table lacks has the tiles of the nearest one (`known`).
        dtype: the dtype of query, key and value.
        dim: the larger of D and Dv.
        block_q: queries per tile in all kernels, from the metadata; None for the table's.
        block_k: keys per tile in all kernels, from the metadata; None for the table's.
        per_score: whether kernels load an element per score, of an array mask or bias. Such elements need shared memory
            and registers: the forward kernel has half the keys per tile, and some other tiles are smaller too.
        measured: tiles that replace the table's, by index in `KernelTiles`; ignored with ``per_score``.
        lengths: T and S.
    """
    by_dim = TABLE[known(arch)][4 if dtype == "float32" else 2]
    if dtype == "float16":
        by_dim = by_dim | _FLOAT16.get(known(arch), {})
    row = by_dim[min(limit for limit in by_dim if dim <= limit)]
    if per_score:
        row = (dataclasses.replace(row[0], bk=max(16, row[0].bk // 2)), *row[1:])
        per_score_by_dim = {} if dtype == "float32" else _PER_SCORE.get(known(arch), {})
        smaller = next((x for limit, x in per_score_by_dim.items() if dim <= limit), {})
        row = tuple(smaller.get(i, tiles) for i, tiles in enumerate(row))  # type: ignore[assignment]
    else:
        ragged_by_dim = {} if dtype == "float32" else _RAGGED.get(known(arch), {})
        ragged = next((x for limit, x in ragged_by_dim.items() if dim <= limit), {})
        replaced = {i: t for i, t in ragged.items() if any(n % max(t.bq, t.bk) for n in lengths)}
        # Tables of measured times don't store ``registers``.
        replaced |= {i: row[i] if t.numbers == row[i].numbers else t for i, t in measured.items()}
        row = tuple(replaced.get(i, tiles) for i, tiles in enumerate(row))  # type: ignore[assignment]
    *others, by_score = (dataclasses.replace(t, bq=block_q or t.bq, bk=block_k or t.bk) for t in row)
    square = min(by_score.bq, by_score.bk)
    return (*others, T(square, square, by_score.warps, by_score.stages))
