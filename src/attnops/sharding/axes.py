"""Semantic axes: names for the dimensions of a model's arrays, independent of any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from attnops.sharding.modes import RUNTIME_MODE_TYPES

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

# Kinds of parallelism, for arrays such as weights whose dimensions are sharded by kind.
DP: Final = "__DATA_PARALLEL__"
FSDP: Final = "__FULLY_SHARDED_DATA_PARALLEL__"
TP: Final = "__TENSOR_PARALLEL__"
EP: Final = "__EXPERT_PARALLEL__"
SP: Final = "__SEQUENCE_PARALLEL__"

EMPTY: Final = "_"  # a replicated dimension

# A dimension's axis; several where it is sharded over all of them, the first being the major one.
SemanticAxis: TypeAlias = str | Sequence[str] | None


class DynamicShardingAxes(NamedTuple):
    """The semantic axes of an array's dimensions, and the runtime mode whose rules apply.

    Attributes:
        axes: one per dimension; a sequence if a dimension has several, None or `EMPTY` if it has none.
        mode: a runtime mode; or the dimension that determines it: decode if its length is 1, else train.
    """

    axes: Sequence[SemanticAxis]
    mode: RUNTIME_MODE_TYPES | int


ShardingAxes: TypeAlias = DynamicShardingAxes | type[DynamicShardingAxes]
