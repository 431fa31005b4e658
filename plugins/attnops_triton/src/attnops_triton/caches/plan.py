"""`CachePlan`: everything static about a call over a cache. The kernels depend on nothing else."""

from __future__ import annotations

import dataclasses

from attnops.kernels import Scoring
from attnops_triton.flash.plan import cdiv, head_dim_chunks


@dataclasses.dataclass(frozen=True)
class HeadDimChunk:
    """Consecutive features that are one operand of a product, whose width is a power of two.

    Attributes:
        start: the first feature.
        width: the number of features, including the zeros from ``stop`` on; a power of two.
        stop: one past the last feature.
    """

    start: int
    width: int
    stop: int

    @property
    def is_padded(self) -> bool:
        """Whether it has features that don't exist."""
        return self.start + self.width > self.stop


@dataclasses.dataclass(frozen=True)
class CacheTileSizes:
    """Tile sizes of a call over a cache, and how its kernel is compiled.

    Attributes:
        rows: rows of a tile of scores, a power of two: queries times the query heads of a kv head.
        bk: keys per tile, a power of two.
        warps: warps per program.
        stages: stages of the software pipeline.
        splits: programs that share the keys of an item.
        registers: the most registers per thread; 0 leaves the number to the assembler.
    """

    rows: int
    bk: int
    warps: int
    stages: int
    splits: int = 1
    registers: int = 0


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """Shapes, tiles and options of a call; hashable.

    Attributes:
        B, T, S: rows of the cache; queries per row, or of all packed rows; slots per row.
        H, K, D, Dv: query heads, kv heads, and head dims of keys and values.
        is_packed: whether the queries of all rows are packed in one; then masks and biases have batch 1 and B · S keys.
        in_order: whether each row's length alone decides its splits, so that a row's result does not depend on the rows
            with which it shares a tile of queries.
        page: slots per page; 0 for a storage without pages.
        pages: the most pages per row.
        blocks: the number of pages of the cache; for a storage without pages, of rows.
        width: features of a token in the array of keys.
        is_joined: whether values are the last Dv features of the array of keys.
        is_latent: whether values are the first Dv features of keys.
        stored: the name of the dtype of stored tokens.
        scales: what shares a scale: "token_head" (one per token and head), "head" or "tensor"; empty for tokens that
            are not quantised.
        dtype: the name of the dtype of products' operands.
        out_dtype: the name of the output's dtype.
        tiles: rows and keys per tile, warps, stages, splits and registers.
        writes: the most new tokens per row that the kernel writes; 0 for none.
        scale: the softmax scale.
        tf32: whether products of float32 may be rounded to TF32.
        scoring: the mask, bias, soft cap and sinks of the call, without their arrays.
        wants_lse: whether the call returns the logsumexp.
        arch: the architecture to compile for; empty for this machine's GPU.
        interpret: whether kernels run in Triton's interpreter.
    """

    B: int
    T: int
    S: int
    H: int
    K: int
    D: int
    Dv: int
    is_packed: bool
    in_order: bool
    page: int
    pages: int
    blocks: int
    width: int
    is_joined: bool
    is_latent: bool
    stored: str
    scales: str
    dtype: str
    out_dtype: str
    tiles: CacheTileSizes
    writes: int
    scale: float
    tf32: bool
    scoring: Scoring
    wants_lse: bool
    arch: str = ""
    interpret: bool = False

    @property
    def G(self) -> int:
        """Query heads per kv head."""
        return self.H // self.K

    @property
    def heads(self) -> int:
        """Query heads per tile: all of a kv head, unless the tile has fewer rows."""
        return min(self.G, self.tiles.rows)

    @property
    def head_blocks(self) -> int:
        """The number of tiles that the query heads of a kv head need."""
        return cdiv(self.G, self.heads)

    @property
    def bq(self) -> int:
        """Queries per tile."""
        return self.tiles.rows // self.heads

    @property
    def nq(self) -> int:
        """Tiles of queries per row, or of all packed rows."""
        return cdiv(self.T, self.bq)

    @property
    def nk(self) -> int:
        """Tiles of keys per row, the last of which may reach beyond S."""
        return cdiv(self.S, self.tiles.bk)

    @property
    def items(self) -> int:
        """The number of items (pairs of a row and a tile of queries). For packed rows an upper bound: each row begins
        at most one item more.
        """
        return min(self.nq + self.B, self.nq * self.B) if self.is_packed else self.B * self.nq

    @property
    def key_axis(self) -> int:
        """Keys of masks and biases."""
        return self.B * self.S if self.is_packed else self.S

    @property
    def is_even(self) -> bool:
        """Whether no tile reaches beyond a row's last slot."""
        return self.S % self.tiles.bk == 0

    @property
    def by_page(self) -> bool:
        """Whether a tile of keys lies in one page."""
        return self.page > 0 and self.page % self.tiles.bk == 0

    @property
    def scales_queries(self) -> bool:
        """Whether each row of queries is multiplied by a power of two, so that float16 can hold it."""
        return bool(self.scales) and self.dtype == "float16"

    @property
    def scales_first(self) -> bool:
        """Whether scores are multiplied by the scale before the softmax, so that ``score_unit`` is 1."""
        return bool(self.scales) or self.scoring.has_cap_or_bias or not 1e-20 < self.scale < 1e20

    @property
    def score_unit(self) -> float:
        """What the kernel's scores are multiplied by inside the exponential."""
        return 1.0 if self.scales_first else self.scale

    @property
    def key_chunks(self) -> list[HeadDimChunk]:
        """The chunks of keys; in a latent cache those that are also the value come first."""
        if not self.is_latent:
            return self._chunks(0, self.D)
        return self._chunks(0, self.Dv) + self._chunks(self.Dv, self.D)

    @property
    def value_chunks(self) -> list[HeadDimChunk]:
        """The chunks of values."""
        return self._chunks(0, self.Dv)

    def _chunks(self, first: int, stop: int) -> list[HeadDimChunk]:
        widest = 64 if self.dtype == "float32" else 512
        return [HeadDimChunk(first + start, width, stop) for start, width in head_dim_chunks(stop - first, widest)]
