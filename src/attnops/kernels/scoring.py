"""What a call does to scores, as static data from which kernels are built."""

from __future__ import annotations

import dataclasses

import jax

from attnops.biases import ALiBi, Bias, RelativeBias
from attnops.kernels.elementwise import Elementwise
from attnops.kernels.parts import of_bias, of_mask
from attnops.masks import Blocks, Mask
from attnops.typing import Index, Leaf


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What is done to scores, static and hashable.

    Attributes:
        cap: the soft cap.
        mask: the mask, elementwise; None for none.
        dense: number of arrays of T × S elements in the mask.
        chosen: for each of the mask's `attnops.masks.Blocks`, the queries and the keys per block.
        bias: an elementwise bias; None for none.
        table: whether there is a bias by distance.
        array: whether there is a bias of T × S elements.
        dropout_prob: the probability of dropout.
        dropout_step: the factor by which dropout's hash multiplies the index of a key; 1 unless keys are strided.
        has_fully_masked_tokens: whether tokens may be fully masked; such tokens may hold NaN.
        sinks: whether there are sinks.
    """

    cap: float | None = None
    mask: Elementwise | None = None
    dense: int = 0
    chosen: tuple[tuple[int, int], ...] = ()
    bias: Elementwise | None = None
    table: bool = False
    array: bool = False
    dropout_prob: float = 0.0
    dropout_step: int = 1
    has_fully_masked_tokens: bool = False
    sinks: bool = False

    @property
    def has_bias(self) -> bool:
        """Whether there is a bias of any kind."""
        return self.bias is not None or self.table or self.array

    @property
    def has_cap_or_bias(self) -> bool:
        """Whether scores are more than a product and a scale."""
        return self.cap is not None or self.has_bias


@dataclasses.dataclass(frozen=True, eq=False)
class SpreadArray(Bias):
    """An array bias with fewer than T × S elements: it varies by query or by key, or by neither.

    Attributes:
        array: [B or 1, H or 1, T or 1, S or 1], not both T and S.
    """

    array: Leaf

    def apply(self, scores: jax.Array, b: Index, h: Index, q: Index, kv: Index) -> jax.Array:
        """See `attnops.biases.Bias.apply`."""
        index = (i if size > 1 else 0 for i, size in zip((b, h, q, kv), self.array.shape, strict=True))
        return scores + self.array[tuple(index)].astype(scores.dtype)


def describe(
    lengths: tuple[int, int],
    mask: Mask | None,
    bias: jax.Array | Bias | None,
    cap: float | None,
    dropout_prob: float,
    sinks: bool,
    dropout_step: int = 1,
    packed: bool = False,
    by_row: bool = False,
) -> Scoring:
    """The `Scoring` of a call.

    Args:
        lengths: T and S.
        mask: the call's mask, bound.
        bias: the call's bias, bound.
        cap: the soft cap.
        dropout_prob: 0 for none.
        sinks: whether there are sinks.
        dropout_step: the factor by which dropout's hash multiplies the index of a key; 1 unless keys are strided.
        packed: whether the kernel receives the mask as bits instead of evaluating it.
        by_row: whether integers per key that depend only on values per sequence are computed on a tile, for kernels
            whose tiles each belong to one sequence.
    """
    bias = elementwise_bias(bias)
    table = isinstance(bias, RelativeBias) and not isinstance(bias, ALiBi)
    function, _, dense = (None, [], []) if mask is None or packed else of_mask(mask, by_row)
    chosen = tuple((x.q_block, x.kv_block) for x in dense if isinstance(x, Blocks))
    return Scoring(
        cap=cap,
        mask=function,
        dense=len(dense) - len(chosen),
        chosen=chosen,
        bias=of_bias(bias, by_row)[0] if isinstance(bias, Bias) and not table else None,
        table=table,
        array=bias is not None and not isinstance(bias, Bias),
        dropout_prob=dropout_prob,
        dropout_step=dropout_step,
        has_fully_masked_tokens=mask is not None and mask.has_fully_masked_tokens(*lengths),
        sinks=sinks,
    )


def elementwise_bias(bias: jax.Array | Bias | None) -> jax.Array | Bias | None:
    """The bias in the form that kernels accept: an array of T × S elements, or a `Bias` for any smaller array."""
    is_small = bias is not None and not isinstance(bias, Bias) and min(bias.shape[2:]) == 1
    return SpreadArray(bias) if is_small else bias
