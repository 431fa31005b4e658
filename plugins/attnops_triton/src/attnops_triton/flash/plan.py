"""The plan of a call: everything static about it."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from attnops.kernels import Scoring

LOG2E: Final = math.log2(math.e)
LN2: Final = math.log(2)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one kernel is cut.

    Attributes:
        bq: queries a tile, a power of two of at least 16.
        bk: keys a tile, likewise.
        warps: warps a program.
        stages: tiles in flight.
    """

    bq: int
    bk: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Shapes, tiles and options of a call; hashable.

    Attributes:
        B, T, S, H, K, D, Dv: the dimensions of the call; under `jax.vmap` B is of all slices together.
        inner: the batch as the caller sees it, which masks and biases are asked about.
        forward: tiles of the forward pass.
        by_query: tiles of the pass over queries' gradients.
        by_key: tiles of the pass over keys' and values' gradients.
        by_score: tiles of the gradients of biases with an element for each score, or distance.
        dtype: the name of the dtype of query, key and value.
        is_partial: whether the keys are some of a softmax's, so that results are float32, see `attnops.softmax`.
        scale: the softmax scale.
        tf32: whether products of float32 may be rounded to TF32.
        scoring: see `attnops.kernels.scoring.Scoring`.
        packed: whether the mask is given as bits, see `attnops_triton.flash.bits`.
        arch: what the kernels are compiled for, such as ``"sm_90"``; empty for the device at hand.
        interpret: whether kernels run in Triton's interpreter.
    """

    B: int
    inner: int
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int
    forward: Tiles
    by_query: Tiles
    by_key: Tiles
    by_score: Tiles
    dtype: str
    is_partial: bool
    scale: float
    tf32: bool
    scoring: Scoring
    packed: bool = False
    arch: str = ""
    interpret: bool = False

    @property
    def G(self) -> int:
        """Query heads a kv head."""
        return self.H // self.K

    @property
    def unit(self) -> float:
        """What scores, as a kernel holds them, are multiplied by to become natural exponents.

        Plain products keep their scale for the exponent, where it costs nothing; a negative one would turn the maximum
        into a minimum, and by a tiny one a sink can't be divided.
        """
        return 1.0 if self.scales_first else self.scale

    @property
    def scales_first(self) -> bool:
        """Whether the scale is multiplied in before anything else."""
        return self.scoring.changes_scores or not 1e-20 < self.scale < 1e20

    @property
    def itemsize(self) -> int:
        """Bytes an element of query, key and value."""
        return 4 if self.dtype == "float32" else 2

    @property
    def gradient_dtype(self) -> str:
        """What kernels give gradients of query, key and value in; those of float16 are scaled, see `attend`."""
        return "float32" if self.is_partial or self.dtype == "float16" else self.dtype

    @property
    def out_dtype(self) -> str:
        """Of the output."""
        return "float32" if self.is_partial else self.dtype

    def pieces(self, dim: int) -> list[tuple[int, int]]:
        """(start, width) of the pieces that a head dim is cut into, see `parts`."""
        return parts(dim, 64 if self.dtype == "float32" else 512)


def parts(dim: int, widest: int = 512) -> list[tuple[int, int]]:
    """(start, width) of the pieces that a head dim is cut into, since a kernel's shapes are powers of two.

    A head dim of 80 is 64 and 16, of 192 it is 128 and 64, of 576 it is 512 and 64; at least 16 wide.

    Args:
        dim: the head dim.
        widest: the most that a piece may have. In float32 it is little: long sums round, and a sum of sums less so.
    """
    found = []
    start = 0
    while start < dim:
        rest = dim - start
        whole = max(16, 1 << (rest - 1).bit_length())
        below = max(16, whole // 2)
        # The next power of two, unless two pieces are narrower.
        narrower = rest > below and below + max(16, 1 << (rest - below - 1).bit_length()) < whole
        width = min(widest, below if narrower else whole)
        found.append((start, width))
        start += width
    return found


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)
