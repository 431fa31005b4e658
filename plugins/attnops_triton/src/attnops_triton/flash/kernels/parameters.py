"""The parameters of the kernels: pointers, sizes, and `KernelOptions`, which are all that their code depends on."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, NamedTuple

import numpy as np
import triton.language as tl

from attnops.dropout import dropout_threshold, spread_of_keys
from attnops.kernels import Elementwise
from attnops_triton.flash.bits import WORD
from attnops_triton.flash.operands import Operand
from attnops_triton.flash.plan import LOG2E, FlashPlan, TileSizes, cdiv
from attnops_triton.flash.sizes import is_even
from attnops_triton.language.translate import mask_function, score_function, score_vjp_function

# Inputs without a head axis after the batch axis.
_WITHOUT_HEADS: Final = ("q", "k", "v", "d_out", "dq_before", "ranges", "columns", "words", "first")


class Pointers(NamedTuple):
    """The first parameter: pointers, inputs before outputs; None or empty for arrays that a call does not have.

    Attributes:
        q, k, v, d_out, m, log2_sum, delta: those of `attnops_triton.flash.backward.Inputs`.
        statistics: [B, H, 2, padded], the logsumexp to base 2 and delta, for specialised kernels.
        mask, dense, chosen, bias, table, array, sinks, dropout: those of `attnops_triton.flash.operands.Arrays`.
        ranges, columns, words, first: those of `attnops_triton.flash.tile_schedule.TileSchedule`.
        coverage, numbers: those of `attnops_triton.flash.tile_schedule.EveryTile`.
        dq_before: zeros, to which dq is added in place.
        out, m_out, log2_sum_out: outputs of the forward pass.
        dq, dk, dv: gradients.
        dq_bias, dk_bias: gradients of the bias's values, [B, H, T] and [B, H, S] each.
        d_array, sums: gradients of the bias by score and by distance.
        scratch: memory for the tensor maps of all programs.
    """

    q: Any = None
    k: Any = None
    v: Any = None
    d_out: Any = None
    m: Any = None
    log2_sum: Any = None
    delta: Any = None
    statistics: Any = None
    mask: tuple[Any, ...] = ()
    dense: tuple[Any, ...] = ()
    chosen: tuple[Any, ...] = ()
    bias: tuple[Any, ...] = ()
    table: Any = None
    array: Any = None
    sinks: Any = None
    dropout: Any = None
    ranges: Any = None
    columns: Any = None
    words: Any = None
    first: Any = None
    coverage: Any = None
    numbers: Any = None
    dq_before: Any = None
    out: Any = None
    m_out: Any = None
    log2_sum_out: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dq_bias: tuple[Any, ...] = ()
    dk_bias: tuple[Any, ...] = ()
    d_array: Any = None
    sums: Any = None
    scratch: Any = None


class Sizes(NamedTuple):
    """The second parameter: integers; None for those that a kernel does not use.

    Attributes:
        T, S: the lengths.
        batched: one bit per input, by `ArrayLayout.bit`: whether it has a batch axis, or all batches share it.
        inner: the batch index of masks and biases is below it (`FlashPlan.inner`).
        rows, heads, together: rows of tiles, heads of all batches, and how many heads are neighbours (`place`).
        map_batch, width: batches of the block map are ``map_batch`` maps apart; columns listed per row.
        full_start, full_stop, partial_start, partial_stop: the tiles of each row without a mask
            (`TileSchedule.constant`).
        padded, statistics_rows: the shape of ``statistics``.
        columns, batches: columns of tiles, and batches that a program adds, for gradients of biases by score.
    """

    T: Any
    S: Any
    batched: Any
    inner: Any = None
    rows: Any = None
    heads: Any = None
    together: Any = None
    map_batch: Any = None
    width: Any = None
    full_start: Any = None
    full_stop: Any = None
    partial_start: Any = None
    partial_stop: Any = None
    padded: Any = None
    statistics_rows: Any = None
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
class Value:
    """A value of a mask or a bias, an array [B or 1, H or 1, n].

    Attributes:
        axis: "q" if n is T, "kv" if it is S, and "" if it is 1.
        is_bool: whether it is a boolean.
        dtype: the dtype to convert it to; None for its own.
    """

    axis: str
    is_bool: bool
    dtype: Any


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """The third parameter, a `tl.constexpr`: what code is left out, and the sizes of tiles.

    Attributes:
        plan: the plan without lengths, batch, mask and bias, with ``tiles`` for all kernels.
        tiles: the tile sizes of the kernel.
        is_even: whether the tile sizes divide the lengths, so that no tile reaches beyond the last token.
        scales_first, score_unit, has_bias, splits_groups: those of the plan and its scoring.
        mask, score, score_vjp: functions of `attnops_triton.language.translate`; None for none.
        masks, biases: the values of mask and bias.
        layouts: by array, its `ArrayLayout`.
        transposed: whether a tile is [keys, queries] instead of [queries, keys].
        map_by_head: whether the block map has several heads.
        wanted: places of the bias's gradients to compute, in the results of ``score_vjp``.
        flat: whether one loop iterates over both tiles and the query heads of a kv head, in the kernel by keys.
    """

    plan: FlashPlan
    tiles: TileSizes
    is_even: bool
    scales_first: bool
    score_unit: float
    has_bias: bool
    splits_groups: bool
    mask: Any
    score: Any
    score_vjp: Any
    masks: tuple[Value, ...]
    biases: tuple[Value, ...]
    layouts: Pointers
    transposed: bool = False
    map_by_head: bool = False
    wanted: tuple[int, ...] = ()
    flat: bool = False

    @property
    def bq(self) -> int:
        return self.tiles.bq

    @property
    def bk(self) -> int:
        return self.tiles.bk

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
        scoring=dataclasses.replace(scoring, mask=None, bias=None),
    )  # fmt: skip
    return kind(
        plan=bare, tiles=tiles, is_even=is_even(plan, tiles), scales_first=plan.scales_first,
        score_unit=plan.score_unit, has_bias=scoring.has_bias, splits_groups=plan.splits_groups,
        mask=None if scoring.mask is None else mask_function(scoring.mask, scoring.dense + len(scoring.chosen), gluon),
        score=score_function(scoring.bias, scoring.cap, gluon),
        score_vjp=score_vjp_function(scoring.bias) if differentiates and scoring.bias is not None else None,
        masks=_values(scoring.mask), biases=_values(scoring.bias), layouts=grouped(layouts), **others,
    )  # fmt: skip


def grouped(named: list[tuple[str, Any]]) -> Pointers:
    """The values of arrays by name as `Pointers`; those of numbered names, such as mask0 and mask1, are in tuples."""
    fields: dict[str, Any] = {}
    for name, x in named:
        group = name.rstrip("0123456789")
        fields[group] = (*fields.get(group, ()), x) if group != name else x
    return Pointers(**fields)


def _values(function: Elementwise | None) -> tuple[Value, ...]:
    if function is None:
        return ()
    found = []
    for axes, dtype in zip(function.values, map(np.dtype, function.dtypes), strict=True):
        axis = next((x for x in ("q", "kv") if x in axes), "")
        narrow = None if dtype == np.bool_ or dtype.itemsize == 4 else getattr(tl, dtype.name)
        found.append(Value(axis, dtype == np.bool_, narrow))
    return tuple(found)
