"""Tile sizes of calls over caches, and the number of splits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from attnops.kernels import TraceContext
from attnops_triton.flash.plan import cdiv
from attnops_triton.flash.tile_sizes import known
from attnops_triton.ragged.plan import CacheTileSizes
from attnops_triton.targets import SHARED_MEMORY, is_amd, multiprocessors

# Programs a multiprocessor that hide each other's latencies.
_RESIDENT: Final = 2
# A split has at least so many tiles: its partial results are written and read again.
_LEAST: Final = 4
# One program of the kernel that merges holds all splits of a row.
MOST_SPLITS: Final = 64
# Rows of a tile where there are many queries: keys are read once for all of them.
_ROWS: Final = 64
_LEAST_ROWS: Final = 16

# Shared memory with which tiles are smaller, as that of consumers' GPUs.
_SMALL: Final = 100 << 10

# Part of the key of JAX's cache of traced functions.
_SPLITS: TraceContext[int] = TraceContext("attnops-triton:splits", 0)


def current_splits() -> int:
    """The number of splits of `splits`; 0 outside of it, for one that fills the GPU."""
    return int(_SPLITS.value)


@contextlib.contextmanager
def splits(count: int) -> Iterator[None]:
    """A context in which each row's keys are read in ``count`` splits, whatever the batch and the GPU.

    A row's result is then the same to the last bit in any batch of as many queries per row, and of packed rows among
    any others; these are slower, since all of their tiles of keys are masked.

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
        block_q: the metadata's; None for the table's.
        T: queries, of a row or packed.
        G: query heads per kv head.
        dim: the greater of D and Dv.
        has_codec: whether tokens are stored in 8 bits.
        arch: that is compiled for; empty for the fewest rows that any architecture has.
    """
    # The output so far is in registers: more than 32 rows of 512 features would be spilled. Where these are converted
    # too, NVIDIA's GPUs spill 32 rows, and take 8.1 instructions of a warp a key and row instead of 3.8 (sm_90, int8).
    most = 128 if dim <= 256 else 16 if has_codec and not is_amd(arch) else 32
    wanted = min(T, block_q) * G if block_q else min(T * G, _ROWS)
    return min(max(_LEAST_ROWS, 1 << (wanted - 1).bit_length()), most)


def choose(arch: str, dtype: str, dims: tuple[int, int], rows: int, block_k: int | None) -> CacheTileSizes:
    """The tiles of a call, without its splits.

    Args:
        arch: that is compiled for; empty for this machine's interpreter.
        dtype: the dtype of operands.
        dims: D and Dv.
        rows: the rows of a tile of scores.
        block_k: the metadata's; None for the table's.
    """
    dim, shared = max(dims), SHARED_MEMORY[known(arch)] if arch else 0
    if dtype == "float32":
        return CacheTileSizes(rows, block_k or (32 if dim <= 128 else 16), 4, 1)
    if dim > 256:
        is_few = rows == _LEAST_ROWS
        # Of 32 rows gfx942 would spill registers with more keys.
        bk = (64 if shared > _SMALL else 32) if is_few else 16 if shared <= 64 << 10 else 32
        return CacheTileSizes(rows, block_k or bk, 4 if is_few or is_amd(arch) else 8, 2)
    if dim > 128 and shared <= 64 << 10:
        return CacheTileSizes(rows, block_k or 32, 4, 2)
    # Of a few queries a larger tile takes fewer instructions per key: 11.1 instead of 13.5 of a warp at D 128 on sm_90.
    is_large = rows <= 32 and (dim <= 64 or (dim == 128 and shared > _SMALL))
    # With tensor cores of warp groups 64 rows are those of 4 warps; elsewhere these would spill.
    warps = 4 if rows < 64 or is_amd(arch) or arch in ("sm_90", "sm_100") else 8
    # Left to itself ptxas 12.9 takes 128 registers, and spills, where a few more would do.
    registers = 168 if arch == "sm_120" and dim <= 128 else 0
    return CacheTileSizes(rows, block_k or (128 if is_large else 64), warps, 2, registers=registers)


def split_count(arch: str, programs: int, tiles: int) -> int:
    """How many programs share the keys of an item.

    Args:
        arch: that is compiled for.
        programs: without splits.
        tiles: of keys a row has at most.
    """
    fixed = current_splits()
    if fixed:
        return fixed
    wanted = _RESIDENT * multiprocessors(arch) // programs if arch else 1
    return max(1, min(wanted, cdiv(tiles, _LEAST), MOST_SPLITS))
