"""Which calls the specialised kernels serve; all others have those of every architecture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from attnops.kernels import Scoring
from attnops_triton import versions
from attnops_triton.flash.plan import Tiles
from attnops_triton.flash.tile_sizes import SPECIALISED
from attnops_triton.language import assembler
from attnops_triton.targets import TENSOR_MEMORY, current, first_cuda_of_maps

# The first release of Triton whose Gluon has what they use.
_TRITON = (3, 9)


def specialised_tiles(
    arch: str,
    dtype: str,
    head_dim: int,
    value_head_dim: int,
    scoring: Scoring,
    lengths: tuple[int, int],
    interpret: bool,
) -> Mapping[int, Tiles]:
    """Tiles of the specialised kernels that serve a call, by place in a row of the table.

    Hopper has them for all passes, sm_100 and sm_103 for the forward pass. They serve head dims of the table, masks
    that translate to Triton without arrays of T × S elements, soft caps and sinks; no bias, no dropout, and no tokens
    that may be fully masked, since what those hold is not zeroed in shared memory.

    Args:
        arch: the architecture.
        dtype: of query, key and value; float32 is served in the interpreter alone.
        head_dim: D.
        value_head_dim: Dv.
        scoring: of the call.
        lengths: T and S.
        interpret: whether kernels are interpreted.
    """
    in_tensor_memory = arch in TENSOR_MEMORY
    by_dim = SPECIALISED.get("sm_100" if in_tensor_memory else arch, {})
    if head_dim != value_head_dim or head_dim not in by_dim or (dtype == "float32" and not interpret):
        return {}
    if scoring.dense or scoring.has_bias or scoring.dropout_prob or scoring.has_fully_masked_tokens:
        return {}
    if not interpret and not _is_supported():
        return {}
    tiles = dict(by_dim[head_dim])
    rows = tiles[0].bq
    if in_tensor_memory and lengths[0] <= rows // 2:
        return {}  # half of a program would have nothing to do
    even = not lengths[0] % rows and not lengths[1] % rows
    loaded = scoring.mask is not None and any("kv" in axes for axes in scoring.mask.values)
    # Narrower where they would spill.
    if head_dim == 128 and scoring.cap is not None and 2 in tiles:
        tiles[2] = dataclasses.replace(tiles[2], bq=32)
    if in_tensor_memory:
        # A thread has all keys of a row. As much is loaded ahead.
        parts = 4 if loaded and not even else 2 if loaded or scoring.cap is not None else 1
        tiles[0] = dataclasses.replace(tiles[0], bk=tiles[0].bk // parts, stages=tiles[0].stages * parts)
    elif loaded and (not even or scoring.cap is not None):
        tiles[0] = dataclasses.replace(tiles[0], bk=64)
    return tiles


def _is_supported() -> bool:
    """Whether Triton can compile them, and the assembler of this machine, if they run here, assemble them."""
    if versions.release(versions.version_of("triton") or "0") < _TRITON:
        return False
    found = None if current() else assembler.find()
    return found is None or found.release >= first_cuda_of_maps()
