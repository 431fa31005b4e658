"""The plan of a call: everything static about it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from attnops.kernels import Scoring
from attnops_tpu.flash.tile_sizes import Parts


@dataclasses.dataclass(frozen=True)
class Plan:
    """Shapes, tiles and options of a call; hashable.

    Scores are held transposed, [keys, queries]: the maximum and the sum over keys are then elementwise over vector
    registers, without moving anything across lanes, and what there is one of for each query lies along the lanes.

    Attributes:
        B, T, S, H, K, D, Dv: the dimensions of the call; under `jax.vmap` B is of all slices together.
        inner: the batch as the caller sees it, which masks and biases are asked about.
        bq: queries a tile.
        bk: keys a tile.
        forward: how the forward pass computes a tile.
        backward: how the backward pass does.
        dtype: of query, key and value.
        is_partial: whether the keys are some of a softmax's, so that results are float32, see `attnops.softmax`.
        scale: the softmax scale.
        precision: of products.
        scoring: see `Scoring`.
        span: tiles of queries whose gradients stay in vector memory together.
        strided_rotation: whether the hardware rotates each row of a register by another number of lanes.
        interpret: whether kernels run in Pallas's interpreter.
        split: how many parts of the query heads of a kv head take turns in the backward pass; a divisor of G.
        vmem: bytes of vector memory that a kernel may use.
    """

    B: int
    inner: int
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int
    bq: int
    bk: int
    forward: Parts
    backward: Parts
    dtype: Any
    is_partial: bool
    scale: float
    precision: Any
    scoring: Scoring
    span: int
    split: int
    strided_rotation: bool
    interpret: bool
    vmem: int

    @property
    def out_dtype(self) -> Any:
        """Of the output, and of the gradients of keys and values."""
        return np.dtype(np.float32) if self.is_partial else self.dtype

    @property
    def G(self) -> int:
        """Query heads a kv head."""
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
        """Queries, padded to whole tiles."""
        return self.nq * self.bq

    @property
    def Sp(self) -> int:
        """Keys, padded to whole tiles."""
        return self.nk * self.bk

    @property
    def folded(self) -> float:
        """The part of the scale that the query is multiplied by, exact: its sign and its power of two."""
        return 0.0 if self.scale == 0 else math.copysign(2.0 ** math.floor(math.log2(abs(self.scale))), self.scale)

    @property
    def rest(self) -> float:
        """What is left of the scale, in [1, 2)."""
        return 1.0 if self.scale == 0 else self.scale / self.folded
