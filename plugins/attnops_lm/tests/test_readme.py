"""What the README says is there, and runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lm_model import call, close, tokens

from attnops_lm.families import FAMILIES
from attnops_lm.model import SequenceClassifier
from attnops_lm.testing import Characters, small

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
ARRAYS = "input_ids labels inputs_embeds attention_mask mask_info position_ids segment_ids"
OUTPUTS = "output_attentions output_hidden_states loss_config loss_kwargs"
# The protocol's members, with the names of their documented arguments.
MEMBERS = {
    "apply_lora_to_layers": "lora_rank lora_pattern verbose rngs",
    "base_model_prefix": "",
    "can_generate": "",
    "compute_loss": f"{ARRAYS} past_key_values cache_metadata {OUTPUTS}",
    "config": "",
    "config_class": "",
    "create_cache_metadata": "batch_size max_length pad_token_id",
    "create_paged_metadata": "hbm_utilization page_size max_model_length",
    "float": "change_runtime_dtype",
    "from_pretrained": "pretrained_model_name_or_path",
    "gather_model": "partition_rules mesh",
    "generate": "input_ids generation_config prng_key trace logits_processor",
    "get_static_arguments": "",
    "get_torch_loader": "",
    "graphdef": "",
    "graphother": "",
    "graphstate": "",
    "half": "change_runtime_dtype",
    "init_cache": "batch_size max_length starts shardings pad_token_id",
    "init_ragged_pages": "metadata page_size hbm_utilization max_model_length",
    "lazy_init": "",
    "merge_lora_params": "pytree",
    "merge_params": "tree",
    "merge_params_dict": "params_dict",
    "params_sharding": "",
    "prepare_inputs_for_call": "",
    "prepare_inputs_for_generation": (
        "input_ids max_length pad_token_id starts shardings attention_mask token_type_ids mask_info"
    ),
    "pure_transform_fn": "",
    "push_to_hub": "",
    "quantize": "quantization_config quantize_tensors verbose",
    "save_pretrained": "save_directory push_to_hub token gather_fns float_dtype step",
    "shard_model": "partition_rules mesh",
    "split_lora_params": "",
    "split_params": "",
    "split_params_dict": "params_dict",
    "to_dtype": "dtype",
    "to_state": "",
    "to_torch": "",
    "transform_fn": "",
    "unwrap_lora_to_layers": "verbose",
    "update_inputs_for_generation": "model_outputs model_kwargs",
}  # fmt: skip


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def rows(title: str) -> list[tuple[list[str], str]]:
    """Of a section's table the names in the first column, and the second column."""
    cells = [line.split("|")[1:3] for line in section(title).splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([\w./]+)`", first), second.strip()) for first, second in cells]


def blocks(title: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", section(title), re.DOTALL))


@pytest.mark.slow
def test_the_protocols_members_are_there_as_the_table_says() -> None:
    said = {name: status for names, status in rows("The module protocol") for name in names}
    assert sorted(said) == sorted(MEMBERS)
    assert len(MEMBERS) == 41
    model = small()
    classifier = SequenceClassifier(model.config, 2)
    for name, status in said.items():
        assert status.startswith(("done", "no: ")), name
        assert hasattr(model, name) == status.startswith("done"), name
        if status.startswith("no: ") or not (arguments := MEMBERS[name].split()):
            continue
        given = list(inspect.signature(getattr(model, name)).parameters)
        assert given[: len(arguments)] == arguments, name
    given = list(inspect.signature(classifier.compute_loss).parameters)
    assert given == f"{ARRAYS} {OUTPUTS}".split()
    assert (model.can_generate(), classifier.can_generate()) == (True, False)
    assert isinstance(model.config, model.config_class)


def test_the_families_are_all_of_them_and_the_files_are_there() -> None:
    assert {name for names, _ in rows("Families") for name in names} == set(FAMILIES)
    here = Path(__file__).parents[1] / "src" / "attnops_lm"
    named = {name for names, _ in rows("Files") for name in names}
    assert named
    assert not [name for name in named if not (here / name).exists()]


def after_the_first_block() -> dict[str, Any]:
    """The names that the first block leaves, of a small model in place of SmolLM2."""
    return {"model": small(), "tokenizer": Characters(), "prompt": "Hello"}


@pytest.mark.slow
def test_it_shards_and_saves_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = after_the_first_block()
    exec(blocks("Shard"), names)
    expected = call(small(), names["ids"]).logits
    close(names["logits"], expected)
    assert all(x.is_fully_replicated for x in jax.tree.leaves(nnx.state(names["whole"])))
    monkeypatch.chdir(tmp_path)
    names = {"model": names["whole"]}
    exec(blocks("Save"), names)
    close(call(names["again"], jnp.asarray([Characters().encode("Hello")])).logits, expected)


@pytest.mark.slow
def test_it_is_fine_tuned_and_quantised_as_it_says() -> None:
    model, ids = small(), tokens((2, 6))
    names: dict[str, Any] = {"model": model, "ids": ids}
    exec(blocks("Fine-tune"), names)
    before = model.compute_loss(ids)[1].loss
    assert names["tuned"].compute_loss(ids)[1].loss < names["value"] < before
    names = {"model": (model := small(intermediate_size=64))}  # whole groups of 32
    exec(blocks("Quantise"), names)
    expected = np.asarray(call(model, ids).logits)
    for name, most in {"int8": 0.1, "int4": 0.5, "both": 0.1, "aware": 0.1}.items():
        error = np.abs(call(names[name], ids).logits - expected).mean() / np.abs(expected).mean()
        assert 0 < error < most, name


@pytest.mark.slow
def test_smollm2_answers_as_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block
    exec(block[1], {})
    assert "Paris" in capsys.readouterr().out
