"""The real model, SmolLM2-135M: drafts, storages and streaming give its greedy text."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from attnops_lm.generation.loop import Generated
from attnops_lm.generation.text import TextStreamer
from attnops_lm.gguf_file import load_smollm2
from attnops_lm.model import CausalLM
from attnops_lm.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.optimised]
QUESTION = "Repeat this word by word: The quick brown fox jumps over the lazy dog, and the dog sleeps on in the sun."
NEW = 40


@pytest.fixture(scope="module")
def loaded() -> tuple[CausalLM, Tokenizer]:
    return load_smollm2()


@functools.lru_cache
def answer(model: CausalLM, tokenizer: Tokenizer, **options: Any) -> Generated:
    ids = tokenizer.encode(tokenizer.chat([{"role": "user", "content": QUESTION}]))
    return model.generate(np.array([ids]), max_new_tokens=NEW, tokenizer=tokenizer, chunk=32, **options)


@pytest.mark.exhaustive
def test_drafts_give_the_same_text_in_fewer_steps(loaded: tuple[CausalLM, Tokenizer]) -> None:
    plain, drafted = answer(*loaded), answer(*loaded, prompt_lookup_num_tokens=4)
    assert plain.texts is not None
    assert "quick brown fox" in plain.texts[0]
    assert drafted.texts == plain.texts
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert drafted.steps < 0.75 * plain.steps


@pytest.mark.exhaustive
def test_pages_give_the_same_text(loaded: tuple[CausalLM, Tokenizer]) -> None:
    np.testing.assert_array_equal(answer(*loaded, cache_implementation="paged").tokens, answer(*loaded).tokens)


@pytest.mark.exhaustive
def test_what_is_streamed_is_the_text(loaded: tuple[CausalLM, Tokenizer]) -> None:
    model, tokenizer = loaded
    shown: list[str] = []
    streamer = TextStreamer(tokenizer, shown.append, eos_ids=tuple(tokenizer.eos_ids))
    found = answer(model, tokenizer, streamer=streamer)
    assert ["".join(shown)] == found.texts == answer(*loaded).texts
