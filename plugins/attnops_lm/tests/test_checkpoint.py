"""A checkpoint whose weights are not those of its config is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from safetensors.flax import load_file, save_file

from attnops_lm.checkpoint import INDEX, SINGLE
from attnops_lm.model import CausalLM, SequenceClassifier
from attnops_lm.testing import small

Weights = dict[str, jax.Array]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    small(num_hidden_layers=1).save_pretrained(directory)
    return directory


def changed(saved: Path, directory: Path, change: Callable[[Weights], object]) -> Path:
    """A copy of the checkpoint with other weights."""
    weights = load_file(saved / SINGLE)
    change(weights)
    save_file(weights, directory / SINGLE)
    (directory / "config.json").write_text((saved / "config.json").read_text())
    return directory


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w: w.pop(f"{Q}.weight"), f"has no weight {Q}.weight"),
        (lambda w: w.update({f"{Q}.bias": jnp.ones(32)}), rf"has {Q}.bias \(1 in all\)"),
        (lambda w: w.update({f"{Q}.weight": w[f"{Q}.weight"].astype(jnp.int8)}), "is int8, but must be floating"),
        (lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1}), "lm_head.weight that differs"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    saved: Path, tmp_path: Path, change: Callable[[Weights], object], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        CausalLM.from_pretrained(changed(saved, tmp_path, change))


def test_a_copy_of_a_tied_head_and_tables_of_rotations_are_passed_over(saved: Path, tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = jnp.ones(4)

    assert CausalLM.from_pretrained(changed(saved, tmp_path, change)).head is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "llama"])
def test_layers_that_predict_further_tokens_are_passed_over_where_a_family_has_them(
    family: str, tmp_path: Path
) -> None:
    saved, other = tmp_path / "saved", tmp_path / "other"
    model = small(family)
    model.save_pretrained(saved)
    other.mkdir()
    directory = changed(saved, other, lambda weights: weights.update({"mtp.fc.weight": jnp.ones((32, 64))}))
    if family == "llama":
        with pytest.raises(ValueError, match=r"has mtp\.fc\.weight \(1 in all\)"):
            CausalLM.from_pretrained(directory)
    else:
        assert jnp.array_equal(CausalLM.from_pretrained(directory).embed[...], model.embed[...])


@pytest.mark.slow
def test_a_bfloat16_checkpoint_is_read_in_the_dtype_of_the_model(saved: Path, tmp_path: Path) -> None:
    small(num_hidden_layers=1).save_pretrained(tmp_path, float_dtype=jnp.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    model = CausalLM.from_pretrained(tmp_path)
    assert model.embed[...].dtype == jnp.float32
    assert jnp.array_equal(model.embed[...], small(num_hidden_layers=1).embed[...].astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_weights_are_not_written_in_a_dtype_that_is_not_read(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(ValueError, match=f"float_dtype is {dtype}, but must be floating-point of at least 16 bits"):
        small(num_hidden_layers=1).save_pretrained(tmp_path / "new", float_dtype=dtype)
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_of_several_files_is_read_until_one_is_saved_over_it(saved: Path, tmp_path: Path) -> None:
    directory = changed(saved, tmp_path, lambda weights: None)
    weights, files = load_file(saved / SINGLE), {}
    (directory / SINGLE).unlink()
    for i, name in enumerate(sorted(weights)):
        files[name] = f"model-{i % 3}.safetensors"
    for file in set(files.values()):
        save_file({name: weights[name] for name in files if files[name] == file}, directory / file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    model, other = small(num_hidden_layers=1), small(num_hidden_layers=1, seed=1)
    assert jnp.array_equal(CausalLM.from_pretrained(directory).embed[...], model.embed[...])
    other.save_pretrained(directory)
    assert jnp.array_equal(CausalLM.from_pretrained(directory).embed[...], other.embed[...])


@pytest.mark.slow
def test_a_classifier_is_written_and_read_with_its_classes(saved: Path, tmp_path: Path) -> None:
    model = SequenceClassifier(small(num_hidden_layers=1).config, 5, rngs=nnx.Rngs(3))
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["LlamaForSequenceClassification"]
    assert len(written["id2label"]) == len(written["label2id"]) == 5
    again = SequenceClassifier.from_pretrained(tmp_path)
    assert again.num_labels == 5
    for a, b in zip(*(jax.tree.leaves(nnx.state(x)) for x in (again, model)), strict=True):
        assert jnp.array_equal(a, b)
    with pytest.raises(ValueError, match=r"score\.weight has shape \(32, 5\), but score\.kernel has \(32, 3\)"):
        SequenceClassifier.from_pretrained(tmp_path, num_labels=3)
    with pytest.raises(ValueError, match=r"has score\.weight \(1 in all\), which a CausalLM of its config"):
        CausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no weight score\.weight"):
        SequenceClassifier.from_pretrained(saved)


@pytest.mark.slow
def test_end_tokens_are_those_of_the_generation_config(saved: Path, tmp_path: Path) -> None:
    directory = changed(saved, tmp_path, lambda weights: None)
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert CausalLM.from_pretrained(directory).config.eos_token_ids == (1, 7)
