"""`FlashPlan`: everything static about a call. Kernels depend on nothing else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from attnops.kernels import Scoring
from attnops_triton.targets import TENSOR_MEMORY, multiprocessors

LOG2E: Final = math.log2(math.e)
LN2: Final = math.log(2)


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Tile sizes of one kernel, and how it is compiled.

    Attributes:
        bq: queries per tile, a power of two of at least 16.
        bk: keys per tile, a power of two of at least 16.
        warps: warps per program.
        stages: stages of the software pipeline, or of the ring of a specialised kernel.
        specialised: whether groups of warps have different tasks (`attnops_triton.flash.hopper`,
            `attnops_triton.flash.blackwell`). Then ``warps`` counts those of the first partition, and the side of the
            tile that is not streamed has 128 rows; on sm_100 256 in the forward pass and 128 in the backward pass.
        registers: the most registers per thread; 0 leaves the number to the assembler. Only for NVIDIA GPUs.
    """

    bq: int
    bk: int
    warps: int
    stages: int
    specialised: bool = False
    registers: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """(bq, bk, warps, stages), then 1 if specialised: the form of tables of measured times."""
        return (self.bq, self.bk, self.warps, self.stages, *[1] * self.specialised)

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> TileSizes:
        """The tile sizes whose `numbers` these are."""
        bq, bk, warps, stages, *specialised = numbers
        return cls(bq, bk, warps, stages, bool(specialised))


@dataclasses.dataclass(frozen=True)
class FlashPlan:
    """Shapes, tiles and options of a call; hashable.

    Attributes:
        B, T, S, H, K, D, Dv: the dimensions of the call. Under `jax.vmap` B includes the mapped axis.
        inner: the batch size without the mapped axis. The batch index of masks and biases is below ``inner``.
        forward: tiles of the forward pass.
        by_query: tiles of the kernel for the gradients of queries.
        by_key: tiles of the kernel for the gradients of keys and values.
        by_score: tiles of the kernels for the gradients of biases that have an element per score or per distance.
        dtype: the name of the dtype of query, key and value.
        is_partial: whether the call returns a partial softmax (`attnops.softmax`), whose results are float32.
        scale: the softmax scale.
        tf32: whether float32 products may round their operands to TF32.
        scoring: the mask, bias, soft cap, sinks and dropout of the call, without their arrays.
        bit_mask: whether the mask is passed as one bit per score (`attnops_triton.flash.bits`).
        arch: the architecture to compile for, such as ``"sm_90"``; empty for this machine's GPU.
        interpret: whether kernels run in Triton's interpreter.
        unordered: whether gradients may be summed in any order (`attnops_triton.flash.order`).
        max_logits: whether the largest scores are asked for.
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
    max_logits: bool = False

    @property
    def G(self) -> int:
        """Query heads per kv head."""
        return self.H // self.K

    @property
    def splits_groups(self) -> bool:
        """Whether the kernel for dk and dv has a program for each query head, rather than for each kv head.

        XLA then adds the float32 sums of the query heads of a kv head. Groups are split if one program per kv head and
        tile of keys would leave multiprocessors idle.
        """
        return self.G > 1 and cdiv(self.S, self.by_key.bk) * self.B * self.K < multiprocessors(self.arch)

    @property
    def fuses_dq(self) -> bool:
        """Whether the kernel for dk and dv computes dq too, which Hopper's can.

        This needs tiles of 64 queries, the rows of one product. It also needs dk and dv to be stored by tensor maps,
        since stores of float32 sums by pointers would need more registers than are free.
        """
        by_map = self.gradient_dtype == self.dtype and not self.splits_groups
        is_hopper = self.by_key.specialised and self.arch not in TENSOR_MEMORY
        return self.unordered and is_hopper and self.by_key.bq == 64 and by_map

    @property
    def score_unit(self) -> float:
        """The factor of a kernel's scores inside the exponential.

        Without soft cap and bias this is the softmax scale, at no cost. Scores are scaled beforehand if the scale is
        negative, since the maximum would become a minimum, or if it is so small or large that a sink divided by it
        would overflow.
        """
        return 1.0 if self.scales_first else self.scale

    @property
    def scales_first(self) -> bool:
        """Whether scores are multiplied by the scale first, so that ``score_unit`` is 1."""
        return self.scoring.has_cap_or_bias or not 1e-20 < self.scale < 1e20

    @property
    def itemsize(self) -> int:
        """Bytes per element of query, key and value."""
        return 4 if self.dtype == "float32" else 2

    @property
    def gradient_dtype(self) -> str:
        """The dtype of stored dq, dk and dv: float32 for partial softmaxes, and for float16, whose cotangents are
        scaled.
        """
        return "float32" if self.is_partial or self.dtype == "float16" else self.dtype

    @property
    def out_dtype(self) -> str:
        """The dtype of the output."""
        return "float32" if self.is_partial else self.dtype

    def chunks(self, dim: int) -> list[tuple[int, int]]:
        """(start, width) of each chunk of a head dim, whose widths are powers of two (`head_dim_chunks`)."""
        return head_dim_chunks(dim, 64 if self.dtype == "float32" else 512)


def head_dim_chunks(dim: int, widest: int = 512) -> list[tuple[int, int]]:
    """(start, width) of each chunk of a head dim. Shapes in a kernel must be powers of two of at least 16.

    80 is split into 64 and 16, 192 into 128 and 64, 576 into 512 and 64.

    Args:
        dim: the head dim.
        widest: the largest width. It is smaller for float32, since a sum of short sums rounds less than one long sum.
    """
    chunks = []
    start = 0
    while start < dim:
        remaining = dim - start
        above = max(16, 1 << (remaining - 1).bit_length())
        below = max(16, above // 2)
        # The next power of two, unless two chunks together are narrower.
        narrower = remaining > below and below + max(16, 1 << (remaining - below - 1).bit_length()) < above
        width = min(widest, below if narrower else above)
        chunks.append((start, width))
        start += width
    return chunks


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)
