"""Which calls the specialised kernels (Hopper, Blackwell) serve; the kernels of all architectures serve the others."""

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
from attnops_triton.language.translate import PRIMITIVES
from attnops_triton.targets import TENSOR_MEMORY, current, first_cuda_of_maps

# The first release of Triton whose Gluon has what these kernels use.
_TRITON = (3, 9)


class CallFacts(NamedTuple):
    """What decides whether specialised kernels serve a call.

    Attributes:
        dtype: the dtype of query, key and value; float32 is served in the interpreter alone.
        head_dim: D.
        value_head_dim: Dv.
        lengths: T and S.
        by_score: whether the mask is loaded per score: an array of T × S elements, or bits.
        bias: whether there is a bias.
        dropout: whether there is dropout.
        fully_masked: whether tokens may be fully masked; these kernels can't zero them in shared memory.
        partial: whether it is a partial softmax.
        sized: whether the metadata sets tile sizes.
        interpret: whether kernels are interpreted.
    """

    dtype: str
    head_dim: int
    value_head_dim: int
    lengths: tuple[int, int]
    by_score: bool
    bias: bool
    dropout: bool
    fully_masked: bool
    partial: bool
    sized: bool
    interpret: bool


def why_plain(arch: str, facts: CallFacts) -> str:
    """The reason why no specialised kernel serves a call; empty if one does."""
    by_dim, T = specialised_rows(arch), facts.lengths[0]
    conditions = (
        (not by_dim, f"{arch or 'an unknown GPU'} has no specialised ones"),
        (facts.head_dim != facts.value_head_dim, f"head dims of {facts.head_dim} and {facts.value_head_dim} differ"),
        (facts.head_dim not in by_dim, f"the head dim {facts.head_dim} is none of {', '.join(map(str, by_dim))}"),
        (facts.dtype == "float32" and not facts.interpret, "the dtype is float32"),
        (facts.by_score, "a mask is loaded by score"),
        (facts.bias, "there is a bias"),
        (facts.dropout, "there is dropout"),
        (facts.fully_masked, "tokens may be fully masked"),
        (facts.partial, "it is a partial softmax"),
        (facts.sized, "block_q or block_k is set"),
        # Half of each program would be idle.
        (arch in TENSOR_MEMORY and T <= 128, f"{T} queries are at most 128"),
        (not facts.interpret and not _is_supported(), "they need Triton 3.9, and on this machine CUDA 12.3's ptxas"),
    )
    return next((reason for holds, reason in conditions if holds), "")


def specialised_tiles(arch: str, facts: CallFacts, scoring: Scoring) -> Mapping[int, TileSizes]:
    """Tiles of the specialised kernels that serve a call, by place in a row of the table.

    They serve soft caps and sinks too.

    Args:
        arch: the architecture.
        facts: the facts of the call.
        scoring: the scoring of the call.
    """
    if why_plain(arch, facts):
        return {}
    tiles, lengths = dict(specialised_rows(arch)[facts.head_dim]), facts.lengths
    of_query, of_key = (scoring.mask is not None and any(axis in axes for axes in scoring.mask.values) for axis in
                        ("q", "kv"))  # fmt: skip
    capped = scoring.cap is not None
    # Narrower tiles where these would spill registers.
    if arch in TENSOR_MEMORY:
        # A thread has all columns of a row, or half of them. The number of bytes loaded ahead stays the same.
        uneven = [any(n % max(t.bq, t.bk) for n in lengths) for t in tiles.values()]
        parts = (
            4 if of_key and uneven[0] else 2 if of_key or capped else 1,
            2 if (of_key and uneven[1]) or capped else 1,
            2 if (of_query and uneven[2]) or capped else 1,
        )
        return {i: narrower(t, n, by_key=i == 2) for n, (i, t) in zip(parts, tiles.items(), strict=True)}
    if facts.head_dim == 128 and capped:
        tiles[2] = dataclasses.replace(tiles[2], bq=32)
    if of_key and (capped or any(n % tiles[0].bq for n in lengths)):
        tiles[0] = dataclasses.replace(tiles[0], bk=64)
    return tiles


def narrower(tiles: TileSizes, parts: int, by_key: bool) -> TileSizes:
    """Tiles whose streamed side is ``parts`` times shorter, with ``parts`` times the stages."""
    stages = tiles.stages * parts
    if by_key:
        return dataclasses.replace(tiles, bq=tiles.bq // parts, stages=stages)
    return dataclasses.replace(tiles, bk=tiles.bk // parts, stages=stages)


def with_measured(special: Mapping[int, TileSizes], facts: CallFacts) -> Mapping[int, TileSizes]:
    """The tiles, replaced by those that were measured to be faster on this machine's GPU."""
    found = {} if facts.interpret else measured_tiles(facts.dtype, facts.head_dim, facts.value_head_dim)
    return {**special, **{i: tiles for i, tiles in found.items() if special or not tiles.specialised}}


def line(request: AttentionRequest, metadata: OperationMetadata) -> str:
    """A line for `attnops.explain`: which kernels serve a request without a cache, and why not specialised ones."""
    arch = current() or device_arch()
    if not arch:
        return "kernels: depend on the GPU, and there is none; attnops_triton.targets.target(arch) names one"
    shape, kinds, mask_primitives = request.mask_shape, request.mask_kinds, request.mask_primitives
    facts = CallFacts(
        request.dtypes[0] if len(set(request.dtypes)) == 1 else "float32", request.head_dim, request.value_head_dim,
        (request.query_length, request.key_length),
        by_score=("Dense" in kinds and (shape is None or min(shape[2:]) > 1)) or not mask_primitives <= PRIMITIVES,
        bias=bool(request.bias_kind),
        dropout=bool(request.dropout_prob), fully_masked=request.mask_structure.may_have_fully_masked_tokens,
        partial=False, sized=(metadata.block_q, metadata.block_k) != (None, None), interpret=request.interpret,
    )  # fmt: skip
    reason = why_plain(arch, facts)
    special = {} if reason else specialised_rows(arch)[facts.head_dim]
    tiles = with_measured(special, facts)
    which = "Blackwell's" if arch in TENSOR_MEMORY else "Hopper's"
    served: dict[str, list[str]] = {}
    for i, name in enumerate(("forward", "dq", "dk and dv")):
        why = reason or ("was measured to be faster" if i in special else "no other for them")
        by = f"{which} in Gluon" if i in tiles and tiles[i].specialised else f"plain Triton ({why})"
        served.setdefault(by, []).append(name)
    parts = [f"{', '.join(names)} by {by}" for by, names in served.items()]
    return f"kernels on {arch}: {'; '.join(parts)}"


def _is_supported() -> bool:
    """Whether Triton can compile specialised kernels and, if they run on this machine, its assembler can assemble
    them.
    """
    if versions.release(versions.version_of("triton") or "0") < _TRITON:
        return False
    found = None if current() else assembler.find()
    return found is None or found.release >= first_cuda_of_maps()
