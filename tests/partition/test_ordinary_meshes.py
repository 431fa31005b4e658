import warnings

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnops import OperationMetadata, OperationRegistry, UnsupportedError, UnsupportedWarning, explain
from attnops.masks import Causal
from attnops.sharding import AxisRules
from attnops_testing import oracle

B, T, H, K, D = 8, 24, 8, 4, 8
ARRAYS = tuple(np.random.default_rng(i).normal(size=(B, T, n, D)).astype(np.float32) for i, n in enumerate((H, K, K)))

# The axes and sizes of a mesh, the axes of the batch and of heads, and whether the rules that there are name them.
MESHES = {
    "dp, tp": ({"dp": 4, "tp": 2}, ("dp",), ("tp",), True),
    "dp, fsdp, tp": ({"dp": 2, "fsdp": 2, "tp": 2}, ("dp", "fsdp"), ("tp",), True),
    "fsdp": ({"fsdp": 8}, ("fsdp",), (), True),
    "tp": ({"tp": 4}, (), ("tp",), True),
    "data, model": ({"data": 4, "model": 2}, ("data",), ("model",), False),
    "replica, data, model": ({"replica": 2, "data": 2, "model": 2}, ("replica", "data"), ("model",), False),
    "batch": ({"batch": 8}, ("batch",), (), False),
    "data": ({"data": 2}, ("data",), (), False),
    "x, y": ({"x": 2, "y": 4}, ("x",), ("y",), False),
    "dp, tensor": ({"dp": 4, "tensor": 2}, ("dp",), ("tensor",), False),
}


def placed(name, axis_type=AxisType.Auto):
    sizes, batch, heads, _ = MESHES[name]
    devices = jax.devices()[: int(np.prod([*sizes.values()]))]
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=(axis_type,) * len(sizes), devices=devices)
    sharding = NamedSharding(mesh, PartitionSpec(batch or None, None, heads or None))
    return mesh, sharding, [jax.device_put(x, sharding) for x in ARRAYS]


def compiled(mesh, arrays, rules=None, operation="flash"):
    metadata = OperationMetadata(mesh=mesh, block_q=8, block_k=8)
    op = OperationRegistry.create(operation, metadata if rules is None else metadata.replace(axis_rules=rules))
    return jax.jit(lambda *x: op(*x, mask=Causal()).attention_outputs).lower(*arrays).compile()


def rules_of(name):
    _, batch, heads, is_named = MESHES[name]
    return None if is_named else AxisRules(batch=batch, head=heads or None, kv_head=heads or None)


@pytest.mark.tier(quick=["data, model"], slow=sorted(MESHES.keys() - {"data, model"}), every=3)
@pytest.mark.parametrize("name", MESHES)
def test_with_rules_each_device_computes_its_share_and_gathers_nothing(name):
    mesh, sharding, arrays = placed(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsupportedWarning)
        program = compiled(mesh, arrays, rules_of(name))
    assert not [x for x in ("all-gather", "all-to-all", "collective-permute", "all-reduce") if x in program.as_text()]
    out = program(*arrays)
    assert out.sharding.is_equivalent_to(sharding, 4)
    expected = oracle.attention(*ARRAYS, mask=np.tri(T, dtype=bool)[None, None]).out
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.tier(quick=["dp, tp"], slow=["dp, fsdp, tp", "fsdp", "tp", "data, model"], every=2)
@pytest.mark.parametrize("name", ["dp, tp", "dp, fsdp, tp", "fsdp", "tp", "data, model"])
def test_the_mesh_that_arrays_are_on_shards_the_call_without_metadata(name):
    _, sharding, arrays = placed(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsupportedWarning)
        program = compiled(None, arrays, rules_of(name))
    assert not [x for x in ("all-gather", "all-to-all", "collective-permute", "all-reduce") if x in program.as_text()]
    assert program(*arrays).sharding.is_equivalent_to(sharding, 4)


def test_the_mesh_that_arrays_are_on_is_refused_where_no_rule_names_it():
    _, _, arrays = placed("data, model")
    flash = OperationRegistry.create("flash", OperationMetadata(on_unsupported="error"))
    with pytest.raises(UnsupportedError, match=r"FlashAttention is not sharded:.*\n.*AxisRules\(batch='data', head="):
        jax.jit(flash).trace(*arrays)


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("data, model", "batch='data', head='model', kv_head='model'"),
        ("replica, data, model", r"batch=\('replica', 'data'\), head='model', kv_head='model'"),
        ("x, y", "batch='x', head='y', kv_head='y'"),
        ("batch", "batch='batch'"),
        ("dp, tensor", "head='tensor', kv_head='tensor'"),
    ],
)
def test_a_mesh_that_no_rule_names_has_a_warning_with_the_rules_to_write(name, rules):
    mesh, _, arrays = placed(name)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    metadata = OperationMetadata(mesh=mesh, on_unsupported="error", precision=jax.lax.Precision.HIGHEST)
    flash, vanilla = (OperationRegistry.create(x, metadata) for x in ("flash", "vanilla"))
    with pytest.raises(UnsupportedError, match=rf"FlashAttention is not sharded:.*\n.*AxisRules\({rules}\)"):
        jax.eval_shape(flash, *shapes)
    if name != "dp, tensor":
        jax.eval_shape(vanilla, *shapes)  # which XLA shards
    with jax.set_mesh(mesh), pytest.warns(UnsupportedWarning, match=rf"not sharded.*AxisRules\({rules}\)"):
        jax.eval_shape(OperationRegistry.create("flash", OperationMetadata(block_q=int(mesh.size))), *shapes)


def test_a_mesh_whose_axes_do_not_divide_is_not_one_that_no_rule_names():
    mesh, _, _ = placed("fsdp")
    flash = OperationRegistry.create("flash", OperationMetadata(mesh=mesh, on_unsupported="error"))
    x = jax.ShapeDtypeStruct((1, T, H, D), np.float32)
    assert jax.eval_shape(flash, x, x, x).attention_outputs.shape == x.shape


def test_outside_of_jit_and_by_their_types_the_axes_of_arrays_shard_the_call():
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh, sharding, arrays = placed("data, model", axis_type)
        op = OperationRegistry.create("flash", OperationMetadata(mesh=mesh, on_unsupported="error"))
        boundary = op.bind(*arrays).boundary
        assert (boundary.batch, boundary.heads, boundary.kv_heads) == ("data", "model", "model")
        assert op(*arrays).attention_outputs.sharding.is_equivalent_to(sharding, 4)


def test_an_explanation_has_the_specs():
    mesh, _, arrays = placed("data, model")
    metadata = OperationMetadata(mesh=mesh, axis_rules=rules_of("data, model"))
    request = OperationRegistry.create("flash", metadata).request(*arrays)
    explanation = explain(request, metadata=metadata, shardings=True)
    assert explanation.shardings.query == PartitionSpec("data", None, "model", None)
    assert "mesh {'data': 4, 'model': 2}: query ('data', None, 'model', None)" in str(explanation)
    assert explain(request).shardings is None
