"""Which calls the specialised kernels (Hopper, Blackwell) serve. Plain kernels serve the other calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from attnops import AttentionRequest, OperationMetadata
from attnops.kernels import Scoring
from attnops_triton import versions
from attnops_triton.flash.measured import measured_tiles
from attnops_triton.flash.plan import TileSizes
from attnops_triton.flash.tile_sizes import specialised_rows
from attnops_triton.language import assembler
from attnops_triton.language.compat import device_arch
from attnops_triton.language.launch import is_recording
from attnops_triton.language.translate import PRIMITIVES
from attnops_triton.targets import TENSOR_MEMORY, current, first_cuda_of_maps

# The first release of Triton whose Gluon has the functions that these kernels use.
_TRITON = (3, 9)
# The first release of jaxlib that passes tensor maps to kernels.
_JAXLIB = (0, 11, 1)


class CallFacts(NamedTuple):
    """The facts that decide whether specialised kernels serve a call."""

    dtype: str  # the dtype of query, key and value. float32 is served only in the interpreter
    head_dim: int  # D
    value_head_dim: int  # Dv
    lengths: tuple[int, int]  # T and S
    mask_per_score: bool  # whether the mask has an element per score: an array of T × S elements, or bits
    bias: bool
    dropout: bool
    # Whether tokens may be fully masked. Specialised kernels can't zero them in shared memory.
    may_be_fully_masked: bool
    is_partial: bool  # whether the result is a partial softmax
    sets_tile_sizes: bool  # whether the metadata sets tile sizes
    interpret: bool  # whether kernels run in the interpreter


def why_plain(arch: str, facts: CallFacts) -> str:
    """The reason why no specialised kernel serves a call; empty if one does."""
    by_dim, T = specialised_rows(arch), facts.lengths[0]
    conditions = (
        (not by_dim, f"{arch or 'an unknown GPU'} has no specialised ones"),
        (facts.head_dim != facts.value_head_dim, f"head dims of {facts.head_dim} and {facts.value_head_dim} differ"),
        (facts.head_dim not in by_dim, f"the head dim {facts.head_dim} is none of {', '.join(map(str, by_dim))}"),
        (facts.dtype == "float32" and not facts.interpret, "the dtype is float32"),
        (facts.mask_per_score, "the mask is loaded per score"),
        (facts.bias, "there is a bias"),
        (facts.dropout, "there is dropout"),
        (facts.may_be_fully_masked, "tokens may be fully masked"),
        (facts.is_partial, "it is a partial softmax"),
        (facts.sets_tile_sizes, "block_q or block_k is set"),
        # Half of each program would be idle.
        (arch in TENSOR_MEMORY and T <= 128, f"{T} queries are at most 128"),
        (
            not facts.interpret and not _is_supported(),
            "they need Triton 3.9, jaxlib 0.11.1, and on this machine CUDA 12.8's ptxas",
        ),
    )
    return next((reason for holds, reason in conditions if holds), "")


def specialised_tiles(arch: str, facts: CallFacts, scoring: Scoring) -> Mapping[int, TileSizes]:
    """Tiles of the specialised kernels that serve a call, by kernel: 0 forward, 1 by_query, 2 by_key.

    These kernels also serve soft caps and sinks.

    Args:
        arch: the architecture.
        facts: the facts of the call.
        scoring: the scoring of the call.
    """
    if why_plain(arch, facts):
        return {}
    tiles, lengths = dict(specialised_rows(arch)[facts.head_dim]), facts.lengths
    value_axes = () if scoring.mask is None else scoring.mask.values
    has_query_values, has_key_values = (any(axis in axes for axes in value_axes) for axis in ("q", "kv"))
    capped = scoring.cap is not None
    # Tiles are narrower where those of the table would spill registers.
    if arch in TENSOR_MEMORY:
        # A thread holds all columns of a row, or half of them. Narrower tiles have more stages, so that as many bytes
        # are loaded ahead.
        uneven = [any(n % max(t.bq, t.bk) for n in lengths) for t in tiles.values()]
        divisors = (
            4 if has_key_values and uneven[0] else 2 if has_key_values or capped else 1,
            2 if (has_key_values and uneven[1]) or capped else 1,
            2 if (has_query_values and uneven[2]) or capped else 1,
        )
        return {i: narrower(t, n, by_key=i == 2) for n, (i, t) in zip(divisors, tiles.items(), strict=True)}
    if facts.head_dim == 128 and capped:
        tiles[2] = dataclasses.replace(tiles[2], bq=32)
    if has_key_values and facts.head_dim == 256:
        tiles[0] = narrower(tiles[0], 2, by_key=False)
        if capped:
            tiles[1] = dataclasses.replace(tiles[1], bk=16)
    elif has_key_values and (capped or any(n % tiles[0].bq for n in lengths)):
        tiles[0] = dataclasses.replace(tiles[0], bk=64)
    return tiles


def narrower(tiles: TileSizes, divisor: int, by_key: bool) -> TileSizes:
    """Tiles whose streamed side is divided by ``divisor``, with ``divisor`` times the stages."""
    stages = tiles.stages * divisor
    if by_key:
        return dataclasses.replace(tiles, bq=tiles.bq // divisor, stages=stages)
    return dataclasses.replace(tiles, bk=tiles.bk // divisor, stages=stages)


def with_measured(special: Mapping[int, TileSizes], facts: CallFacts) -> Mapping[int, TileSizes]:
    """Tiles by kernel: those that were measured to be faster on this machine's GPU, otherwise those of ``special``."""
    measured = {} if facts.interpret else measured_tiles(facts.dtype, facts.head_dim, facts.value_head_dim)
    return {**special, **{i: tiles for i, tiles in measured.items() if special or not tiles.specialised}}


def describe_kernels(request: AttentionRequest, metadata: OperationMetadata) -> str:
    """A line for `attnops.explain`: which kernels serve a request without a cache, and why plain ones do."""
    arch = current() or device_arch()
    if not arch:
        return "kernels: depend on the GPU, and there is none; attnops_triton.targets.target(arch) names one"
    shape, kinds, mask_primitives = request.mask_shape, request.mask_kinds, request.mask_primitives
    is_dense = "Blocks" in kinds or ("Dense" in kinds and (shape is None or min(shape[2:]) > 1))
    facts = CallFacts(
        request.dtypes[0] if len(set(request.dtypes)) == 1 else "float32", request.head_dim, request.value_head_dim,
        (request.query_length, request.key_length),
        mask_per_score=is_dense or not mask_primitives <= PRIMITIVES,
        bias=bool(request.bias_kind),
        dropout=bool(request.dropout_prob), may_be_fully_masked=request.mask_structure.may_have_fully_masked_tokens,
        is_partial=False, sets_tile_sizes=(metadata.block_q, metadata.block_k) != (None, None),
        interpret=request.interpret,
    )  # fmt: skip
    reason = why_plain(arch, facts)
    special = {} if reason else specialised_rows(arch)[facts.head_dim]
    tiles = with_measured(special, facts)
    which = "Blackwell's" if arch in TENSOR_MEMORY else "Hopper's"
    served: dict[str, list[str]] = {}
    for i, name in enumerate(("forward", "dq", "dk and dv")):
        why = reason or ("it was measured to be faster" if i in special else "no specialised kernel computes them")
        kernel = f"{which} in Gluon" if i in tiles and tiles[i].specialised else f"plain Triton ({why})"
        served.setdefault(kernel, []).append(name)
    lines = [f"{', '.join(names)} by {kernel}" for kernel, names in served.items()]
    return f"kernels on {arch}: {'; '.join(lines)}"


def _is_supported() -> bool:
    """Whether Triton can compile specialised kernels and, unless they are only compiled, whether jaxlib passes tensor
    maps to them and this machine's assembler can assemble those that run here.
    """
    if versions.release(versions.version_of("triton") or "0") < _TRITON:
        return False
    if is_recording():
        return True
    ptxas = None if current() else assembler.find()
    has_maps = versions.release(versions.version_of("jaxlib") or "0") >= _JAXLIB
    return has_maps and (ptxas is None or ptxas.release >= first_cuda_of_maps())
