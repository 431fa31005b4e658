"""Everything static about a call over a cache: `CachePlan`, and `KernelOptions`, on which the kernels' code depends."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from attnops.kernels import Scoring
from attnops_triton.flash.plan import LOG2E, cdiv, head_dim_chunks
from attnops_triton.language.translate import Value


@dataclasses.dataclass(frozen=True)
class HeadDimChunk:
    """Consecutive features that are one operand of a product."""

    start: int  # the first feature
    width: int  # the number of features, including the zeros from ``stop`` on; a power of two
    stop: int  # one past the last feature
    # 1 for features in the upper 4 bits of the bytes of the chunk before, whose features are in the lower; else 0
    upper: int = 0

    @property
    def is_padded(self) -> bool:
        """Whether it has features that don't exist."""
        return self.start + self.width > self.stop


@dataclasses.dataclass(frozen=True)
class Features:
    """The features of keys or of values in an array of the cache."""

    chunks: tuple[HeadDimChunk, ...]
    first: int  # the first of their elements in a token of the array
    width: int  # elements of a token in the array


@dataclasses.dataclass(frozen=True)
class CacheTileSizes:
    """Tile sizes of a call over a cache, and how its kernel is compiled."""

    rows: int  # rows of a tile of scores, a power of two: queries times the query heads of a kv head
    bk: int  # keys per tile, a power of two
    warps: int  # warps per program
    stages: int  # stages of the software pipeline
    registers: int = 0  # the most registers per thread; 0 leaves the number to the assembler


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """The third parameter, a `tl.constexpr`. It has no lengths, so that one program serves all of them."""

    H: int  # query heads
    K: int  # kv heads
    D: int  # head dim of keys
    Dv: int  # head dim of values
    keys: Features
    values: Features
    tiles: CacheTileSizes
    is_even: bool  # whether no tile reaches beyond a row's last slot
    is_packed: bool  # whether queries of all rows are packed in one; masks and biases then have batch 1 and B · S keys
    # Whether each row's length alone decides its splits, so that a row's result does not depend on the rows with which
    # it shares a tile of queries.
    in_order: bool
    page: int  # slots per page; 0 for a storage without pages
    is_joined: bool  # whether values are the last Dv features of the array of keys
    is_latent: bool  # whether values are the first Dv features of keys
    stored: str  # the dtype of stored tokens, or of their codec
    scales: str  # what shares a scale: "token_head" (one per token and head), "head" or "tensor"; empty for no scales
    assembly: tuple[str, ...] | None  # the PTX that converts four stored numbers; None to convert one at a time
    dtype: str  # the dtype of products' operands
    scale: float  # the softmax scale
    tf32: bool  # whether products of float32 may be rounded to TF32
    mask: Any  # functions of `language.translate`; None for none
    score: Any
    masks: tuple[Value, ...]  # the values of the mask and of the bias
    biases: tuple[Value, ...]
    has_bias: bool
    writes: bool  # whether new tokens are written
    kept: ClassVar[float] = 1.0  # a factor of weights; only in kernels with dropout it is not 1
    scanned: ClassVar[int] = 256  # entries of the table that are looked at together
    merged: int = 0  # in the kernel that merges splits: a power of two that is not below their number

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
    def by_page(self) -> bool:
        """Whether a tile of keys lies in one page."""
        return self.page > 0 and self.page % self.tiles.bk == 0

    @property
    def per_element(self) -> int:
        """Features in an element of the cache's arrays."""
        return 2 if self.stored == "int4" else 1

    @property
    def by_token(self) -> bool:
        """Whether each token and head has a scale."""
        return self.scales == "token_head"

    @property
    def has_value_factor(self) -> bool:
        """Whether the sums are multiplied by one scale of values."""
        return bool(self.scales) and not self.by_token

    @property
    def scales_queries(self) -> bool:
        """Whether each row of queries is multiplied by a power of two, so that float16 can hold it."""
        return bool(self.scales) and self.dtype == "float16"

    @property
    def has_unit(self) -> bool:
        """Whether weights, times scales of values, are divided by the largest scale, so that float16 can hold them."""
        return self.by_token and self.scales_queries

    @property
    def scales_first(self) -> bool:
        """Whether scores are multiplied by the scale before the softmax, so that ``score_unit`` is 1."""
        return bool(self.scales) or self.score is not None or self.has_bias or not 1e-20 < self.scale < 1e20

    @property
    def score_unit(self) -> float:
        """What scores are multiplied by inside the exponential of base e."""
        return 1.0 if self.scales_first else self.scale

    @property
    def unit(self) -> float:
        """What scores are multiplied by inside the exponential of base 2."""
        return self.score_unit * LOG2E

    @property
    def operand(self) -> Any:
        """Triton's dtype of products' operands."""
        import triton.language as tl

        return getattr(tl, self.dtype)

    @property
    def precision(self) -> str | None:
        """The precision of products; None for the default."""
        return None if self.dtype != "float32" else "tf32" if self.tf32 else "ieee"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachePlan(KernelOptions):
    """The options of a call's kernels, and what their code does not depend on; hashable."""

    B: int  # rows of the cache
    T: int  # queries per row, or of all packed rows
    S: int  # slots per row
    pages: int  # the most pages per row
    blocks: int  # pages of the cache; for a storage without pages, rows
    splits: int = 1  # programs that share the keys of an item
    out_dtype: str
    scoring: Scoring  # the mask, bias, soft cap and sinks of the call, without their arrays
    wants_lse: bool  # whether the call returns the logsumexp
    arch: str = ""  # the architecture to compile for; empty for this machine's GPU
    interpret: bool = False  # whether kernels run in Triton's interpreter

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

    def options(self, merged: int = 0) -> KernelOptions:
        """The options of the kernel that computes attention, or of the one that merges splits."""
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(KernelOptions)}
        if not merged:
            return KernelOptions(**fields)
        # One program that merges serves several kernels that compute attention.
        none = Features((), 0, 0)
        unused: dict[str, Any] = {
            "D": 0, "keys": none, "values": none, "is_even": True, "in_order": False, "page": 0, "is_joined": False,
            "is_latent": False, "stored": "", "scales": "", "assembly": None, "dtype": "", "tf32": False, "mask": None,
            "score": None, "masks": (), "biases": (), "has_bias": False, "writes": False,
        }  # fmt: skip
        tiles = dataclasses.replace(self.tiles, bk=0)
        return KernelOptions(**fields | unused | {"tiles": tiles, "scale": self.score_unit, "merged": merged})


def features(D: int, Dv: int, width: int, content: str, dtype: str, packed: int = 1) -> tuple[Features, Features]:
    """The features of keys and of values in arrays with ``width`` features per token and such a
    `attnops_caches.TokenLayout.content`; in a latent cache those of keys that are also the value come first. An element
    of an array has ``packed`` features.
    """

    def chunks(first: int, stop: int) -> tuple[HeadDimChunk, ...]:
        each = (stop - first) // packed
        found, firsts = (
            head_dim_chunks(each, 64 if dtype == "float32" else 512),
            [first + i * each for i in range(packed)],
        )
        return tuple(
            HeadDimChunk(first + start, size, first + each, upper)
            for start, size in found
            for upper, first in enumerate(firsts)
        )

    values = chunks(0, Dv)
    keys = values + chunks(Dv, D) if content == "latent" else chunks(0, D)
    joined = width - Dv if content == "joined" else 0
    value_width = Dv if content == "separate" else width
    return Features(keys, 0, width // packed), Features(values, joined // packed, value_width // packed)
