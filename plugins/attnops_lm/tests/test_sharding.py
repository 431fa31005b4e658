"""A model over eight devices, and over two processes, against one device."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast_compile import XLA_FLAGS
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lm_model import call, close, tokens

from attnops.sharding import create_mesh
from attnops_lm.model import CausalLM, SequenceClassifier
from attnops_lm.params import by_path
from attnops_lm.testing import small

B, T, S = 4, 12, 16


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return create_mesh((4, 2), ("dp", "tp"))


def shards(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """The shape of one device's part of each variable."""
    return {path: x.sharding.shard_shape(x.shape) for path, x in by_path(nnx.state(model)).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ring"),
    [
        ("llama", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt_oss", True), ("gemma2", False))),
    ],
)
@pytest.mark.tier(every=3)
def test_logits_over_eight_devices_are_those_of_one(mesh: Mesh, family: str, ring: bool) -> None:
    model, ids = small(family), tokens((B, T))
    sharded = model.shard_model(mesh=mesh)
    expected = call(model, ids).logits
    close(call(sharded, jax.device_put(ids, NamedSharding(mesh, P("dp")))).logits, expected)
    caches = sharded.init_cache(B, S, shardings={"mesh": mesh}, max_append=8 if ring else None)
    assert caches[0].placement == sharded.init_cache(B, S, max_append=8 if ring else None)[0].placement
    assert caches[0].placement is not None
    for start, stop in ((0, 8), (8, 9), (9, T)):
        out = call(sharded, ids[:, start:stop], past_key_values=caches)
        close(out.logits, expected[:, start:stop])
        caches = out.past_key_values
    part = next(x for x in jax.tree.leaves(caches[0]) if x.ndim == 4)
    assert part.sharding.shard_shape(part.shape)[0] == B // 4


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "paged", "page_size": 4}, {"num_beams": 2}])
@pytest.mark.tier(every=3)
def test_over_eight_devices_the_same_tokens_are_generated(mesh: Mesh, options: dict[str, Any]) -> None:
    model, ids = small(), tokens((B, T))
    expected, found = (m.generate(ids, max_new_tokens=6, **options) for m in (model, model.shard_model(mesh=mesh)))
    assert np.array_equal(found.tokens, expected.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(2, 2, 2), (1, 1, 8)])  # 8: kv heads and heads do not divide
@pytest.mark.tier(every=2)
def test_quantised_with_lora_over_three_axes_logits_are_those_of_one(dims: tuple[int, ...]) -> None:
    model, ids = small().quantize().apply_lora_to_layers(2), tokens((B, T))
    model = model.merge_lora_params(jax.tree.map(lambda x: x + 0.02, model.split_lora_params()))
    expected = call(model, ids).logits
    sharded = model.shard_model(mesh=create_mesh(dims, ("dp", "fsdp", "tp")))
    close(call(sharded, ids).logits, expected)
    close(call(sharded, ids, past_key_values=sharded.init_cache(B, S)).logits, expected)


@pytest.mark.slow
def test_default_rules_shard_each_weight_as_documented() -> None:
    mesh = create_mesh((1, 2, 4), ("dp", "fsdp", "tp"))
    found = shards(small(tie_word_embeddings=False).shard_model(mesh=mesh))
    layer = {path.removeprefix("layers.0."): x for path, x in found.items() if path.startswith("layers.0.")}
    assert layer == {
        "attention.q.kernel": (16, 8), "attention.k.kernel": (16, 4), "attention.v.kernel": (16, 4),
        "attention.o.kernel": (8, 16), "mlp.gate.kernel": (16, 12), "mlp.up.kernel": (16, 12),
        "mlp.down.kernel": (12, 16), "attention_norm.scale": (32,), "mlp_norm.scale": (32,),
    }  # fmt: skip
    assert (found["embed"], found["head.kernel"], found["norm.scale"]) == ((24, 16), (16, 24), (32,))
    experts = shards(small("gpt_oss").shard_model(mesh=create_mesh((2, 1, 4), ("ep", "fsdp", "tp"))))
    assert experts["layers.0.mlp.gate_up"] == (2, 32, 24)
    assert experts["layers.0.mlp.down"] == (2, 12, 32)
    assert experts["layers.0.attention.sinks"] == (1,)
    assert experts["layers.0.attention.q.bias"] == (8,)
    lora = shards(small().quantize().apply_lora_to_layers(2).shard_model(mesh=mesh))
    assert lora["layers.0.attention.q.lora_a"] == (16, 2)
    assert lora["layers.0.attention.q.lora_b"] == (2, 8)
    assert lora["layers.0.mlp.down.lora_a"] == (12, 2)
    assert lora["layers.0.mlp.down.base_module.qvalue"] == (12, 16)
    assert lora["layers.0.mlp.up.base_module.scale"] == (1, 12)


@pytest.mark.slow
def test_rules_of_ones_own(mesh: Mesh) -> None:
    model = small()
    rules = {r"up\.kernel$": lambda x: P(*[None] * (x.ndim - 1), ("dp", "tp")), ".*": P()}
    sharded = model.shard_model(rules, mesh)
    shardings = sharded.params_sharding
    assert shardings["layers"][1]["mlp"]["up"]["kernel"].spec == P(None, ("dp", "tp"))
    assert shardings["embed"].is_fully_replicated
    assert jax.tree.structure(shardings) == jax.tree.structure(nnx.to_pure_dict(sharded.graphstate))
    by_parts = model.shard_model({("layers", "0"): P("tp"), (".*",): P()}, mesh)
    assert shards(by_parts)["layers.0.mlp_norm.scale"] == (16,)
    assert shards(by_parts)["layers.1.mlp_norm.scale"] == (32,)
    with pytest.raises(ValueError, match="no partition rule matches embed"):
        model.shard_model([("layers", P())], mesh)
    with pytest.raises(ValueError, match=r"mesh=None, and neither the model's metadata nor jax\.set_mesh has one"):
        model.shard_model()
    with jax.set_mesh(mesh):
        assert model.shard_model().metadata.mesh == mesh


def test_gathered_it_is_whole_and_can_be_saved(mesh: Mesh, tmp_path: Any) -> None:
    model = small(tie_word_embeddings=False)
    sharded = model.shard_model(mesh=mesh)
    whole = sharded.gather_model()
    for a, b in zip(jax.tree.leaves(nnx.state(whole)), jax.tree.leaves(nnx.state(model)), strict=True):
        assert a.is_fully_replicated
        assert np.array_equal(a, b)
    some = sharded.gather_model([(r"^head", P())])
    assert some.head.kernel[...].is_fully_replicated
    assert some.embed[...] is sharded.embed[...]
    whole.save_pretrained(tmp_path)
    loaded = CausalLM.from_pretrained(tmp_path, mesh=mesh)
    assert loaded.metadata.mesh == mesh
    for a, b in zip(jax.tree.leaves(nnx.state(loaded)), jax.tree.leaves(nnx.state(sharded)), strict=True):
        assert a.sharding == b.sharding
        assert np.array_equal(a, b)


@pytest.mark.slow
def test_a_classifier_and_a_model_of_shapes_are_sharded(mesh: Mesh) -> None:
    model, ids = SequenceClassifier(small().config, 6), tokens((B, T))
    close(call(model.shard_model(mesh=mesh), ids).logits, call(model, ids).logits)
    lazy = CausalLM.lazy_init(small().config).shard_model(mesh=mesh).embed.get_value()
    assert isinstance(lazy, jax.ShapeDtypeStruct)
    assert lazy.sharding == NamedSharding(mesh, P("tp", None))


@pytest.mark.slow
def test_a_loss_and_its_gradients_over_eight_devices_are_those_of_one(mesh: Mesh) -> None:
    model, ids = small(), tokens((B, T))

    def gradients(model: CausalLM) -> Any:
        graphdef, state = nnx.split(model)
        return jax.jit(jax.value_and_grad(lambda s: nnx.merge(graphdef, s).compute_loss(ids)[1].loss))(state)

    (found, of_found), (expected, of_expected) = gradients(model.shard_model(mesh=mesh)), gradients(model)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(of_found), jax.tree.leaves(of_expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(b).max()))


@pytest.mark.slow
def test_two_processes_agree_with_one_device() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": XLA_FLAGS}
    command = [sys.executable, "-m", "attnops_lm.sharded", "--coordinator", address, "--processes", "2"]
    started = [
        subprocess.Popen(
            [*command, "--index", str(i)], env=env, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        for i, process in enumerate(started):
            printed, _ = process.communicate(timeout=240)
            assert process.returncode == 0, printed
            assert re.search(rf"process {i} of 2, 4 devices: error \S+ relative to one device", printed)
    finally:
        for process in started:
            process.kill()
