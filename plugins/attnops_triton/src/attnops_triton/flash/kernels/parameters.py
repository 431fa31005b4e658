"""The parameters of the kernels: pointers, sizes, and `KernelOptions`, which are all that their code depends on."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Final, NamedTuple

import triton.language as tl

from attnops.dropout import dropout_threshold, spread_of_keys
from attnops_triton.flash.bits import WORD
from attnops_triton.flash.operands import Arrays, Operand
from attnops_triton.flash.plan import LOG2E, FlashPlan, TileSizes, cdiv
from attnops_triton.flash.sizes import is_even
from attnops_triton.language.translate import Value, describe_values, mask_function, score_function, score_vjp_function

# Inputs without a head axis after the batch axis.
_WITHOUT_HEADS: Final = ("q", "k", "k_columns", "v", "d_out", "dq_before", "ranges", "columns", "words", "first")

# Pointers, inputs before outputs.
_POINTERS: Final = (
    "q", "k", "v", "d_out", "m", "log2_sum", "delta",  # of `attnops_triton.flash.backward.Inputs`
    "statistics",  # [B, H, 2, padded], the logsumexp to base 2 and delta, for specialised kernels
    "k_columns",  # k again, to be read in other blocks
    *Arrays._fields,
    "ranges", "columns", "words", "first",  # of `attnops_triton.flash.tile_schedule.TileSchedule`
    "coverage", "numbers",  # of `attnops_triton.flash.tile_schedule.EveryTile`
    "dq_before",  # zeros, to which dq is added in place
    "out", "m_out", "log2_sum_out", "max_out",  # of the forward pass
    "dq", "dk", "dv",
    "dq_bias", "dk_bias",  # the gradients of the bias's values, [B, H, T] and [B, H, S] each
    "d_array", "sums",  # the gradients of the bias by score and by distance
)  # fmt: skip
_GROUPS: Final = ("mask", "dense", "chosen", "bias", "dq_bias", "dk_bias")

# The first parameter. Pointers are None for arrays that a call does not have; groups are tuples of pointers.
Pointers = collections.namedtuple("Pointers", _POINTERS, defaults=[() if x in _GROUPS else None for x in _POINTERS])


class Sizes(NamedTuple):
    """The second parameter: integers; None for those that a kernel does not use."""

    T: Any
    S: Any
    batched: Any  # one bit per input, by `ArrayLayout.bit`: whether it has a batch axis, or all batches share it
    inner: Any = None  # the batch index of masks and biases is below it (`FlashPlan.inner`)
    rows: Any = None  # rows of tiles
    heads: Any = None  # heads of all batches
    together: Any = None  # how many heads are neighbours (`locate`)
    map_batch: Any = None  # the maps between those of two batches in the block map
    width: Any = None  # columns listed per row
    # The tiles of each row without a mask (`TileSchedule.constant`).
    full_start: Any = None
    full_stop: Any = None
    partial_start: Any = None
    partial_stop: Any = None
    # For gradients of biases by score: columns of tiles, and batches that a program adds.
    columns: Any = None
    batches: Any = None


class ArrayLayout(int):
    """An array [B or 1, heads, …]; an integer, since Triton passes integers on as compile-time values.

    Attributes:
        heads: H or 1; 0 for inputs of other layouts.
        bit: the place of its bit in ``Sizes.batched``; −1 for an output, which has a batch axis.
    """

    def __new__(cls, heads: int, bit: int = -1) -> ArrayLayout:
        return super().__new__(cls, heads << 8 | (bit + 1))

    @property
    def heads(self) -> int:
        return int(self) >> 8

    @property
    def bit(self) -> int:
        return (int(self) & 255) - 1


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """The third parameter, a `tl.constexpr`: what code is left out, and the sizes of tiles."""

    plan: (
        FlashPlan  # with ``tiles`` for all kernels, without lengths, batch, mask, bias and what code does not depend on
    )
    tiles: TileSizes  # those of the kernel
    is_even: bool  # whether the tile sizes divide the lengths, so that no tile reaches beyond the last token
    # Those of the plan and its scoring; ``splits_groups`` in the kernel by keys alone.
    scales_first: bool
    score_unit: float
    has_bias: bool
    splits_groups: bool
    # Functions of `attnops_triton.language.translate`; None for none.
    mask: Any
    score: Any
    score_vjp: Any
    masks: tuple[Value, ...]  # the values of the mask and of the bias
    biases: tuple[Value, ...]
    layouts: Pointers  # an `ArrayLayout` for each input
    transposed: bool = False  # whether a tile is [keys, queries] instead of [queries, keys]
    map_by_head: bool = False  # whether the block map has several heads
    wanted: tuple[int, ...] = ()  # places of the bias's gradients to compute, in the results of ``score_vjp``
    flat: bool = False  # whether one loop has both tiles and the query heads of a kv head, in the kernel by keys

    @property
    def bq(self) -> int:
        return self.tiles.bq

    @property
    def bk(self) -> int:
        return self.tiles.bk

    def block(self, name: str) -> tuple[int, ...] | None:
        """The block of an array that is read or written through a tensor map; None if pointers are used."""
        return None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a tile of scores."""
        return (self.bk, self.bq) if self.transposed else (self.bq, self.bk)

    @property
    def has_ok(self) -> bool:
        """Whether a PARTIAL tile has a mask. The kernel by keys needs none for keys beyond the last one, which are not
        stored, unless tokens may be fully masked.
        """
        return self.is_masked or (not self.is_even and (not self.transposed or self.has_fully_masked))

    @property
    def is_masked(self) -> bool:
        """Whether the call has a mask that is evaluated on tiles."""
        return self.mask is not None or self.plan.bit_mask

    @property
    def is_elementwise(self) -> bool:
        """Whether there is an elementwise bias, which ``score`` computes."""
        return self.has_bias and not self.plan.scoring.table and not self.plan.scoring.array

    @property
    def has_fully_masked(self) -> bool:
        """Whether tokens may be fully masked; such tokens may hold NaN."""
        return self.plan.scoring.has_fully_masked_tokens

    @property
    def output(self) -> ArrayLayout:
        """The layout of outputs [B, H, …]."""
        return ArrayLayout(self.plan.H)

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """(start, width) of each chunk of D."""
        return tuple(self.plan.chunks(self.plan.D))

    @property
    def value_chunks(self) -> tuple[tuple[int, int], ...]:
        """(start, width) of each chunk of Dv."""
        return tuple(self.plan.chunks(self.plan.Dv))

    @property
    def dtype(self) -> Any:
        """The dtype of products' operands."""
        return getattr(tl, self.plan.dtype)

    @property
    def bits(self) -> Any:
        """Integers of the size of ``dtype``."""
        return getattr(tl, f"int{8 * self.plan.itemsize}")

    @property
    def out_dtype(self) -> Any:
        return getattr(tl, self.plan.out_dtype)

    @property
    def gradient_dtype(self) -> Any:
        return getattr(tl, self.plan.gradient_dtype)

    @property
    def precision(self) -> str | None:
        """The precision of products; None for the default."""
        return None if self.plan.dtype != "float32" else "tf32" if self.plan.tf32 else "ieee"

    @property
    def word(self) -> int:
        """Bits per word of a bit mask."""
        return WORD

    @property
    def words(self) -> int:
        """Words per query of a tile."""
        return cdiv(self.bk, WORD)

    @property
    def swaps(self) -> bool:
        """Whether scores are the transpose of the product of queries and keys.

        A GPU rounds a product and its transpose equally. NumPy, which the interpreter uses, does not: with large scores
        the weights would differ from those of the forward pass.
        """
        return self.transposed and self.plan.interpret

    @property
    def unit(self) -> float:
        """What scores are multiplied by inside the exponential of base 2."""
        return self.score_unit * LOG2E

    @property
    def subtracts_first(self) -> bool:
        """Whether scores are subtracted before they are multiplied, which is exact: with large biases a difference of
        products would not be.
        """
        return self.has_bias or self.plan.dtype == "float32"

    @property
    def scale(self) -> float:
        return float(self.plan.scale)

    @property
    def kept(self) -> float:
        """What weights that dropout keeps are multiplied by."""
        return 1 / (1 - self.plan.scoring.dropout_prob)

    @property
    def dropout_spread(self) -> int:
        return spread_of_keys(self.plan.scoring.dropout_step)

    @property
    def dropout_threshold(self) -> int:
        return dropout_threshold(self.plan.scoring.dropout_prob)


def options_of(
    plan: FlashPlan, tiles: TileSizes, operands: list[Operand], differentiates: bool = False,
    kind: type[KernelOptions] = KernelOptions, **others: Any,
) -> KernelOptions:  # fmt: skip
    """The options of a kernel with these operands.

    ``differentiates``: whether it differentiates the bias; ``kind``: their class; ``others``: further fields.
    """
    scoring, gluon = plan.scoring, tiles.specialised
    heads = [0 if x.name in _WITHOUT_HEADS else x.array.shape[1] for x in operands]
    layouts = [(x.name, ArrayLayout(count, i)) for i, (x, count) in enumerate(zip(operands, heads, strict=True))]
    bare = dataclasses.replace(
        plan, B=0, inner=0, T=0, S=0, forward=tiles, by_query=tiles, by_key=tiles, by_score=tiles, arch="",
        tf32=plan.tf32 and plan.dtype == "float32", unordered=False, max_logits=False,
        scoring=dataclasses.replace(scoring, mask=None, bias=None, sinks=False),
    )  # fmt: skip
    return kind(
        plan=bare, tiles=tiles, is_even=is_even(plan, tiles), scales_first=plan.scales_first,
        score_unit=plan.score_unit, has_bias=scoring.has_bias,
        splits_groups=plan.splits_groups and others.get("transposed", False),
        mask=None if scoring.mask is None else mask_function(scoring.mask, scoring.dense + len(scoring.chosen), gluon),
        score=score_function(scoring.bias, scoring.cap, gluon),
        score_vjp=score_vjp_function(scoring.bias) if differentiates and scoring.bias is not None else None,
        masks=describe_values(scoring.mask, of_tokens=True), biases=describe_values(scoring.bias, of_tokens=True),
        layouts=grouped(layouts), **others,
    )  # fmt: skip


def grouped(named: list[tuple[str, Any]]) -> Pointers:
    """The values of arrays by name as `Pointers`; those of numbered names, such as mask0 and mask1, are in tuples."""
    fields: dict[str, Any] = {}
    for name, x in named:
        group = name.rstrip("0123456789")
        fields[group] = (*fields.get(group, ()), x) if group != name else x
    return Pointers(**fields)
