"""The plan of a call over a cache: everything static about it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Final

import numpy as np
from jax import lax

from attnops.kernels import Scoring
from attnops_tpu.caches.tile_sizes import LANES, Starts

if TYPE_CHECKING:
    import jax

# The bits of a word.
BITS: Final = 32
# The least scale that may be multiplied with scores after products only.
_LEAST_SCALE: Final = 2.0**-16


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """Shapes, tiles and options of a call; hashable.

    A grid step is an *item*: a tile of queries of a row of the cache. It visits the tiles of keys that its queries may
    see. The G query heads of a kv head are rows of one tile, R = G · bq of them: row r is query r % bq of head r // bq,
    or, of packed queries that the kernel reads in place, query r // G of head r % G.

    A tile of keys is ``units`` units. A unit is transferred or skipped as a whole. It is a page, or, without pages,
    some slots of a row.
    """

    # The dimensions of the call; S is the slots of a row. For packed rows B is the number of tiles of queries, and T
    # the queries of a tile.
    B: int
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int
    width: int  # features of a token in the array of keys, zeros and joined values included
    bq: int  # queries per tile
    bk: int  # keys per tile, a multiple of ``unit``
    chunk: int  # keys per chunk; a tile is computed chunk by chunk
    masked_chunk: int  # the same for a masked tile, which leaves out chunks that no query sees
    unit: int  # slots per unit
    is_packed: bool  # whether the schedule has the row of the cache of each item; else rows follow one another
    keys_by_cache_row: bool  # for packed rows, whether values by key are those of the cache's rows, not of items
    is_ring: bool  # whether slot 0 of a row follows its last slot
    is_paged: bool  # whether units are pages, which a table lists
    piece: int  # entries of a row's table that are in scalar memory at a time, a multiple of the units of a tile
    buffers: int  # tiles of keys in vector memory: one is computed with, the others are being transferred
    starts: Starts  # when transfers start, see `Starts`
    transposed: bool  # whether scores are [keys, rows], see `attnops_tpu.caches.transposed`
    sublanes: int  # rows of a vector register
    cores: int  # the cores that share a kernel's grid; items are given to them in turn
    dtype: np.dtype  # the dtype of queries and weights in products
    stored: np.dtype  # the dtype of stored tokens
    packed: int  # features per element of a stored token: 2 for int4
    operand: np.dtype  # the dtype of keys and values in products
    out_dtype: np.dtype  # the dtype of the output
    scales: str  # what has a scale of its own, "token_head" or "head"; empty if tokens are not quantised
    is_latent: bool  # whether values are the first Dv features of keys
    is_joined: bool  # whether values are the last Dv features of the array of keys
    precision: jax.lax.PrecisionLike  # the precision of products
    scale: float  # the softmax scale
    scoring: Scoring  # what changes scores: mask, bias, soft cap and sinks, see `attnops.kernels.Scoring`
    wants_lse: bool  # whether the call returns the logsumexp
    interpret: bool  # whether the kernel runs in Pallas's interpreter
    bounds_checks: bool  # whether the kernel checks that its accesses are in bounds
    vmem: int  # the most bytes of vector memory that it may use
    N: int = 0  # the packed queries that the kernel reads in place; 0 for a call whose tiles are gathered before it

    @property
    def G(self) -> int:
        """Query heads per kv head."""
        return self.H // self.K

    @property
    def R(self) -> int:
        """Rows of a tile."""
        return self.G * self.bq

    def query_of(self, row: jax.Array) -> jax.Array:
        """The query of a row of a tile."""
        return lax.div(row, np.int32(self.G)) if self.N else lax.rem(row, np.int32(self.bq))

    def head_of(self, row: jax.Array) -> jax.Array:
        """The query head of a row of a tile, counted from the kv head's first."""
        return lax.rem(row, np.int32(self.G)) if self.N else lax.div(row, np.int32(self.bq))

    @property
    def nq(self) -> int:
        """Tiles of queries per row of the cache."""
        return -(-self.T // self.bq)

    @property
    def items(self) -> int:
        """Grid steps, a multiple of ``cores``; those after B · nq have nothing to do."""
        return -(-self.B * self.nq // self.cores) * self.cores

    @property
    def sources(self) -> int:
        """Arrays of blocks that are transferred: keys, values unless they are latent, and scales by token."""
        scales = (1 if self.is_latent else 2) if self.scales == "token_head" else 0
        return self.token_arrays + scales

    @property
    def token_arrays(self) -> int:
        """The `sources` that are no scales."""
        return 1 if self.is_latent or self.is_joined else 2

    @property
    def key_lanes(self) -> int:
        """Features of the array of keys that are multiplied with queries, padded with zeros; whole registers."""
        return min(-(-self.D // LANES) * LANES, self.width)

    @property
    def values_in_key_lanes(self) -> bool:
        """Whether some of the ``key_lanes`` are of the joined value."""
        return self.is_joined and self.width - self.Dv < self.key_lanes

    @property
    def value_start(self) -> int:
        """The first feature of the array of values that weights are multiplied with, at the start of a register."""
        return (self.width - self.Dv) // LANES * LANES if self.is_joined else 0

    @property
    def value_lanes(self) -> int:
        """Features that weights are multiplied with; the last Dv are the value."""
        return self.width - self.value_start if self.is_joined else self.Dv

    @property
    def rows_of_number(self) -> int:
        """Rows of a number per row of transposed scores: a register's, or fewer, which divide a value's features."""
        return math.gcd(self.sublanes, self.value_lanes)

    @property
    def is_looped(self) -> bool:
        """Whether tiles without anything to mask are computed in a loop over chunks too."""
        return self.transposed and self.chunk == self.masked_chunk

    @property
    def units(self) -> int:
        """Units per tile of keys."""
        return self.bk // self.unit

    @property
    def pieces(self) -> int:
        """Pieces of a row's table."""
        return -(-self.nk * self.units // self.piece)

    @property
    def words(self) -> int:
        """Words that hold a bit for each unit of a tile, a power of two."""
        return 1 << (-(-self.units // BITS) - 1).bit_length()

    @property
    def nk(self) -> int:
        """Tiles of keys per row, the last of which may reach beyond S."""
        return -(-self.S // self.bk)

    @property
    def folded(self) -> float:
        """The factor of the scale that queries are multiplied by, without rounding: its sign and its power of two.

        It is 1 for queries that are read in place, unless scores would be much smaller or larger.
        """
        if self.N and _LEAST_SCALE <= self.scale <= 1 / _LEAST_SCALE:
            return 1.0
        return 0.0 if self.scale == 0 else math.copysign(2.0 ** math.floor(math.log2(abs(self.scale))), self.scale)

    @property
    def scale_residual(self) -> float:
        """``scale / folded``."""
        return 1.0 if self.scale == 0 else self.scale / self.folded

    @property
    def score_unit(self) -> float:
        """Natural units per unit of the kernel's scores: without cap and bias these lack the scale's residual."""
        return 1.0 if self.scoring.has_cap_or_bias else self.scale_residual
