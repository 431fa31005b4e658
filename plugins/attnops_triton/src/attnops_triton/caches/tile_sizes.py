"""Tile sizes of calls over caches, and the number of splits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from attnops.kernels import TraceContext
from attnops_triton.caches.plan import CacheTileSizes
from attnops_triton.flash.plan import cdiv
from attnops_triton.targets import SHARED_MEMORY, is_amd, known, multiprocessors

# Programs per multiprocessor, which hide each other's latencies.
_RESIDENT: Final = 2
# The fewest tiles per split: partial results cost a write and a read.
_LEAST: Final = 4
# One program of the kernel that merges holds all splits of a row.
MOST_SPLITS: Final = 64
# Rows per tile if there are many queries: the tile's keys are read once for all of them.
_ROWS: Final = 64
_LEAST_ROWS: Final = 16

# With this much shared memory or less tiles are smaller: consumer GPUs.
_SMALL: Final = 100 << 10
# More than this holds two programs with two buffers of 8-bit tokens.
_TWICE: Final = 216 << 10

# Part of the key of JAX's cache of traced functions.
_SPLITS: TraceContext[int] = TraceContext("attnops-triton:splits", 0)


def current_splits() -> int:
    """The number that `splits` sets; 0 outside of it: `split_count` then chooses one that fills the GPU."""
    return int(_SPLITS.value)


@contextlib.contextmanager
def splits(count: int) -> Iterator[None]:
    """A context in which each row's keys are read in ``count`` splits, whatever the batch and the GPU.

    A row's result is then bitwise the same in any batch with as many queries per row, and for packed rows with any
    other rows. Packed rows are slower then, since all of their tiles of keys are masked.

    Args:
        count: from 1 to 64.

    Raises:
        ValueError: ``count`` is outside this range.
    """
    if not 1 <= count <= MOST_SPLITS:
        raise ValueError(f"splits({count}) must be from 1 to {MOST_SPLITS}, which one program merges")
    with _SPLITS(count):
        yield


def rows_of(block_q: int | None, T: int, G: int, dim: int, has_codec: bool, arch: str = "") -> int:
    """Rows of a tile of scores.

    Args:
        block_q: the metadata's ``block_q``; None for the table's.
        T: queries per row, or of all packed rows.
        G: query heads per kv head.
        dim: the greater of D and Dv.
        has_codec: whether tokens are stored in 8 bits.
        arch: the target architecture; empty for the fewest rows of any architecture.
    """
    # The accumulated output is in registers: more than 32 rows of 512 features would spill. With 8-bit tokens NVIDIA
    # GPUs spill with 32 rows already, and execute 8.1 instead of 3.8 warp instructions per key and row (sm_90, int8).
    most = 128 if dim <= 256 else 16 if has_codec and not is_amd(arch) else 32
    wanted = min(T, block_q) * G if block_q else min(T * G, _ROWS)
    return min(max(_LEAST_ROWS, 1 << (wanted - 1).bit_length()), most)


def choose(
    arch: str, dtype: str, dims: tuple[int, int], rows: int, block_k: int | None, has_codec: bool = False
) -> CacheTileSizes:
    """The tiles of a call.

    Args:
        arch: the target architecture; empty for the interpreter.
        dtype: the dtype of operands.
        dims: D and Dv.
        rows: rows of a tile of scores.
        block_k: the metadata's ``block_k``; None for the table's.
        has_codec: whether tokens are stored in 8 bits.
    """
    dim, shared = max(dims), SHARED_MEMORY[known(arch)] if arch else 0
    if dtype == "float32":
        return CacheTileSizes(rows, block_k or (32 if dim <= 128 else 16), 4, 1)
    if dim > 256:
        is_few = rows == _LEAST_ROWS
        # With more keys gfx942 would spill at 32 rows.
        bk = (64 if shared > _SMALL else 32) if is_few else 16 if shared <= 64 << 10 else 32
        return CacheTileSizes(rows, block_k or bk, 4 if is_few or is_amd(arch) else 8, 2)
    if dim > 128 and shared <= 64 << 10:
        return CacheTileSizes(rows, block_k or 32, 4, 2)
    # With few queries memory bounds a call: while a tile is computed the next one is copied to a second buffer, if
    # shared memory then holds two programs. NVIDIA's GPUs need three stages for it, AMD's two. Tokens of 8 bits have
    # large tiles at D 128 too, for 2/3 of the instructions per key; beside two of them a program has one in 16 bits.
    is_few = rows <= 32 and dim <= 128 and shared > _SMALL
    is_large = rows <= 32 and (dim <= 64 or (is_few and has_codec))
    has_two = is_few and not is_amd(arch) and (shared > _TWICE or not has_codec)
    # A warp group (4 warps) computes products of 64 rows on these; elsewhere 4 warps would spill.
    warps = 4 if rows < 64 or is_amd(arch) or arch in ("sm_90", "sm_100") else 8
    # By default ptxas 12.9 uses 128 registers and spills. Shared memory holds two programs, whatever their registers.
    registers = 255 if arch == "sm_120" and dim <= 128 else 0
    return CacheTileSizes(rows, block_k or (128 if is_large else 64), warps, 3 if has_two else 2, registers=registers)


def split_count(arch: str, programs: int, tiles: int) -> int:
    """How many programs share the keys of an item, for ``programs`` without splits and ``tiles`` of keys per row."""
    fixed = current_splits()
    if fixed:
        return fixed
    wanted = _RESIDENT * multiprocessors(arch) // programs if arch else 1
    return max(1, min(wanted, cdiv(tiles, _LEAST), MOST_SPLITS))
