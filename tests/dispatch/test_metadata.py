"""OperationMetadata: immutable, hashable, read from a model's config."""

import copy
import dataclasses
import pickle
import types

import jax
import jax.numpy as jnp
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.sharding import MODE_DECODE, MODE_PREFILL, MODE_TRAIN, AxisRules


def test_metadata_is_frozen_and_hashable():
    a, b = OperationMetadata(softmax_scale=1), OperationMetadata(softmax_scale=1.0)
    assert a == b
    assert hash(a) == hash(b)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.softmax_scale = 2.0
    assert a.replace(layout="BHTD") == OperationMetadata(softmax_scale=1.0, layout="BHTD")


def test_copies_are_equal():
    metadata = OperationMetadata(runtime_dtype=jnp.bfloat16, precision="high", mode="prefill", platform="tpu")
    assert metadata.precision is jax.lax.Precision.HIGH
    for again in (copy.deepcopy(metadata), pickle.loads(pickle.dumps(metadata)), metadata.replace()):
        assert again == metadata
        assert hash(again) == hash(metadata)
    operation = OperationRegistry.create("vanilla", metadata)
    assert pickle.loads(pickle.dumps(operation)) == operation
    assert operation != OperationRegistry.create("sdpa", metadata)


def test_an_operation_is_a_static_argument():
    traces = []

    def run(operation, q):
        traces.append(1)
        return operation(q, q, q).attention_outputs

    jitted = jax.jit(run, static_argnums=0)
    q = jnp.ones((1, 3, 1, 4))
    for scale in (1.0, 1.0, 2.0):
        jitted(OperationRegistry.create("vanilla", OperationMetadata(softmax_scale=scale)), q)
    assert len(traces) == 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"attention_dropout": 0.1, "hidden_size": 64}, {"dropout_prob": 0.1}),
        ({"attention_probs_dropout_prob": 0.2}, {"dropout_prob": 0.2}),
        ({"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0},
         {"softmax_scale": 1 / 16, "logits_soft_cap": 50.0}),
        ({"attention_multiplier": 0.015625, "attn_logit_softcapping": None}, {"softmax_scale": 0.015625}),
        ({"attn_dtype": "bfloat16", "blocksize_q": 128, "platform": "gpu"},
         {"runtime_dtype": jnp.bfloat16, "block_q": 128, "platform": "cuda"}),
    ],
)  # fmt: skip
def test_from_config(config, expected):
    assert OperationMetadata.from_config(config) == OperationMetadata(**expected)
    assert OperationMetadata.from_config(types.SimpleNamespace(**config)) == OperationMetadata(**expected)


def test_overrides_win_and_bad_values_are_refused():
    assert OperationMetadata.from_config({"attention_dropout": 0.1}, dropout_prob=0.0).dropout_prob == 0.0
    with pytest.raises(ValueError, match="dropout_prob=2"):
        OperationMetadata.from_config({"attention_dropout": 2})
    with pytest.raises(TypeError, match="softcap"):
        OperationMetadata.from_config({}, softcap=1)


def test_the_mode_is_what_is_stated_else_decode_of_one_query():
    operation = OperationRegistry.create("vanilla")
    long, one = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 1, 2, 8))
    assert operation.get_mode(long) == MODE_TRAIN
    assert operation.get_mode(one) == MODE_DECODE
    assert operation.get_mode(jnp.ones((1, 4, 1, 8)), BTHD=False) == MODE_DECODE
    prefill = OperationRegistry.create("vanilla", OperationMetadata(mode="prefill"))
    assert prefill.get_mode(one) == MODE_PREFILL
    assert prefill.request(one, one, one, mode="train").mode == MODE_TRAIN
    assert operation.get_impl_metadata() == OperationMetadata()
    assert operation.current_backend() == "cpu"


class RecurrentGemmaConfig:
    """As in transformers: the cap is the language-model head's."""

    model_type = "recurrent_gemma"
    vocab_size = 256_000
    logits_soft_cap = 30.0
    attention_dropout = 0.1


class Gemma3TextConfig:
    model_type = "gemma3_text"
    query_pre_attn_scalar = 256
    attn_logit_softcapping = 50.0


class Gemma3Config:
    """As in transformers: the scalars of attention are the text's."""

    model_type = "gemma3"
    attention_dropout = 0.3

    def __init__(self):
        self.text_config = Gemma3TextConfig()


class Chooses:
    """Names its text's config otherwise, and gives it by a method."""

    def get_text_config(self):
        return Gemma3TextConfig()


class CanNotChoose:
    def get_text_config(self):
        raise ValueError("Multiple valid text configs were found: ['decoder', 'generator']")


def test_the_cap_of_a_language_model_head_is_not_attentions():
    assert OperationMetadata.from_config(RecurrentGemmaConfig()) == OperationMetadata(dropout_prob=0.1)
    assert OperationMetadata.from_config({"logits_soft_cap": 30.0, "vocab_size": 9}) == OperationMetadata()
    assert OperationMetadata.from_config({"logits_soft_cap": 30.0}).logits_soft_cap == 30.0


@pytest.mark.parametrize("mesh", [3, "dp", ("dp", "tp"), jax.devices])
def test_a_mesh_is_a_mesh(mesh):
    with pytest.raises(ValueError, match=r"mesh=.* must be a jax\.sharding\.Mesh; None for the current one"):
        OperationMetadata(mesh=mesh)


def test_an_abstract_mesh_may_be_stated():
    mesh = jax.sharding.AbstractMesh((2,), ("dp",))
    assert OperationMetadata(mesh=mesh).mesh == mesh


@pytest.mark.parametrize("rules", [{}, None, "dp", AxisRules])
def test_axis_rules_are_axis_rules(rules):
    with pytest.raises(ValueError, match=r"axis_rules=.* must be an attnops\.sharding\.AxisRules"):
        OperationMetadata(axis_rules=rules)


def test_a_multimodal_config_is_read_through_its_text_config():
    expected = OperationMetadata(softmax_scale=1 / 16, logits_soft_cap=50.0)
    assert OperationMetadata.from_config(Gemma3Config()) == expected.replace(dropout_prob=0.3)
    assert OperationMetadata.from_config({"text_config": vars(Gemma3TextConfig)}) == expected
    assert OperationMetadata.from_config(Chooses()) == expected
    with pytest.raises(
        ValueError, match=r"CanNotChoose has several text configs: .*; pass the one that configures the attention"
    ):
        OperationMetadata.from_config(CanNotChoose())


@pytest.mark.parametrize("mode", ["eval", "", 5, ["train"]])
def test_a_mode_is_one_of_the_runtime_modes(mode):
    with pytest.raises(ValueError, match="is not a runtime mode; use one of"):
        OperationMetadata.from_config({"mode": mode})
    x = jnp.ones((1, 2, 1, 4))
    with pytest.raises(ValueError, match="is not a runtime mode; use one of"):
        OperationMetadata().get_shardings(x, x, mode=mode)
    with pytest.raises(ValueError, match="interpret='yes' must be True or False"):
        OperationMetadata.from_config({"interpret": "yes"})
