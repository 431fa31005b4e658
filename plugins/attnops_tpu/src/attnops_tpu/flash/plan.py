"""The plan of a call: everything static about it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from attnops.kernels import Scoring
from attnops_tpu.flash.tile_sizes import SubTileSizes

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class FlashPlan:
    """Shapes, tiles and options of a call; hashable.

    Scores are transposed, [keys, queries]: the maximum and the sum over keys are then elementwise over vector
    registers, without cross-lane operations, and values by query lie along the lanes.
    """

    # The dimensions of the call; under `jax.vmap` B includes the mapped axis.
    B: int
    inner: int  # the batch without the mapped axis, which masks and biases are functions of
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int
    bq: int  # queries per tile
    bk: int  # keys per tile
    forward: SubTileSizes  # the sub-tiles of the forward pass
    backward: SubTileSizes  # the sub-tiles of the backward pass
    dtype: np.dtype  # of query, key and value
    is_partial: bool  # whether this is a partial softmax, whose results are float32, see `attnops.softmax`
    scale: float  # the softmax scale
    precision: jax.lax.PrecisionLike  # the precision of products
    scoring: Scoring  # what changes scores: mask, bias, soft cap, sinks and dropout, see `attnops.kernels.Scoring`
    span: int  # tiles of queries whose gradients are in vector memory at a time
    split: int  # the query heads of a kv head are processed in so many groups in the backward pass; a divisor of G
    sublanes: int  # rows of a vector register; fewer if they do not divide a sub-tile
    sequential: bool  # whether one core runs a kernel's batches and heads, in order
    strided_rotation: bool  # whether the hardware can rotate each row of a register by a different number of lanes
    interpret: bool  # whether kernels run in Pallas's interpreter
    bounds_checks: bool  # whether kernels check that their accesses are in bounds
    vmem: int  # the most bytes of vector memory that a kernel may use
    max_logits: bool = False  # whether the largest scores are asked for

    @property
    def out_dtype(self) -> np.dtype:
        """The dtype of the output, and of the gradients of keys and values."""
        return np.dtype(np.float32) if self.is_partial else self.dtype

    @property
    def rows(self) -> int:
        """The numbers per query that the forward pass returns in addition to the output."""
        return 3 if self.max_logits else 2

    @property
    def G(self) -> int:
        """Query heads per kv head."""
        return self.H // self.K

    @property
    def nq(self) -> int:
        """Tiles of queries."""
        return -(-self.T // self.bq)

    @property
    def nk(self) -> int:
        """Tiles of keys."""
        return -(-self.S // self.bk)

    @property
    def Tp(self) -> int:
        """Queries, padded to a multiple of ``bq``."""
        return self.nq * self.bq

    @property
    def Sp(self) -> int:
        """Keys, padded to a multiple of ``bk``."""
        return self.nk * self.bk

    @property
    def folded(self) -> float:
        """The factor of the scale that queries are multiplied by, without rounding: its sign and its power of two."""
        return 0.0 if self.scale == 0 else math.copysign(2.0 ** math.floor(math.log2(abs(self.scale))), self.scale)

    @property
    def scale_residual(self) -> float:
        """``scale / folded``, in [1, 2)."""
        return 1.0 if self.scale == 0 else self.scale / self.folded
