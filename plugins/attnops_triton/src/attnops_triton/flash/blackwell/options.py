"""The options of Blackwell's kernels."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout

from attnops_triton.flash.hopper.shared import PartitionedOptions


@dataclasses.dataclass(frozen=True)
class BlackwellOptions(PartitionedOptions):
    """The options of the forward kernel. In its layouts a thread has one row."""

    # The rows of tensor memory.
    rows: ClassVar[int] = 128
    copies: ClassVar[int] = 2
    # Columns of sums that a thread loads at once.
    chunk: ClassVar[int] = 32

    @property
    def by_polynomial(self) -> int:
        """Of each 8 columns of scores, those whose exponentials are polynomials: where the special function units bound
        a kernel, as the products of larger head dims, and a soft cap's instructions, do otherwise.
        """
        is_bound = self.plan.D == 64 and self.score is None and not self.transposed
        return 2 * (is_bound and self.plan.dtype != "float32")

    @property
    def scores_layout(self) -> Any:
        return _layout(self.columns)

    @property
    def sums_layout(self) -> Any:
        return _layout(self.chunk)

    @property
    def packed(self) -> int:
        """Operands per 32 bits of tensor memory."""
        return 4 // self.plan.itemsize

    @property
    def operand_layout(self) -> Any:
        """The layout of a computing partition's weights in tensor memory."""
        return TensorMemoryLayout([self.rows, self.columns], col_stride=1)


@dataclasses.dataclass(frozen=True)
class BackwardOptions(BlackwellOptions):
    """The options of the backward kernels, whose computing partitions have half the columns of a tile each."""

    copies: ClassVar[int] = 1

    @property
    def columns(self) -> int:
        return self.streamed // 2

    @property
    def buffers(self) -> int:
        """Buffers of scores: the kernel by queries computes scores one tile ahead."""
        return 1 if self.transposed else 2

    @property
    def half(self) -> int:
        """Half the head dim: the columns of sums that a computing partition stores."""
        return self.plan.D // 2


def _layout(columns: int) -> Any:
    return gl.BlockedLayout([1, columns], [32, 1], [4, 1], [0, 1])
