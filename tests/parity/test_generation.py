"""`generate` gives what transformers' does on the same weights: tokens, scores of beams, limits of sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from attnops_lm.generation.sampling import Sampling, limited
from attnops_lm.model import CausalLM
from attnops_lm.testing import small

PROMPTS = np.random.default_rng(0).integers(3, 90, (2, 9))
ENDS = (7, 11, 40)
NEW = 10


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, Any]:
    directory: Path = tmp_path_factory.mktemp("model")
    model = small(num_hidden_layers=1)
    model.save_pretrained(directory)
    return model, transformers.AutoModelForCausalLM.from_pretrained(directory).eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.7},
        {"min_new_tokens": 5},
        {"num_beams": 3, "num_return_sequences": 3},
        {"num_beams": 3, "repetition_penalty": 1.7},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 2.0, "early_stopping": "never"},
        {"num_beams": 4, "length_penalty": 0.0, "early_stopping": True},
        {"num_beams": 3, "length_penalty": -1.0},
    ],
    ids=str,
)
def test_tokens_and_scores_are_those_of_transformers(models: tuple[CausalLM, Any], options: dict[str, Any]) -> None:
    model, other = models
    own = model.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=ENDS, **options)
    theirs = other.generate(
        torch.from_numpy(PROMPTS), attention_mask=torch.ones(PROMPTS.shape, dtype=torch.long), max_new_tokens=NEW,
        eos_token_id=list(ENDS), pad_token_id=95, do_sample=False, return_dict_in_generate=True, output_scores=True,
        **options,
    )  # fmt: skip
    tokens = theirs.sequences.numpy()[:, PROMPTS.shape[1] :]
    for row, length, wanted in zip(own.tokens, own.lengths, tokens, strict=True):
        assert row[:length].tolist() == wanted[:length].tolist()
        assert (wanted[length:] == 95).all()
    if own.scores is not None:
        np.testing.assert_allclose(own.scores, theirs.sequences_scores.numpy(), rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_layers_with_states_generate_the_tokens_of_transformers(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    model = small(family, num_hidden_layers=4)
    model.save_pretrained(tmp_path)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    mask = np.ones(PROMPTS.shape, np.int64)
    mask[1, :4] = 0  # left padding
    own = model.generate(PROMPTS, attention_mask=mask, max_new_tokens=NEW, eos_token_id=ENDS, chunk=4, **options)
    theirs = other.generate(
        torch.from_numpy(PROMPTS), attention_mask=torch.from_numpy(mask), max_new_tokens=NEW, eos_token_id=list(ENDS),
        pad_token_id=95, do_sample=False, **options,
    ).numpy()[:, PROMPTS.shape[1] :]  # fmt: skip
    for row, length, wanted in zip(own.tokens, own.lengths, theirs, strict=True):
        assert row[:length].tolist() == wanted[:length].tolist()
        assert (wanted[length:] == 95).all()


@pytest.mark.parametrize(
    ("temperature", "k", "p", "least"), [(0.7, 20, 0.9, 0.05), (1.5, 0, 0.5, 0.0), (1.0, 50, 1.0, 0.1)]
)
def test_tokens_that_may_be_drawn_are_those_of_transformers(temperature: float, k: int, p: float, least: float) -> None:
    scores = np.random.default_rng(1).normal(0, 3, (5, 300)).astype(np.float32)
    warpers = [transformers.TemperatureLogitsWarper(temperature)]
    warpers += [transformers.TopKLogitsWarper(k)] if k else []
    warpers += [transformers.TopPLogitsWarper(p)] if p < 1 else []
    warpers += [transformers.MinPLogitsWarper(least)] if least else []
    wanted = torch.from_numpy(scores)
    for warper in warpers:
        wanted = warper(None, wanted)
    found = limited(jnp.asarray(scores / np.float32(temperature)), Sampling.create(temperature, k, p, least))
    np.testing.assert_array_equal(np.isfinite(np.asarray(found)), np.isfinite(wanted.numpy()))
