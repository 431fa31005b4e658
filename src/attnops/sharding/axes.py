"""Semantic axes: what the dimensions of a model's arrays are, whatever mesh they come to lie on."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import jax

from attnops.sharding.modes import MODE_TRAIN, RUNTIME_MODE_TYPES

Array: TypeAlias = jax.Array
PRNGKey: TypeAlias = jax.Array
DType: TypeAlias = Any
Shape: TypeAlias = Sequence[int]
AxisNames: TypeAlias = tuple[str, ...]
AxisIdxes: TypeAlias = tuple[int, ...]
AxisType: TypeAlias = tuple[str, ...] | str | None

BATCH: Final = "__BATCH__"
LENGTH: Final = "__LENGTH__"
QUERY_LENGTH: Final = "__QUERY_LENGTH__"
KV_LENGTH: Final = "__KV_LENGTH__"
HEAD: Final = "__HEAD__"
KV_HEAD: Final = "__KV_HEAD__"
HEAD_DIM: Final = "__HEAD_DIM__"
KV_HEAD_DIM: Final = "__KV_HEAD_DIM__"
BIAS_HEAD_SEQ: Final = "__BIAS_HEAD_SEQ__"
BIAS_KV_SEQ: Final = "__BIAS_KV_SEQ__"
EMBED: Final = "__EMBED__"
MLP_INTERMEDIATE: Final = "__MLP_INTERMEDIATE__"
VOCAB: Final = "__VOCAB__"
EXPERT: Final = "__EXPERT__"
EXPERT_GATE: Final = "__EXPERT_GATE__"

# Kinds of parallelism, for arrays such as weights whose dimensions are cut by kind.
DP: Final = "__DATA_PARALLEL__"
FSDP: Final = "__FULLY_SHARDED_DATA_PARALLEL__"
TP: Final = "__TENSOR_PARALLEL__"
EP: Final = "__EXPERT_PARALLEL__"
SP: Final = "__SEQUENCE_PARALLEL__"

EMPTY: Final = "_"  # a dimension that every device has whole
EMPTY_VAL: Final = types.new_class("EMPTY_VAL")()  # of a parameter that was not given
DEFAULT_MASK_VALUE: Final = -2.381976426469702e38  # 0.7 · the least float32

# A dimension's axis; several where it is cut by all of them, first by the first.
SemanticAxis: TypeAlias = str | Sequence[str] | None


class DynamicShardingAxes(NamedTuple):
    """The semantic axes of an array's dimensions, and the mode whose mesh axes they take.

    Attributes:
        axes: one a dimension; a list of several, None or `EMPTY` for none.
        mode: a runtime mode; or the dimension by which it is told: of length 1 it is decoding, else training.
    """

    axes: Sequence[SemanticAxis]
    mode: RUNTIME_MODE_TYPES | int


def _standard(
    name: str, what: str, *axes: SemanticAxis, mode: RUNTIME_MODE_TYPES | int = MODE_TRAIN
) -> type[DynamicShardingAxes]:
    """Axes under a name: the class itself is what functions of `attnops.sharding` take."""
    return type(name, (DynamicShardingAxes,), {"__doc__": what, "__module__": __name__, "axes": axes, "mode": mode})


HiddenStateSharding: Final = _standard(
    "HiddenStateSharding", "[batch, length, features].", BATCH, QUERY_LENGTH, EMBED, mode=1
)
AttnQSharding: Final = _standard("AttnQSharding", "Queries, [B, T, H, D].", BATCH, QUERY_LENGTH, HEAD, HEAD_DIM, mode=1)
AttnKVSharding: Final = _standard(
    "AttnKVSharding", "Keys or values, [B, S, K, D].", BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM, mode=1
)
RowWise: Final = _standard("RowWise", "A weight [in, out] whose products are summed over devices.", TP, (FSDP, SP))
ColumnWise: Final = _standard(
    "ColumnWise", "A weight [in, out] of whose result each device has columns.", (FSDP, SP), TP
)
SRowWise: Final = _standard("SRowWise", "A vector that belongs to a `RowWise` weight.", TP)
SColumnWise: Final = _standard("SColumnWise", "A vector that belongs to a `ColumnWise` weight.", (FSDP, SP))
Replicated: Final = _standard("Replicated", "Every device has all of it.", EMPTY)
ExpertColumnWise: Final = _standard(
    "ExpertColumnWise", "Experts' weights [experts, in, out], cut by columns.", EP, FSDP, TP
)
ExpertRowWise: Final = _standard("ExpertRowWise", "Experts' weights [experts, in, out], cut by rows.", EP, TP, FSDP)
ExpertColumnWiseAlt: Final = _standard(
    "ExpertColumnWiseAlt", "As `ExpertColumnWise`, rows cut by sequence parallelism too.", EP, (FSDP, SP), TP
)
ExpertRowWiseAlt: Final = _standard(
    "ExpertRowWiseAlt", "As `ExpertRowWise`, columns cut by sequence parallelism too.", EP, TP, (FSDP, SP)
)
UnifiedExpertColumnWise: Final = _standard(
    "UnifiedExpertColumnWise",
    "Experts' weights, all of them cut among all devices; columns by tensor parallelism.",
    (FSDP, SP, EP),
    EMPTY,
    TP,
)
UnifiedExpertRowWise: Final = _standard(
    "UnifiedExpertRowWise",
    "Experts' weights, all of them cut among all devices; rows by tensor parallelism.",
    (FSDP, SP, EP),
    TP,
    EMPTY,
)
ExpertActivations: Final = _standard("ExpertActivations", "[batch, length, experts, features].", DP, SP, EP, TP)
ExpertActivationsAlt: Final = _standard(
    "ExpertActivationsAlt", "[batch, length, features] of experts that were chosen.", DP, SP, (TP, FSDP)
)
ShardingAxes: TypeAlias = DynamicShardingAxes | type[DynamicShardingAxes]
