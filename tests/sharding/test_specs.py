"""Runtime modes and stable partition specs."""

import logging

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from attnops import OperationMetadata, OperationRegistry
from attnops.sharding import (
    GENERATION_MODES,
    MODE_DECODE,
    MODE_INSERT,
    MODE_PREFILL,
    MODE_TRAIN,
    canonicalize_mode,
    correct_spec,
    create_stable_sharding,
)

MESH = AbstractMesh((2, 4, 3), ("dp", "tp", "sp"))


def test_modes_have_their_names_and_aliases():
    assert (MODE_DECODE, MODE_PREFILL) == ("__autoregressive__", "__prefill__")
    assert (MODE_TRAIN, MODE_INSERT) == ("__train__", "__insert__")
    assert {"__autoregressive__", "__insert__"} == GENERATION_MODES
    assert canonicalize_mode("decode") == canonicalize_mode(MODE_DECODE) == MODE_DECODE


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (P("dp", None, "tp"), (4, 5, 8), P("dp", None, "tp")),
        (P("fsdp", "tp"), (4, 8), P(None, "tp")),  # an axis that the mesh has not
        (P("tp"), (6,), P(None)),  # 4 does not divide 6
        (P(("dp", "tp")), (8,), P(("dp", "tp"))),
        (P(("dp", "tp")), (6,), P("dp")),  # the longest prefix that divides
        (P(("fsdp", "dp")), (6,), P("dp")),
        (P(), (3, 3), P()),
    ],
)
def test_axes_that_are_absent_or_do_not_divide_are_dropped(spec, shape, expected):
    assert correct_spec(spec, shape, MESH) == expected


def test_a_correction_is_said(caplog):
    with caplog.at_level(logging.DEBUG, "attnops.sharding"):
        correct_spec(P("dp"), (4,), MESH)
        assert not caplog.records
        correct_spec(P("fsdp"), (4,), MESH)
    assert "spec entry 'fsdp' for a dimension of 4" in caplog.text


def test_a_spec_longer_than_the_shape():
    with pytest.raises(ValueError, match=r"has 2 entries, but the array of shape \(4,\) has 1 dimensions"):
        correct_spec(P("dp", "tp"), (4,), MESH)


def test_create_stable_sharding():
    spec = P("dp", "sp", "tp", None)
    assert create_stable_sharding(spec) == spec
    assert create_stable_sharding(spec, [0, 2]) == P("dp", None, "tp", None)
    assert create_stable_sharding(spec, [0, 2], clone_ps=P("x", "y", "z")) == P("x", None, "z", None)
    assert create_stable_sharding(spec, [0], dep=None) is None
    assert create_stable_sharding(None, [0]) is None
    with pytest.raises(ValueError, match="7 is out of the range"):
        create_stable_sharding(spec, [7])
    tensor = jax.ShapeDtypeStruct((3, 6, 8, 1), jnp.float32)
    assert create_stable_sharding(spec, [0, 2], tensor=tensor, mesh=MESH) == P(None, None, "tp", None)


@pytest.mark.slow
def test_as_a_method_the_mesh_is_the_metadatas():
    mesh = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    operation = OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh))
    tensor = jnp.ones((4, 4))
    assert operation.create_stable_sharding(P("dp", "tp"), tensor=tensor) == P("dp", None)
    assert operation.create_stable_sharding(P("dp", "tp"), [1]) == P(None, "tp")
