"""The names of eformer and EasyDeL."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from attnops.sharding import AxisRules, create_mesh
from attnops.sharding.axes import EMPTY, EP, FSDP, SP, TP, DynamicShardingAxes
from attnops_adapters import eformer
from attnops_adapters.eformer import AttnQSharding, ColumnWise, get_ranks_and_size, names_in_mesh

NAMES = """
    Array AttnKVSharding AttnQSharding AxisIdxes AxisNames AxisType BATCH BIAS_HEAD_SEQ BIAS_KV_SEQ ColumnWise
    DEFAULT_MASK_VALUE DType DynamicShardingAxes EMBED EMPTY_VAL EXPERT EXPERT_GATE ExpertActivations
    ExpertActivationsAlt ExpertColumnWise ExpertColumnWiseAlt ExpertRowWise ExpertRowWiseAlt GENERATION_MODES
    HiddenStateSharding KV_HEAD KV_HEAD_DIM KV_LENGTH LENGTH MLP_INTERMEDIATE MODE_DECODE MODE_INSERT MODE_PREFILL
    MODE_TRAIN Mesh PRNGKey QUERY_LENGTH RUNTIME_MODE_TYPES Replicated RowWise SColumnWise SRowWise Shape
    UnifiedExpertColumnWise UnifiedExpertRowWise VOCAB
"""


def test_every_name_that_models_use_is_there() -> None:
    wanted = {*NAMES.split(), "create_stable_sharding", "names_in_mesh", "get_ranks_and_size"}
    assert wanted <= {*eformer.__all__}
    assert [name for name in eformer.__all__ if not hasattr(eformer, name)] == []
    assert issubclass(AttnQSharding, DynamicShardingAxes)
    assert list(eformer.UnifiedExpertRowWise.axes) == [(FSDP, SP, EP), TP, EMPTY]
    assert np.isfinite(np.float32(eformer.DEFAULT_MASK_VALUE))


def test_standard_axes_have_specs() -> None:
    rules, query = AxisRules(), (4, 8, 4, 16)
    assert rules.spec(AttnQSharding, query) == P(("dp", "fsdp"), "sp", "tp", None)
    assert rules.spec(AttnQSharding, (4, 1, 4, 16)) == P(("dp", "fsdp"), None, "tp", None)
    assert rules.spec(ColumnWise) == P(("fsdp", "sp"), "tp")


def test_names_in_the_mesh_that_is_set() -> None:
    assert not names_in_mesh("dp")
    with jax.set_mesh(create_mesh((1, -1), ("dp", "tp"))):
        assert names_in_mesh("tp", "dp")
        assert not names_in_mesh("tp", "sp")


def test_ranks_and_size_are_those_of_this_process() -> None:
    found = get_ranks_and_size(create_mesh((-1,), ("dp",)))
    assert {name: found[name] for name in found if name != "mesh"} == {
        "mp_node_size": 1, "dp_node_size": 1, "dp_node_rank": 0, "mp_node_rank": 0
    }  # fmt: skip
    assert get_ranks_and_size(create_mesh())["mesh"] == create_mesh()
