"""Parameters, dtypes, and arguments of a call."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lm_model import call, close, tokens

from attnops_lm.model import CausalLM, SequenceClassifier
from attnops_lm.testing import small


@pytest.mark.slow
def test_graphdef_and_states_are_split_and_merged() -> None:
    model, other, ids = small(), small(seed=1), tokens((1, 5))
    assert hash(model.graphdef) == hash(small(seed=1).graphdef)
    merged = nnx.merge(model.graphdef, model.graphstate, model.graphother)
    for a, b in zip(jax.tree.leaves(nnx.state(merged)), jax.tree.leaves(nnx.state(model)), strict=True):
        assert a is b
    expected = call(other, ids).logits
    for changed in (
        model.merge_params(other.split_params()),
        model.merge_params_dict(other.split_params_dict()["params"]),
    ):
        close(call(changed, ids).logits, expected)
    assert not np.array_equal(call(model, ids).logits, expected)  # is as it was
    assert model.split_params_dict()["lora_params"] == {}
    flat = {"layers.1.mlp.up.kernel": jnp.zeros((32, 48))}
    assert not model.merge_params_dict(flat).layers[1].mlp.up.kernel[...].any()
    assert model.merge_params_dict(flat).embed[...] is model.embed[...]
    assert set(model.split_params_dict(flat)["params"]["layers"][1]) == {"mlp"}


def test_parameters_that_do_not_fit_are_refused() -> None:
    model = small()
    with pytest.raises(ValueError, match=r"no Param layers\.7\.mlp\.up\.kernel"):
        model.merge_params_dict({"layers": {7: {"mlp": {"up": {"kernel": jnp.zeros(3)}}}}})
    with pytest.raises(ValueError, match=r"embed has shape \(3,\), but the model's has \(96, 32\)"):
        model.merge_params_dict({"embed": jnp.zeros(3)})


@pytest.mark.slow
def test_dtypes_of_weights_and_of_what_is_computed() -> None:
    model, ids = small(), tokens((2, 9))
    expected = call(model, ids).logits
    scale = float(jnp.abs(expected).max())
    for changed in (model.half(), model.half(change_runtime_dtype=False)):
        assert {x.dtype for x in jax.tree.leaves(nnx.state(changed))} == {jnp.dtype("float16")}
        out = call(changed, ids)
        assert out.last_hidden_state.dtype == changed.dtype
        assert 0 < float(jnp.abs(out.logits - expected).max()) < 0.01 * scale
        assert changed.init_cache(1, 4)[0].dtype == changed.dtype
    assert model.half().dtype == jnp.float16
    assert model.half(change_runtime_dtype=False).dtype == model.dtype == jnp.float32
    wide = model.half(change_runtime_dtype=False).float()
    close(call(wide, ids).logits, out.logits)  # weights rounded once, computed in float32
    assert model.to_dtype(jnp.bfloat16).float().dtype == jnp.float32
    lazy = CausalLM.lazy_init(model.config).to_dtype("bfloat16")
    assert isinstance(lazy.embed.get_value(), jax.ShapeDtypeStruct)
    assert lazy.embed.get_value().dtype == jnp.bfloat16
    for dtype in ("int8", "float8_e4m3fn"):
        for change in (model.to_dtype, lambda x: CausalLM(model.config, dtype=x)):
            with pytest.raises(ValueError, match=f"dtype is {dtype}, but must be floating-point of at least 16 bits"):
                change(dtype)


def test_arguments_of_a_call_are_prepared() -> None:
    model = small()
    inputs = model.prepare_inputs_for_call(input_ids=[[1, 2]], attention_mask=np.ones((1, 2)), segment_ids=None)
    assert sorted(inputs) == ["attention_mask", "input_ids"]
    assert all(isinstance(x, jax.Array) for x in inputs.values())
    assert model.get_static_arguments() == ()
    with pytest.raises(ValueError, match="CausalLM has no argument 'token_type_ids'"):
        model.prepare_inputs_for_call(token_type_ids=[1])
    classifier = SequenceClassifier(model.config, 3)
    assert list(classifier.prepare_inputs_for_call(input_ids=[[1]])) == ["input_ids"]
    with pytest.raises(ValueError, match="has no argument 'logits_at'"):
        classifier.prepare_inputs_for_call(logits_at=[1])


@pytest.mark.slow
def test_weights_are_gathered_by_functions_as_they_are_saved(tmp_path: Path) -> None:
    model = small()
    path = "layers.1.mlp.up.kernel"
    model.save_pretrained(tmp_path, gather_fns={path: lambda x: 2 * x}, step=7)
    loaded = CausalLM.from_pretrained(tmp_path / "checkpoint-7")
    assert np.array_equal(loaded.layers[1].mlp.up.kernel[...], 2 * model.layers[1].mlp.up.kernel[...])
    assert np.array_equal(loaded.layers[1].mlp.gate.kernel[...], model.layers[1].mlp.gate.kernel[...])
    with pytest.raises(ValueError, match=r"gather_fns has up\.kernel, which is not a weight's path"):
        model.save_pretrained(tmp_path, gather_fns={"up.kernel": jnp.asarray})
    for options in ({"push_to_hub": True}, {"token": "x"}):
        with pytest.raises(ValueError, match="push_to_hub and token are not supported"):
            model.save_pretrained(tmp_path, **options)  # type: ignore[arg-type]
