"""Meshes whose axes types name, and arrays that lie elsewhere: calls give what the oracle does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Segments
from attnops_testing import attention, attention_gradients

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
B, T, H, D = 2, 8, 2, 8
RNG = np.random.default_rng(0)
QKV = [RNG.normal(size=(B, T, heads, D)).astype(np.float32) for heads in (H, 1, 1)]
COTANGENT = RNG.normal(size=(B, T, H, D)).astype(np.float32)
CAUSAL = np.tril(np.ones((1, 1, T, T), bool))
FIELDS = ("query", "key", "value")


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], *kinds: AxisType, first: int = 0) -> Mesh:
    devices = jax.devices()[first : first + math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=kinds or (EXPLICIT,) * len(names), devices=devices)


# Meshes with nothing to cut, or with axes that the rules don't know, and how the arrays lie on them.
CASES: dict[str, tuple[Mesh, P | None]] = {
    "one device": (mesh_of((1, 1, 1), ("dp", "tp", "sp")), None),
    "unknown axes": (mesh_of((2, 2), ("x", "y")), P("x", None, None, "y")),
    "batch and heads": (mesh_of((2, 2), ("dp", "tp")), None),
    "a sequence": (mesh_of((2, 2), ("dp", "tp")), P(None, "dp", None, "tp")),
    "explicit, auto": (mesh_of((2, 2), ("dp", "tp"), EXPLICIT, AUTO), P("dp")),
    "auto, explicit": (mesh_of((2, 2), ("dp", "tp"), AUTO, EXPLICIT), P(None, "tp")),
    "auto": (mesh_of((2, 2), ("dp", "tp"), AUTO, AUTO), P(None, "tp", None, "dp")),
    "another device": (mesh_of((1,), ("dp",), AUTO, first=3), None),
}
NAMES = ("attnops:vanilla", "attnops:flash", "sdpa")


def placed(mesh: Mesh, spec: P | None) -> list[jax.Array]:
    """Query, key and value as ``spec`` says, or as the rules do."""
    found = OperationMetadata(mesh=mesh).get_shardings(*QKV[:2])
    specs = (found.query, found.key, found.value) if spec is None else (spec,) * 3
    return [jax.device_put(x, NamedSharding(mesh, one)) for x, one in zip(QKV, specs, strict=True)]


def close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=5e-6, rtol=1e-5), found, expected)


def causal(name: str, mesh: Mesh | None = None, **fields: Any) -> Callable[..., Any]:
    operation = OperationRegistry.create(name, OperationMetadata(mesh=mesh, **fields))
    return lambda *qkv: operation(*qkv, mask=Causal()).attention_outputs


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """The output and the gradients of query, key and value, compiled."""

    def loss(*qkv: Any) -> Any:
        out = function(*qkv)
        return (out * COTANGENT).sum(), out

    return jax.jit(lambda *qkv: jax.grad(loss, (0, 1, 2), has_aux=True)(*qkv))


def check(found: Any) -> None:
    """Gradients and output are the oracle's."""
    expected = attention_gradients(*QKV, d_out=COTANGENT, mask=CAUSAL).values
    close(found, (tuple(expected[name] for name in FIELDS), attention(*QKV, mask=CAUSAL).out))


def some(quick: set[Any], given: Any) -> list[Any]:
    """Parameters; but for ``quick``, for slow runs."""
    return [pytest.param(*x, marks=[] if x[0] in quick else pytest.mark.slow) for x in given]


FEW = {"one device", "unknown axes"}


@pytest.mark.filterwarnings("ignore:.*is not sharded:attnops.errors.UnsupportedWarning")
@pytest.mark.parametrize(
    ("case", "name"),
    [*some({*CASES}, ((case, "attnops:flash") for case in CASES)),
     *some(FEW, ((case, name) for case in CASES for name in ("attnops:vanilla", "sdpa")))],
)  # fmt: skip
@pytest.mark.tier(every=3, quick=["one device-attnops:vanilla", "one device-sdpa"])
def test_the_metadatas_mesh(case: str, name: str) -> None:
    mesh, spec = CASES[case]
    check(with_gradients(causal(name, mesh))(*placed(mesh, spec)))


@pytest.mark.filterwarnings("ignore:.*is not sharded:attnops.errors.UnsupportedWarning")
@pytest.mark.parametrize("case", some(FEW | {"explicit, auto"}, ((case,) for case in CASES)))
def test_a_mesh_that_is_set(case: str) -> None:
    mesh, spec = CASES[case]
    arrays = placed(mesh, spec)
    with jax.set_mesh(mesh):
        check(with_gradients(causal("attnops:flash"))(*arrays))


@pytest.mark.parametrize("case", ["one device", "unknown axes", "a sequence"])
def test_the_mesh_that_types_name(case: str) -> None:
    check(with_gradients(causal("attnops:flash"))(*placed(*CASES[case])))


@pytest.mark.parametrize("case", some({"one device", "auto"}, ((case,) for case in CASES)))
@pytest.mark.slow
@pytest.mark.tier(every=2)
def test_without_jit(case: str) -> None:
    """Arrays of the mesh, and those of one device, move by themselves; under `jax.vmap` and `jax.vjp` too."""
    mesh, spec = CASES[case]
    of, expected = causal("attnops:vanilla", mesh), attention(*QKV, mask=CAUSAL).out
    for arrays in (placed(mesh, spec), [jax.device_put(x, jax.devices()[5]) for x in QKV]):
        close(of(*arrays), expected)
        close(jax.vjp(of, *arrays)[0], expected)
        mapped = [jnp.stack([x, x]) for x in arrays]
        close(jax.vmap(of)(*mapped), np.stack([expected, expected]))


@pytest.mark.slow
def test_gradients_without_jit_of_arrays_that_lie_otherwise() -> None:
    mesh, spec = CASES["auto"]
    of = causal("attnops:flash", mesh)
    for arrays in (placed(mesh, spec), [jax.device_put(x, jax.devices()[5]) for x in QKV]):
        out, pull_back = jax.vjp(of, *arrays)
        check((pull_back(jnp.asarray(COTANGENT)), out))


def test_a_mesh_of_one_device_is_where_a_call_runs() -> None:
    mesh, _ = CASES["another device"]
    assert causal("attnops:flash", mesh)(*QKV).devices() == {jax.devices()[3]}
    assert jax.jit(causal("attnops:flash", mesh))(*QKV).devices() == {jax.devices()[3]}


@pytest.mark.parametrize(
    ("shape", "names"), [((1, 1, 1), ("dp", "tp", "sp")), ((2, 2), ("dp", "sp")), ((2, 2), ("dp", "tp"))]
)
@pytest.mark.filterwarnings("ignore:.*exchanges no keys:attnops.errors.UnsupportedWarning")
def test_masks_biases_and_sinks_with_types(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """And results have the types that `get_shardings` states."""
    mesh = mesh_of(shape, names)
    metadata = OperationMetadata(mesh=mesh)
    specs = metadata.get_shardings(*QKV[:2])
    ids, bias, sinks = (np.arange(T) // 3)[None].repeat(B, 0), RNG.normal(size=(1, H, T, T)), np.array([0.5, -1.0])

    def put(x: Any, spec: P, dtype: Any = np.float32) -> jax.Array:
        return jax.device_put(x.astype(dtype), specs.named(specs.fit(spec, x)))

    mask = Segments(put(ids, specs.by_query, np.int32), put(ids, specs.by_key, np.int32)) & Causal()
    operation = OperationRegistry.create("attnops:vanilla", metadata)
    options = {"mask": mask, "bias": put(bias, specs.bias), "sinks": put(sinks, specs.sinks)}

    @jax.jit
    def run(qkv: Any, options: Any) -> Any:
        return operation(*qkv, **options, return_lse=True, return_weights=True, return_max_logits=True)

    found = run(placed(mesh, None), options)
    seen = CAUSAL & (ids[:, None, :, None] == ids[:, None, None, :])
    expected = attention(*QKV, mask=seen, bias=bias.astype(np.float32), sinks=sinks.astype(np.float32))
    close(
        (found.attention_outputs, found.attention_weights, found.logsumexp, found.max_logits),
        (expected.out, expected.weights, expected.logsumexp, expected.max_logits),
    )
    fields = {
        "attention_outputs": "output", "attention_weights": "weights", "logsumexp": "logsumexp",
        "max_logits": "logsumexp",
    }  # fmt: skip
    for field, name in fields.items():
        assert jax.typeof(getattr(found, field)).sharding.spec == getattr(specs, name)


@pytest.mark.slow
def test_dropout_with_a_key_that_has_a_type() -> None:
    mesh = CASES["batch and heads"][0]
    key = jax.random.key(3)
    here, there = (
        OperationRegistry.create("attnops:flash", OperationMetadata(mesh=on, dropout_prob=0.5))(*QKV, dropout_key=given)
        for on, given in ((None, key), (mesh, jax.device_put(key, NamedSharding(mesh, P()))))
    )
    close(there.attention_outputs, here.attention_outputs)


def test_an_array_that_alone_has_a_type() -> None:
    mesh = CASES["batch and heads"][0]
    bias = jax.device_put(np.zeros((B, 1, T, T), np.float32), NamedSharding(mesh, P("dp")))
    out = OperationRegistry.create("attnops:flash")(*QKV, mask=Causal(), bias=bias).attention_outputs
    close(out, attention(*QKV, mask=CAUSAL).out)


@pytest.mark.parametrize("axis", ["dp", "tp", "x"])
@pytest.mark.slow
def test_what_vmap_maps_may_be_cut(axis: str) -> None:
    """A mesh axis that cuts the mapped dimension cuts no other."""
    mesh = mesh_of((2, 2), ("x", "y") if axis == "x" else ("dp", "tp"))
    arrays = [jax.device_put(np.stack([x, x]), NamedSharding(mesh, P(axis))) for x in QKV]
    expected = attention(*QKV, mask=CAUSAL).out
    with jax.set_mesh(mesh):
        for name in NAMES[:2]:
            found = jax.jit(jax.vmap(causal(name)))(*arrays)
            close(found, np.stack([expected, expected]))
            assert jax.typeof(found).sharding.spec[0] == axis


@pytest.mark.parametrize("sizes", [(2, 32, 2, 2), (1, 40, 4, 2), (3, 300, 4, 2)])
@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.slow
def test_what_vmap_maps_may_be_cut_in_derivatives_too(name: str, sizes: tuple[int, int, int, int]) -> None:
    """By the only axis of a mesh, and in every shape: how rows, heads and tiles are split and joined depends on it."""
    batch, length, heads, kv_heads = sizes
    rng = np.random.default_rng(0)
    shapes = [(batch, length, n, 8) for n in (heads, kv_heads, kv_heads, heads)]
    *qkv, d_out = (rng.normal(size=(2, *shape)).astype(np.float32) for shape in shapes)
    bias = rng.normal(size=(2, 1, heads, length, length)).astype(np.float32)
    mask = np.tril(np.ones((1, 1, length, length), bool))

    def both(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, d: jax.Array) -> Any:
        operation = OperationRegistry.create(name)

        def loss(*x: jax.Array) -> Any:
            out = operation(*x[:3], mask=Causal(), bias=x[3]).attention_outputs
            return (out * d).sum(), out

        gradients, out = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, bias)
        return out, *gradients

    mesh = mesh_of((2,), ("dp",))
    arrays = [jax.device_put(x, NamedSharding(mesh, P("dp"))) for x in (*qkv, bias, d_out)]
    with jax.set_mesh(mesh):
        found = [np.asarray(x) for x in jax.jit(jax.vmap(both))(*arrays)]
    for i, (*one, extra, d) in enumerate(zip(*qkv, bias, d_out, strict=True)):
        expected = attention_gradients(*one, d_out=d, mask=mask, bias=extra).values
        np.testing.assert_allclose(found[0][i], attention(*one, mask=mask, bias=extra).out, atol=5e-6)
        for x, of in zip(found[1:], (*FIELDS, "bias"), strict=True):
            np.testing.assert_allclose(x[i], expected[of], atol=5e-5, err_msg=of)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("attnops:vanilla", (EXPLICIT, EXPLICIT)), ("sdpa", (AUTO, AUTO)),
     *(pytest.param(name, kinds, marks=pytest.mark.slow) for name in ("attnops:flash", "sdpa")
       for kinds in ((EXPLICIT, EXPLICIT), (AUTO, EXPLICIT)))],
)  # fmt: skip
def test_gradients_inside_a_shard_map_of_some_axes(kinds: tuple[AxisType, ...], name: str) -> None:
    mesh = mesh_of((2, 2), ("dp", "tp"), *kinds)
    names = ("dp" if kinds[0] == EXPLICIT else None, None, "tp" if kinds[1] == EXPLICIT else None)
    arrays = [jax.device_put(x, NamedSharding(mesh, P(*names[: 3 if x.shape[2] > 1 else 1]))) for x in QKV]
    with jax.set_mesh(mesh):
        part = jax.shard_map(causal(name), in_specs=(P("dp"),) * 3, out_specs=P("dp"), axis_names={"dp"})
        check(with_gradients(part)(*arrays))


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "heads"), some({"dp"}, [("dp", "tp"), ("x", "y")]))
def test_layers_in_a_scan_with_checkpoints(batch: str, heads: str) -> None:
    """What a layer gives has the type of what it takes."""
    of = causal("attnops:flash")
    x, weights = RNG.normal(size=(B, T, 16)) * 0.3, RNG.normal(size=(2, 16, H, D)) * 0.2
    x, weights = x.astype(np.float32), weights.astype(np.float32)

    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        heads = jnp.einsum("bte,ehd->bthd", x, w)
        where = jax.typeof(x).sharding
        out = jnp.einsum("bthd,ehd->bte", of(heads, heads, heads), w, out_sharding=None if where.mesh.empty else where)
        return x + out, None

    @jax.jit
    def model(x: Any, weights: Any) -> Any:
        return jax.grad(lambda *x: jnp.sin(jax.lax.scan(layer, *x)[0]).sum(), (0, 1))(x, weights)

    expected = model(x, weights)
    mesh = mesh_of((2, 2), (batch, heads))
    with jax.set_mesh(mesh):
        found = model(jax.device_put(x, P(batch)), jax.device_put(weights, P(None, None, heads)))
    close(found, expected)


@pytest.mark.slow
def test_another_mesh_than_the_one_that_is_set_is_refused() -> None:
    mesh, other = mesh_of((2, 2), ("dp", "tp"), AUTO, AUTO), mesh_of((4,), ("dp",), AUTO)
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"metadata.mesh has the axes \{'dp': 4\}.*set an equal one"),
    ):
        causal("attnops:flash", other)(*QKV)
    with jax.set_mesh(mesh):
        close(causal("attnops:flash", mesh)(*QKV), attention(*QKV, mask=CAUSAL).out)
