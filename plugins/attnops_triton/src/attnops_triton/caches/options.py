"""The parameters of the kernels: arrays, sizes, and `KernelOptions`, which are all that their code depends on."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl

from attnops.kernels import Elementwise
from attnops_triton.caches.codec import assembly
from attnops_triton.caches.plan import CachePlan, HeadDimChunk
from attnops_triton.flash.plan import LOG2E
from attnops_triton.language.translate import mask_function, score_function


class Arrays(NamedTuple):
    """The first parameter: pointers, inputs before outputs; None for arrays that a call does not have.

    Attributes:
        q: queries.
        key, value, key_scale, value_scale, base, table: those of `operands.store_arrays`.
        mask, dense, bias, array, sinks: those of `operands.score_arrays`.
        ranges, row, tile: those of `schedule.ItemSchedule`.
        new_key, new_value, new_key_scale, new_value_scale, new_first, new_size, new_blocks: those of
            `write.token_arrays`.
        out_before, lse_before: initial values of outputs, which are written in their place.
        part, part_m, part_l: partial softmaxes, outputs of one kernel and inputs of the other.
        out, lse: the results.
        key_out, value_out, key_scale_out, value_scale_out: the arrays of the cache that are written, in place.
    """

    q: Any = None
    key: Any = None
    value: Any = None
    key_scale: Any = None
    value_scale: Any = None
    base: Any = None
    table: Any = None
    mask: tuple[Any, ...] = ()
    dense: tuple[Any, ...] = ()
    bias: tuple[Any, ...] = ()
    array: Any = None
    sinks: Any = None
    ranges: Any = None
    row: Any = None
    tile: Any = None
    new_key: Any = None
    new_value: Any = None
    new_key_scale: Any = None
    new_value_scale: Any = None
    new_first: Any = None
    new_size: Any = None
    new_blocks: Any = None
    out_before: Any = None
    lse_before: Any = None
    part: Any = None
    part_m: Any = None
    part_l: Any = None
    out: Any = None
    lse: Any = None
    key_out: Any = None
    value_out: Any = None
    key_scale_out: Any = None
    value_scale_out: Any = None


class Sizes(NamedTuple):
    """The second parameter: integers.

    Attributes:
        T, S, nq, items, pages, blocks: those of `CachePlan`.
        keys: keys of masks and biases.
        splits: programs that share the keys of an item.
        dense, array: strides of arrays [B or 1, H or 1, T, S]: by batch and by head, counted in rows of S keys.
    """

    T: Any
    S: Any
    keys: Any
    nq: Any
    items: Any
    splits: Any
    pages: Any
    blocks: Any
    dense: tuple[Any, ...] = ()
    array: Any = None


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of a mask or of a bias: an array [B or 1, H or 1, T or S or 1].

    Attributes:
        by_batch, by_head, by_query, by_key: the axes that it varies by.
        is_bool: whether it is a boolean.
        dtype: the dtype to convert it to; None for its own.
    """

    by_batch: bool
    by_head: bool
    by_query: bool
    by_key: bool
    is_bool: bool
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Features:
    """The features of keys or of values in an array of the cache.

    Attributes:
        chunks: their chunks.
        first: the first of them in a token of the array.
        width: features of a token in the array.
        size: the least power of two that is not below ``width``.
    """

    chunks: tuple[HeadDimChunk, ...]
    first: int
    width: int

    @property
    def size(self) -> int:
        return 1 << (self.width - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """The third parameter, a `tl.constexpr`: what code is left out, and the sizes of tiles.

    Attributes:
        rows, bk, heads, head_blocks, bq, H, K, G, D, Dv, page, by_page, is_even, is_packed, in_order, is_joined,
            is_latent, scales_queries, scales_first: those of `CachePlan` and of its tiles.
        is_split: whether programs share the keys of an item.
        keys, values: the features of keys and values.
        is_quantised, by_token, by_head: whether tokens have scales; whether each token and head, or each head, does.
        is_e5m2, is_e4m3: whether stored numbers are floats of 8 bits with 5 or 4 bits of exponent.
        assembly: the code that converts them; None to convert one at a time.
        dtype, out_dtype: those of products' operands and of the output.
        precision: the precision of products; None for the default.
        scale, score_unit, unit: the softmax scale; what scores are multiplied by inside the exponential of base e, and
            of base 2.
        mask, score: functions of `language.translate`; None for none.
        masks, biases: the values of mask and bias.
        has_array, has_bias, has_sinks, wants_lse: features of the call.
        new_blocks: blocks per row in which new tokens may lie; 0 if none are written.
        merged: the least power of two of splits that the other kernel merges, of 16 or more.
    """

    rows: int
    bk: int
    heads: int
    head_blocks: int
    bq: int
    H: int
    K: int
    G: int
    D: int
    Dv: int
    page: int
    by_page: bool
    is_even: bool
    is_packed: bool
    in_order: bool
    is_joined: bool
    is_latent: bool
    scales_queries: bool
    scales_first: bool
    is_split: bool
    keys: Features
    values: Features
    is_quantised: bool
    by_token: bool
    by_head: bool
    is_e5m2: bool
    is_e4m3: bool
    assembly: str | None
    dtype: Any
    out_dtype: Any
    precision: str | None
    scale: float
    score_unit: float
    unit: float
    mask: Any
    score: Any
    masks: tuple[Value, ...]
    biases: tuple[Value, ...]
    has_array: bool
    has_bias: bool
    has_sinks: bool
    wants_lse: bool
    new_blocks: int
    merged: int

    @property
    def merged_dims(self) -> int:
        """Features per row of the kernel that merges, a power of two."""
        return max(16, 1 << (self.Dv - 1).bit_length())

    @property
    def has_unit(self) -> bool:
        """Whether weights, which are multiplied by the values' scales, are divided by the largest of these scales
        first: otherwise float16 could not hold them.
        """
        return self.by_token and self.scales_queries

    @property
    def has_value_factor(self) -> bool:
        """Whether the sums are multiplied by one scale of values."""
        return self.is_quantised and not self.by_token

    @property
    def loads_mask_late(self) -> bool:
        """Whether the mask's values are loaded after the loop over unmasked tiles.

        Otherwise ptxas 12.9 spills two registers on sm_80 and sm_89 at D 128. Without scales per token and head it is
        the late load that spills (sm_89, T 512).
        """
        return self.has_value_factor

    @property
    def subtracts_first(self) -> bool:
        """Whether scores are subtracted before they are multiplied, which is exact: with large biases a difference of
        products would not be.
        """
        return self.has_bias or self.precision is not None


def options_of(plan: CachePlan) -> KernelOptions:
    """The options of a call's kernels."""
    scoring, tiles = plan.scoring, plan.tiles
    blocks = 1 if plan.writes == 1 or not plan.page else (plan.writes - 1) // plan.page + 2
    same = (
        "heads", "head_blocks", "bq", "H", "K", "G", "D", "Dv", "page", "by_page", "is_even", "is_packed", "in_order",
        "is_joined", "is_latent", "scales_queries", "scales_first", "score_unit", "wants_lse",
    )  # fmt: skip
    joined = plan.is_joined or plan.is_latent
    return KernelOptions(
        **{name: getattr(plan, name) for name in same}, rows=tiles.rows, bk=tiles.bk, is_split=tiles.splits > 1,
        keys=Features(tuple(plan.key_chunks), 0, plan.width),
        values=Features(tuple(plan.value_chunks), plan.width - plan.Dv if plan.is_joined else 0,
                        plan.width if joined else plan.Dv),
        is_quantised=bool(plan.scales), by_token=plan.scales == "token_head", by_head=plan.scales == "head",
        is_e5m2=plan.stored == "float8_e5m2",
        is_e4m3=plan.stored == "float8_e4m3fn", assembly=assembly(plan), dtype=getattr(tl, plan.dtype),
        out_dtype=getattr(tl, plan.out_dtype), scale=float(plan.scale), unit=plan.score_unit * LOG2E,
        precision=None if plan.dtype != "float32" else "tf32" if plan.tf32 else "ieee",
        mask=None if scoring.mask is None else mask_function(scoring.mask, scoring.dense),
        score=score_function(scoring.bias, scoring.cap), masks=_values(scoring.mask), biases=_values(scoring.bias),
        has_array=scoring.array, has_bias=scoring.has_bias, has_sinks=scoring.sinks,
        new_blocks=blocks if plan.writes else 0, merged=max(16, 1 << (tiles.splits - 1).bit_length()),
    )  # fmt: skip


def _values(function: Elementwise | None) -> tuple[Value, ...]:
    if function is None:
        return ()
    found = []
    for axes, dtype in zip(function.values, map(np.dtype, function.dtypes), strict=True):
        narrow = None if dtype == np.bool_ or dtype.itemsize == 4 else getattr(tl, dtype.name)
        found.append(Value("b" in axes, "h" in axes, "q" in axes, "kv" in axes, dtype == np.bool_, narrow))
    return tuple(found)
