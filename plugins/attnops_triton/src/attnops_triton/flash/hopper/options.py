"""The options of Hopper's kernels."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from triton.experimental.gluon import language as gl

from attnops_triton.flash.hopper.shared import PartitionedOptions


@dataclasses.dataclass(frozen=True)
class HopperOptions(PartitionedOptions):
    """The options of a kernel for Hopper, and the layouts of its products."""

    # Those of one tensor core instruction of four warps.
    rows: ClassVar[int] = 64
    copies: ClassVar[int] = 2

    @property
    def scores_layout(self) -> Any:
        return _layout(self.columns)

    @property
    def sums_layout(self) -> Any:
        return _layout(self.plan.D)

    @property
    def weights_layout(self) -> Any:
        """The layout of weights as the left operand of products with a head dim."""
        return gl.DotOperandLayout(0, self.sums_layout, 2)

    @property
    def half(self) -> int:
        """Half the head dim: the columns of a partition's part of a fused dq."""
        return self.plan.D // 2

    @property
    def dq_layout(self) -> Any:
        """The layout of a partition's part of a fused dq."""
        return _layout(self.half)

    @staticmethod
    def can_slice(head_dim: int) -> bool:
        """Whether half the columns of the keys' buffer can be an operand: 128 bytes per row, the unit of swizzling."""
        return head_dim >= 128

    @property
    def slices_keys(self) -> bool:
        """`can_slice` of the call."""
        return self.can_slice(self.plan.D)

    def block(self, name: str) -> tuple[int, ...] | None:
        if self.fuses_dq and name in ("dq", "k_columns"):
            return 1, self.rows, self.half
        return super().block(name)


def _layout(columns: int) -> Any:
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
