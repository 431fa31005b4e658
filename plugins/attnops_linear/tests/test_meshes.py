"""Rows and heads sharded over devices: by XLA, and by the types of arrays."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnops import OperationMetadata
from attnops.masks import Segments
from attnops.sharding import AxisRules
from attnops_linear import CausalConv1d, LinearAttention, reference
from attnops_linear.testing import documents, padding, problem


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("K", [2, 1])
def test_each_device_computes_its_rows_and_heads(kind: AxisType, K: int) -> None:
    (query, key, value), options = problem(40, K=K, decay="channel" if K == 2 else "constant")(np.random.default_rng(0))
    arrays = {"query": query, "key": key, "value": value, **options}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}

    def run(arrays: dict[str, Any]) -> Any:
        def loss(arrays: dict[str, Any]) -> Any:
            output = LinearAttention()(**arrays, mask=documents(2, 40), return_state=True)
            return (output.attention_outputs**2).sum() + (output.state**2).sum(), output

        return jax.value_and_grad(loss, has_aux=True)(arrays)

    expected = jax.jit(run)(arrays)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind, kind))

    def place(name: str, x: jax.Array) -> jax.Array:
        heads = "tp" if x.shape[1 if name == "initial_state" else -1 if x.ndim == 1 else 2] > 1 else None
        spec = P("tp") if x.ndim == 1 else P("dp", heads) if name == "initial_state" else P("dp", None, heads)
        return jax.device_put(x, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        program = jax.jit(run).lower({name: place(name, x) for name, x in arrays.items()}).compile()
        found = program({name: place(name, x) for name, x in arrays.items()})
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=2e-4), found, expected)
    if K == 2:
        assert "all-gather" not in program.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_convolution_on_a_mesh(kind: AxisType) -> None:
    rng = np.random.default_rng(0)
    x, weight, state = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 20, 4), (4, 3), (2, 2, 4)))

    def run(x: jax.Array, weight: jax.Array, state: jax.Array) -> Any:
        return CausalConv1d()(x, weight, state=state, mask=documents(2, 20), return_state=True)

    expected = jax.jit(run)(x, weight, state)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(y, NamedSharding(mesh, spec))
            for y, spec in ((x, P("dp", None, "tp")), (weight, P("tp")), (state, P("dp", None, "tp")))
        )
        found = jax.jit(run)(*placed)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), tuple(found), tuple(expected))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_without_a_state_in_shard_map_and_by_types(kind: AxisType) -> None:
    (query, key, value), options = problem(20, decay="channel", state=False)(np.random.default_rng(0))
    arrays = {"query": query, "key": key, "value": value, **options}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}

    def run(arrays: dict[str, Any]) -> Any:
        return LinearAttention()(**arrays).attention_outputs

    expected = jax.jit(run)(arrays)
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, NamedSharding(mesh, P("dp"))) for name, x in arrays.items()}
        call = run if kind is AxisType.Explicit else jax.shard_map(run, in_specs=P("dp"), out_specs=P("dp"))
        found = jax.jit(call)(placed)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("delta rule", {}),
        ("delta rule by channel, documents", {"decay": "channel", "mask": documents}),
        ("sums", {"beta": False, "mask": lambda B, T: documents(B, T) & padding(B, T)}),
        ("constant decays, without a state", {"decay": "constant", "beta": False, "state": False}),
        ("sums by channel, resets", {"decay": "channel", "beta": False, "decays": (0.0, -1e4, -np.inf), "scale": 0.3}),
    ],
)
def test_a_sequence_over_devices_is_one_all_gather(kind: AxisType, name: str, options: dict[str, Any]) -> None:
    T = 88  # 22 tokens a device; documents end at other tokens
    draw = problem(T, K=1, H=2, D=8, Dv=12, **options)
    (query, key, value), options = draw(np.random.default_rng(0))
    mask = options.pop("mask", None)
    scale = {"scale": options.pop("scale")} if "scale" in options else {}
    arrays = {"query": query, "key": key, "value": value, **options}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}

    def run(arrays: dict[str, Any]) -> Any:
        output = LinearAttention()(**arrays, **scale, mask=mask, return_state=True)
        return output.attention_outputs, output.state

    def gradients(arrays: dict[str, Any]) -> Any:
        def loss(arrays: dict[str, Any]) -> Any:
            outputs, state = run(arrays)
            return jnp.sin(outputs).sum() + jnp.sin(state).sum()

        return jax.grad(loss)(arrays)

    with jax.enable_x64(True):
        exact = {name: jnp.asarray(x, jnp.float64) for name, x in arrays.items()}
        expected = jax.tree.map(np.asarray, jax.jit(lambda x: reference(**x, **scale, mask=mask))(exact))
        slopes = jax.jit(jax.grad(lambda x: sum(jnp.sin(y).sum() for y in reference(**x, **scale, mask=mask))))(exact)
        slopes = jax.tree.map(np.asarray, slopes)
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(kind, kind))

    def place(name: str, x: jax.Array) -> jax.Array:
        spec = P() if x.ndim == 1 else P("dp") if name == "initial_state" else P("dp", "sp")
        return jax.device_put(x, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        placed = {name: place(name, x) for name, x in arrays.items()}
        program = jax.jit(run).lower(placed).compile()
        found, found_slopes = program(placed), jax.jit(gradients)(placed)
    text = program.as_text()
    assert len(re.findall(r"= [^=]*all-gather(?:-start)?\(", text)) == 1, text
    assert not re.search(r"(collective-permute|all-to-all|all-reduce|reduce-scatter)(-start)?\(", text), text
    assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "sp")), 4)
    for x, y in zip(jax.tree.leaves((found, found_slopes)), jax.tree.leaves((expected, slopes)), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * np.abs(y).max())
    if mask is None:
        return
    # A document with NaN spoils none of the others, on no device.
    ids, real = documents(2, T).q_ids, np.flatnonzero(padding(2, T).is_token.all(axis=0))
    for token in real[[len(real) // 3, -1]]:
        others = ids != ids[:, token : token + 1]
        spoiled = placed | {"key": place("key", arrays["key"].at[:, token].set(jnp.nan))}
        with jax.set_mesh(mesh):
            (outputs, state), slopes_of_nan = program(spoiled), jax.jit(gradients)(spoiled)
        np.testing.assert_array_equal(np.asarray(outputs)[others], np.asarray(found[0])[others])
        assert np.isnan(np.asarray(outputs)[:, token]).all()
        last = others[:, -1]
        np.testing.assert_array_equal(np.asarray(state)[last], np.asarray(found[1])[last])
        assert np.isnan(np.asarray(state)[~last]).all()
        for x, y in zip(slopes_of_nan.values(), found_slopes.values(), strict=True):
            if x.ndim > 1 and x.shape[1] == T:
                np.testing.assert_allclose(np.asarray(x)[others], np.asarray(y)[others], atol=1e-5)


@pytest.mark.slow
def test_documents_whose_ids_are_sharded_cross_devices() -> None:
    (query, key, value), options = problem(88, B=1, D=8, Dv=8)(np.random.default_rng(0))
    arrays = {"query": query, "key": key, "value": value, **options}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    ids = jnp.asarray(documents(1, 88).q_ids)

    def run(arrays: dict[str, Any], ids: Any) -> Any:
        return LinearAttention()(**arrays, mask=Segments(ids)).attention_outputs

    expected = jax.jit(run)(arrays, ids)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("sp",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            by_token = NamedSharding(mesh, P(None, "sp"))
            placed = {name: jax.device_put(x, by_token) for name, x in arrays.items() if x.shape[1] == 88}
            placed["initial_state"] = jax.device_put(arrays["initial_state"], NamedSharding(mesh, P()))
            found = jax.jit(run)(placed, jax.device_put(ids, by_token))
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_the_metadatas_mesh_and_rules_shard_the_sequence() -> None:
    (query, key, value), _ = problem(40, B=1, D=8, Dv=8)(np.random.default_rng(0))
    arrays = [jnp.asarray(x, jnp.float32) for x in (query, key, value)]
    expected = jax.jit(LinearAttention())(*arrays).attention_outputs
    mesh = jax.make_mesh((4,), ("tokens",), axis_types=(AxisType.Auto,))
    metadata = OperationMetadata(mesh=mesh, axis_rules=AxisRules(query_length="tokens"), on_unsupported="error")
    program = jax.jit(LinearAttention(metadata)).lower(*arrays).compile()
    assert "all-gather" in program.as_text()
    np.testing.assert_allclose(jax.jit(LinearAttention(metadata))(*arrays).attention_outputs, expected, atol=1e-5)
    # 40 tokens are not a multiple of 3: every device computes all.
    other = jax.make_mesh((3,), ("tokens",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    found = jax.jit(LinearAttention(metadata.replace(mesh=other)))(*arrays).attention_outputs
    np.testing.assert_allclose(found, expected, atol=1e-5)
    with (
        jax.set_mesh(other),
        pytest.raises(ValueError, match=re.escape("metadata.mesh has the axes {'tokens': 4}, but")),
    ):
        LinearAttention(metadata)(*arrays)
