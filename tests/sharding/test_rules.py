"""Semantic axes, the rules that map them to a mesh, and meshes."""

from __future__ import annotations

import logging
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnops import OperationMetadata
from attnops.sharding import (
    BATCH,
    HEAD,
    HEAD_DIM,
    INHERIT,
    KV_HEAD,
    KV_LENGTH,
    MODE_DECODE,
    MODE_PREFILL,
    QUERY_LENGTH,
    REPLICATE,
    AxisRules,
    create_mesh,
    current_mesh,
    get_names_from_partition_spec,
)
from attnops.sharding.axes import EMBED, EP, FSDP, KV_HEAD_DIM, SP, TP, DynamicShardingAxes

MESH = AbstractMesh((2, 2, 2), ("dp", "tp", "sp"))
Q, KV = (4, 8, 4, 16), (4, 8, 2, 16)


QUERIES = DynamicShardingAxes((BATCH, QUERY_LENGTH, HEAD, HEAD_DIM), 1)
KEYS = DynamicShardingAxes((BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM), 1)


def test_modes_follow_from_the_length() -> None:
    rules = AxisRules()
    assert rules.spec(QUERIES, Q) == P(("dp", "fsdp"), "sp", "tp", None)
    assert rules.spec(QUERIES, (4, 1, 4, 16)) == P(("dp", "fsdp"), None, "tp", None)
    assert rules.spec(QUERIES, mode="decode") == P(("dp", "fsdp"), None, "tp", None)
    assert rules.spec(DynamicShardingAxes(((FSDP, SP), TP), "train")) == P(("fsdp", "sp"), "tp")
    assert rules.spec(DynamicShardingAxes([BATCH, None, HEAD], MODE_PREFILL)) == P(("dp", "fsdp"), None, "tp")
    with pytest.raises(ValueError, match=r"depends on the length of dimension 1; give shape"):
        rules.spec(QUERIES)


def test_replicate_and_inherit_differ() -> None:
    inherits = AxisRules(decode={KV_LENGTH: INHERIT})
    replicates = AxisRules(decode={KV_LENGTH: REPLICATE})
    moves = AxisRules(decode={KV_LENGTH: ("sp", "tp"), HEAD: None})
    for rules, expected in ((inherits, "sp"), (replicates, None), (moves, ("sp", "tp"))):
        assert rules.mesh_axes(KV_LENGTH, MODE_DECODE) == expected
        assert rules.mesh_axes(KV_LENGTH, "insert") == expected
        assert rules.mesh_axes(KV_LENGTH) == rules.mesh_axes(KV_LENGTH, MODE_PREFILL) == "sp"
    assert hash(inherits) != hash(replicates)
    assert AxisRules(decode=[(KV_LENGTH, None)]) == replicates  # type: ignore[arg-type]


def test_a_mesh_axis_cuts_one_dimension() -> None:
    assert AxisRules(embed="tp").spec([BATCH, HEAD, EMBED]) == P(("dp", "fsdp"), "tp", None)
    assert AxisRules().spec([(EP, TP), HEAD]) == P(("ep", "tp"), None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AxisRules(batch=3), r"batch=3 must be the name of a mesh axis"),
        (lambda: AxisRules(batch=("dp", "dp")), r"a tuple of different ones"),
        (lambda: AxisRules(decode={"heads": "tp"}), r"'heads', which is not a semantic axis; use one of"),
        (lambda: AxisRules().mesh_axes("batch"), r"axis='batch' is not a semantic axis"),
        (lambda: AxisRules().mesh_axes(BATCH, "dekode"), r"mode='dekode' is not a runtime mode"),
    ],
)
def test_impossible_rules_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_a_correction_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "attnops.sharding"):
        assert AxisRules().spec(KEYS, (4, 8, 3, 16), MESH) == P("dp", "sp", None, None)
    assert "'tp' for a dimension of 3" in caplog.text


@pytest.mark.parametrize("layout", ["BTHD", "BHTD"])
def test_shardings_of_a_call(layout: str) -> None:
    metadata = OperationMetadata(mesh=MESH, layout=layout)
    shapes = [tuple(shape[i] for i in ((0, 1, 2, 3) if layout == "BTHD" else (0, 2, 1, 3))) for shape in (Q, KV)]
    found = metadata.get_shardings(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    middle = ("sp", "tp") if layout == "BTHD" else ("tp", "sp")
    assert found.query == found.key == found.output == P("dp", *middle, None)
    assert found.logsumexp == P("dp", "tp", "sp")
    # Queries and keys are both sharded over "sp"; an array of both can be so along one of them only.
    assert found.scores == P("dp", "tp", "sp", None)
    assert found.sinks == P("tp")
    assert (found.by_batch, found.by_query, found.by_key) == (P("dp"), P("dp", "sp"), P("dp", "sp"))
    assert found.fit(found.bias, jnp.ones((1, 4, 1, 8))) == P(None, "tp", None, None)
    assert found.named(found.sinks) == NamedSharding(MESH, P("tp"))


def test_shardings_of_one_query() -> None:
    query, key = jax.ShapeDtypeStruct((4, 1, 4, 16), jnp.float32), jax.ShapeDtypeStruct(KV, jnp.float32)
    found = OperationMetadata(mesh=MESH).get_shardings(query, key)
    assert (found.query, found.key) == (P("dp", None, "tp", None), P("dp", "sp", "tp", None))
    assert found.scores == P("dp", "tp", None, "sp")
    trained = OperationMetadata(mesh=MESH, axis_rules=AxisRules(query_length=None)).get_shardings(
        query, key, mode="train"
    )
    assert trained.query == P("dp", None, "tp", None)
    with pytest.raises(ValueError, match=r"query has shape \(4, 16\), but must have 4 dimensions"):
        OperationMetadata().get_shardings(jnp.ones((4, 16)), jnp.ones((4, 16)))
    nowhere = OperationMetadata().get_shardings(query, key)
    with pytest.raises(ValueError, match=r"there is no mesh"):
        nowhere.named(nowhere.sinks)


def test_the_mesh_that_is_set() -> None:
    assert current_mesh() is None
    mesh = create_mesh((1, -1), ("dp", "tp"))
    with jax.set_mesh(mesh):
        query = jnp.ones((4, 8, 8, 16))
        assert OperationMetadata().get_shardings(query, query).query == P("dp", None, "tp", None)


def test_create_mesh_fills_in_sizes_and_refuses_impossible_ones() -> None:
    n = len(jax.devices())
    assert create_mesh().shape == {"dp": 1, "fsdp": n, "tp": 1, "sp": 1}
    explicit = create_mesh((-1,), ("x",), "cpu", axis_types=[AxisType.Explicit])
    assert explicit.axis_types == (AxisType.Explicit,)
    assert create_mesh((1, 1), ("x", "y"), devices=jax.devices()[:1]).size == 1
    for dims, names, message in (
        ((1, 1), ("x",), "must have the same length"),
        ((-1, -1), ("x", "y"), "except for at most one −1"),
        ((0, -1), ("x", "y"), "must be positive"),
        ((n + 1, -1), ("x", "y"), f"must multiply to {n}, the number of devices"),
        ((n + 1,), ("x",), f"must multiply to {n}, the number of devices"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            create_mesh(dims, names)


def test_names_come_in_order_and_once() -> None:
    specs = {"q": P(("dp", "fsdp"), None, "tp"), "k": [P("sp"), P("fsdp")], "none": None}
    assert get_names_from_partition_spec(specs) == ["dp", "fsdp", "tp", "sp"]
    assert get_names_from_partition_spec(P()) == []
