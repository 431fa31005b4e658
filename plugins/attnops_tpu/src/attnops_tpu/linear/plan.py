"""What is static about a call of linear attention, and what its kernels ask of the compiler."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import jax
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from attnops import OperationMetadata
from attnops.typing import DType, PyTree
from attnops_tpu.generations import bounds_checks, generation
from attnops_tpu.references import needed

LANES: Final = 128
# Products of bfloat16 parts are those of XLA at each precision: 1, 3 and 6.
_COUNTS: Final[dict[Any, int]] = {lax.Precision.DEFAULT: 1, lax.Precision.HIGH: 2}
# Value heads of a grid step: at most so many, whose states have at most this share of vector memory, and a smaller one
# where there is a backward kernel, which has more arrays of them. Both of its kernels have the same heads a step.
_HEADS: Final = 16
_SHARE: Final = 8
_SHARE_WITH_BACKWARD: Final = 16
# Bytes for registers that the compiler spills, for each head of D = Dv = 128.
_SPILLED: Final = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """What is static.

    Attributes:
        B: rows.
        dtype: of the outputs.
        keys: key heads of a grid step.
        heads: value heads of a grid step.
        D: of keys, padded to a multiple of 128.
        Dv: of values, padded.
        scale: of queries.
        beta: whether it is the delta rule.
        passes: the ``count`` of products, see `attnops_tpu.linear.products.product`.
        interpret: whether kernels run in Pallas's interpreter.
        keeps: whether the forward kernel keeps what the backward kernel needs, `attnops_tpu.linear.chunk.Kept`.
    """

    B: int
    dtype: DType
    keys: int
    heads: int
    D: int
    Dv: int
    scale: float
    beta: bool
    passes: int
    interpret: bool
    keeps: bool = False


def plan(
    metadata: OperationMetadata,
    query: jax.Array,
    value: jax.Array,
    scale: float | None,
    beta: bool,
    keeps: bool = False,
) -> LinearPlan:
    """The plan of a call, or with ``keeps`` that of one with gradients."""
    (K, D), (H, Dv) = query.shape[2:], value.shape[2:]
    D, Dv = (-(-n // LANES) * LANES for n in (D, Dv))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    # Two buffers each for the first state and the last.
    room = generation().vmem // (_SHARE_WITH_BACKWARD if keeps else _SHARE) // (4 * 4 * D * Dv)
    keys, heads = heads_of_step(K, H, max(1, min(_HEADS, room)))
    return LinearPlan(
        B=query.shape[0], dtype=query.dtype, keys=keys, heads=heads, D=D, Dv=Dv, scale=scale, beta=beta,
        passes=_COUNTS.get(metadata.precision, 3), interpret=metadata.interpret, keeps=keeps,
    )  # fmt: skip


def heads_of_step(K: int, H: int, most: int) -> tuple[int, int]:
    """The key heads and value heads that a grid step computes, at most so many value heads."""
    R = H // K
    if most < R:
        return 1, max(n for n in range(1, most + 1) if R % n == 0)
    keys = max(n for n in range(1, K + 1) if K % n == 0 and n * R <= most)
    return keys, keys * R


def compiler_params(plan: LinearPlan, refs: PyTree, axes: int) -> pltpu.CompilerParams:
    """Of a kernel whose grid has rows, heads and, as a third axis in sequence, chunks."""
    parallel, arbitrary = pltpu.GridDimensionSemantics.PARALLEL, pltpu.GridDimensionSemantics.ARBITRARY
    chip = generation()
    spilled = _SPILLED * plan.heads * plan.D * plan.Dv // LANES**2
    return pltpu.CompilerParams(
        dimension_semantics=(parallel, parallel, arbitrary)[:axes],
        vmem_limit_bytes=min(chip.vmem, needed(refs, chip.sublanes) + spilled),
        disable_bounds_checks=not bounds_checks(),
    )
