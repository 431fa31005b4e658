"""The plan of a call: everything static about it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from attnops.kernels import Scoring
from attnops_triton.targets import multiprocessors

LOG2E: Final = math.log2(math.e)
LN2: Final = math.log(2)


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Tile sizes of one kernel, and how it is compiled.

    Attributes:
        bq: queries a tile, a power of two of at least 16.
        bk: keys a tile, a power of two of at least 16.
        warps: warps a program.
        stages: stages of the software pipeline, or of the ring of a specialised kernel.
        specialised: whether warps have different tasks, see `attnops_triton.flash.hopper` and
            `attnops_triton.flash.blackwell`; then ``warps`` are those of the first partition, and the rows that are not
            streamed are twice 64; on sm_100 twice 128 in the forward pass, and 128 in the backward pass.
        registers: at most so many a thread; 0 for as many as the assembler sees fit. NVIDIA's alone.
    """

    bq: int
    bk: int
    warps: int
    stages: int
    specialised: bool = False
    registers: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """As a table of measured times has them: four numbers, and 1 if specialised."""
        return (self.bq, self.bk, self.warps, self.stages, *[1] * self.specialised)

    @classmethod
    def of(cls, numbers: Sequence[int]) -> TileSizes:
        """The tiles of these numbers."""
        bq, bk, warps, stages, *specialised = numbers
        return cls(bq, bk, warps, stages, bool(specialised))


@dataclasses.dataclass(frozen=True)
class FlashPlan:
    """Shapes, tiles and options of a call; hashable.

    Attributes:
        B, T, S, H, K, D, Dv: the dimensions of the call; under `jax.vmap` B includes the mapped axis.
        inner: the batch without the mapped axis, which masks and biases are functions of.
        forward: tiles of the forward pass.
        by_query: tiles of the kernel for the gradients of queries.
        by_key: tiles of the kernel for the gradients of keys and values.
        by_score: tiles of the gradients of biases with an element for each score or distance.
        dtype: the name of the dtype of query, key and value.
        is_partial: whether this is a partial softmax, whose results are float32, see `attnops.softmax`.
        scale: the softmax scale.
        tf32: whether products of float32 may be rounded to TF32.
        scoring: see `attnops.kernels.scoring.Scoring`.
        packed: whether the mask is passed as bits, see `attnops_triton.flash.bits`.
        arch: the architecture to compile for, such as ``"sm_90"``; empty for this machine's GPU.
        interpret: whether kernels run in Triton's interpreter.
        unordered: whether gradients may be added in any order, see `attnops_triton.flash.order`.
    """

    B: int
    inner: int
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int
    forward: TileSizes
    by_query: TileSizes
    by_key: TileSizes
    by_score: TileSizes
    dtype: str
    is_partial: bool
    scale: float
    tf32: bool
    scoring: Scoring
    bit_mask: bool = False
    arch: str = ""
    interpret: bool = False
    unordered: bool = False

    @property
    def G(self) -> int:
        """Query heads a kv head."""
        return self.H // self.K

    @property
    def splits_groups(self) -> bool:
        """Whether the query heads of a kv head have programs of their own in the kernel for dk and dv.

        Their float32 sums are added afterwards. Otherwise a program for each tile of keys would leave multiprocessors
        idle.
        """
        return self.G > 1 and cdiv(self.S, self.by_key.bk) * self.B * self.K < multiprocessors(self.arch)

    @property
    def fuses_dq(self) -> bool:
        """Whether the kernel for dk and dv adds dq too.

        A tile's queries are then rows of a product, which has 64, and dk and dv must leave it by tensor maps: stores of
        float32 sums would take registers that it lacks.
        """
        by_map = self.gradient_dtype == self.dtype and not self.splits_groups
        return self.unordered and self.by_key.specialised and self.by_key.bq == 64 and by_map

    @property
    def score_unit(self) -> float:
        """Natural units per unit of a kernel's scores.

        Without cap and bias the scale is multiplied in by the exponential, at no cost, unless it is negative, which
        would turn the maximum into a minimum, or so small or large that dividing a sink by it would overflow.
        """
        return 1.0 if self.scales_first else self.scale

    @property
    def scales_first(self) -> bool:
        """Whether scores are multiplied by the scale first, so that ``score_unit`` is 1."""
        return self.scoring.has_cap_or_bias or not 1e-20 < self.scale < 1e20

    @property
    def itemsize(self) -> int:
        """Bytes an element of query, key and value."""
        return 4 if self.dtype == "float32" else 2

    @property
    def gradient_dtype(self) -> str:
        """The dtype of kernels' gradients of query, key and value; float32 for float16, whose cotangents are scaled."""
        return "float32" if self.is_partial or self.dtype == "float16" else self.dtype

    @property
    def out_dtype(self) -> str:
        """The dtype of the output."""
        return "float32" if self.is_partial else self.dtype

    def chunks(self, dim: int) -> list[tuple[int, int]]:
        """(start, width) of the chunks of a head dim, see `head_dim_chunks`."""
        return head_dim_chunks(dim, 64 if self.dtype == "float32" else 512)


def head_dim_chunks(dim: int, widest: int = 512) -> list[tuple[int, int]]:
    """(start, width) of the chunks of a head dim, since a kernel's shapes are powers of two, of at least 16.

    A head dim of 80 has chunks of 64 and 16, of 192 it has 128 and 64, of 576 it has 512 and 64.

    Args:
        dim: the head dim.
        widest: the largest width. It is smaller in float32, since a sum of short sums rounds less than a long sum.
    """
    chunks = []
    start = 0
    while start < dim:
        remaining = dim - start
        above = max(16, 1 << (remaining - 1).bit_length())
        below = max(16, above // 2)
        # The next power of two, unless two chunks are narrower together.
        narrower = remaining > below and below + max(16, 1 << (remaining - below - 1).bit_length()) < above
        width = min(widest, below if narrower else above)
        chunks.append((start, width))
        start += width
    return chunks


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)
