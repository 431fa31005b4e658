"""The names of eformer's ``common_types`` and of EasyDeL's ``flax_modelling_utils``, for models written with them.

`AxisType` here is a mesh axis, several of them, or none; it is not `jax.sharding.AxisType`.
"""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import jax
from jax.sharding import Mesh

from attnops.sharding import (
    GENERATION_MODES,
    MODE_DECODE,
    MODE_INSERT,
    MODE_PREFILL,
    MODE_TRAIN,
    RUNTIME_MODE_TYPES,
    create_stable_sharding,
    current_mesh,
    get_names_from_partition_spec,
)
from attnops.sharding.axes import (
    BATCH,
    BIAS_HEAD_SEQ,
    BIAS_KV_SEQ,
    DP,
    EMBED,
    EMPTY,
    EP,
    EXPERT,
    EXPERT_GATE,
    FSDP,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    LENGTH,
    MLP_INTERMEDIATE,
    QUERY_LENGTH,
    SP,
    TP,
    VOCAB,
    DynamicShardingAxes,
    SemanticAxis,
)

__all__ = [
    "BATCH", "BIAS_HEAD_SEQ", "BIAS_KV_SEQ", "DEFAULT_MASK_VALUE", "DP", "EMBED", "EMPTY", "EMPTY_VAL", "EP",
    "EXPERT", "EXPERT_GATE", "FSDP", "GENERATION_MODES", "HEAD", "HEAD_DIM", "KV_HEAD", "KV_HEAD_DIM", "KV_LENGTH",
    "LENGTH", "MLP_INTERMEDIATE", "MODE_DECODE", "MODE_INSERT", "MODE_PREFILL", "MODE_TRAIN", "QUERY_LENGTH",
    "RUNTIME_MODE_TYPES", "SP", "TP", "VOCAB", "Array", "AttnKVSharding", "AttnQSharding", "AxisIdxes", "AxisNames",
    "AxisType", "ColumnWise", "DType", "DynamicShardingAxes", "ExpertActivations", "ExpertActivationsAlt",
    "ExpertColumnWise", "ExpertColumnWiseAlt", "ExpertRowWise", "ExpertRowWiseAlt", "HiddenStateSharding", "Mesh",
    "PRNGKey", "Replicated", "RowWise", "SColumnWise", "SRowWise", "Shape", "UnifiedExpertColumnWise",
    "UnifiedExpertRowWise", "create_stable_sharding", "current_mesh", "get_names_from_partition_spec",
    "get_ranks_and_size", "names_in_mesh",
]  # fmt: skip

Array: TypeAlias = jax.Array
PRNGKey: TypeAlias = jax.Array
DType: TypeAlias = Any
Shape: TypeAlias = Sequence[int]
AxisNames: TypeAlias = tuple[str, ...]
AxisIdxes: TypeAlias = tuple[int, ...]
AxisType: TypeAlias = tuple[str, ...] | str | None

EMPTY_VAL: Final = types.new_class("EMPTY_VAL")()  # the default of a parameter that was not given
DEFAULT_MASK_VALUE: Final = -2.381976426469702e38  # 0.7 times the lowest float32


def _standard(
    name: str, what: str, *axes: SemanticAxis, mode: RUNTIME_MODE_TYPES | int = MODE_TRAIN
) -> type[DynamicShardingAxes]:
    """A class of `DynamicShardingAxes` with fixed axes; functions of `attnops.sharding` accept the class itself."""
    return type(name, (DynamicShardingAxes,), {"__doc__": what, "__module__": __name__, "axes": axes, "mode": mode})


HiddenStateSharding: Final = _standard(
    "HiddenStateSharding", "[batch, length, features].", BATCH, QUERY_LENGTH, EMBED, mode=1
)
AttnQSharding: Final = _standard("AttnQSharding", "Queries, [B, T, H, D].", BATCH, QUERY_LENGTH, HEAD, HEAD_DIM, mode=1)
AttnKVSharding: Final = _standard(
    "AttnKVSharding", "Keys or values, [B, S, K, D].", BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM, mode=1
)
RowWise: Final = _standard(
    "RowWise", "A weight [in, out] sharded along in: products are summed over devices.", TP, (FSDP, SP)
)
ColumnWise: Final = _standard("ColumnWise", "A weight [in, out] sharded along out.", (FSDP, SP), TP)
SRowWise: Final = _standard("SRowWise", "A vector that belongs to a `RowWise` weight.", TP)
SColumnWise: Final = _standard("SColumnWise", "A vector that belongs to a `ColumnWise` weight.", (FSDP, SP))
Replicated: Final = _standard("Replicated", "Replicated on all devices.", EMPTY)
ExpertColumnWise: Final = _standard(
    "ExpertColumnWise", "Experts' weights [experts, in, out], sharded along out by TP.", EP, FSDP, TP
)
ExpertRowWise: Final = _standard(
    "ExpertRowWise", "Experts' weights [experts, in, out], sharded along in by TP.", EP, TP, FSDP
)
ExpertColumnWiseAlt: Final = _standard(
    "ExpertColumnWiseAlt", "Like `ExpertColumnWise`, with in sharded by sequence parallelism too.", EP, (FSDP, SP), TP
)
ExpertRowWiseAlt: Final = _standard(
    "ExpertRowWiseAlt", "Like `ExpertRowWise`, with out sharded by sequence parallelism too.", EP, TP, (FSDP, SP)
)
UnifiedExpertColumnWise: Final = _standard(
    "UnifiedExpertColumnWise",
    "Experts' weights [experts, in, out], experts sharded over all devices, out by tensor parallelism.",
    (FSDP, SP, EP),
    EMPTY,
    TP,
)
UnifiedExpertRowWise: Final = _standard(
    "UnifiedExpertRowWise",
    "Experts' weights [experts, in, out], experts sharded over all devices, in by tensor parallelism.",
    (FSDP, SP, EP),
    TP,
    EMPTY,
)
ExpertActivations: Final = _standard("ExpertActivations", "[batch, length, experts, features].", DP, SP, EP, TP)
ExpertActivationsAlt: Final = _standard(
    "ExpertActivationsAlt", "[batch, length, features] after routing to experts.", DP, SP, (TP, FSDP)
)


def names_in_mesh(*names: str) -> bool:
    """Whether the current mesh has axes of all these names; False without a current mesh."""
    mesh = current_mesh()
    return mesh is not None and set(names) <= set(mesh.axis_names)


def get_ranks_and_size(mesh: Mesh) -> dict[str, Any]:
    """How a mesh is divided among the processes of `jax.distributed`.

    Args:
        mesh: its axes "tp" and "sp", if any, are the model-parallel ones.

    Returns:
        ``mesh``; ``mp_node_size``, the number of processes of one copy of the model; ``dp_node_size``, the
        number of copies, at least 1; ``dp_node_rank`` and ``mp_node_rank``, this process's index in each.
    """
    model = math.prod(mesh.shape.get(name, 1) for name in ("tp", "sp"))
    mp_node_size = max(1, model // jax.local_device_count())
    rank = jax.process_index()
    return {
        "mesh": mesh,
        "mp_node_size": mp_node_size,
        "dp_node_size": max(1, jax.process_count() // mp_node_size),
        "dp_node_rank": rank // mp_node_size,
        "mp_node_rank": rank % mp_node_size,
    }
