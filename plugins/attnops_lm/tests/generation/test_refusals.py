"""What `generate` does not do it refuses, with both values and what to do."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops_caches import PagedCache, WindowCache
from attnops_lm.model import CausalLM
from attnops_lm.testing import small

IDS = np.ones((2, 5), int)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return small("mistral", num_hidden_layers=1)


def window(max_append: int) -> tuple[WindowCache]:
    sizes: dict[str, Any] = {"kv_heads": 2, "head_dim": 8, "dtype": jnp.float32}
    return (WindowCache.create(batch=2, window=8, max_append=max_append, **sizes),)


def pages() -> tuple[PagedCache]:
    table = np.array([[0, 1], [2, -1]])
    return (PagedCache.create(batch=2, pages=4, page_size=4, max_pages=2, kv_heads=2, head_dim=8, table=table),)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"input_ids": IDS[0]},
            "input_ids have shape (5,), but must be integers [B, P]; for one prompt give [input_ids]",
        ),
        (
            {"input_ids": [1, 2, 3]},
            "input_ids have shape (3,), but must be integers [B, P]; for one prompt give [input_",
        ),
        ({"input_ids": "hello"}, "input_ids='hello' is text, but must be tokens, integers [B, P]; give [tokenizer.enc"),
        (
            {"input_ids": ["a", "b"]},
            "input_ids=['a', ...] is text, but must be tokens, integers [B, P]; give [tokenizer",
        ),
        ({"input_ids": np.array(["a"])}, "input_ids=array(['a'], dtype='<U1') is text, but must be tokens"),
        ({"input_ids": [[]]}, "input_ids have shape (1, 0), but every row must have a token to start from"),
        ({"input_ids": []}, "input_ids have shape (0,), but every row must have a token to start from"),
        ({"input_ids": [[0.5]]}, "input_ids are float64 (1, 1), but must be integers [B, P]"),
        (
            {"input_ids": IDS, "max_new_tokens": 252},
            "a prompt of 5 tokens and max_new_tokens=252 are 257, but must be at most the model's context, 256: ask "
            "for at most 251 new ones, or shorten the prompt",
        ),
        (
            {"input_ids": np.ones((1, 256), int), "max_new_tokens": 1},
            "a prompt of 256 tokens and max_new_tokens=1 are 257, but must be at most the model's context, 256: short",
        ),
        (
            {"input_ids": np.ones((2, 250), int), "past_key_values": window(4), "max_new_tokens": 7},
            "a prompt of 250 tokens and max_new_tokens=7 are 257, but must be at most the model's context, 256: ask",
        ),
        ({"input_ids": IDS * 96}, "input_ids has tokens from 96 to 96, but the vocabulary is 0 to 95"),
        ({"attention_mask": IDS[:, :4]}, "attention_mask has shape (2, 4), but must have that of input_ids, (2, 5)"),
        ({"attention_mask": IDS * [[1], [0]]}, "attention_mask[1] is all 0, but a row must have a token to start from"),
        ({"attention_mask": IDS * [1, 0, 0, 1, 1]}, "attention_mask[0] has 2 zeros between tokens 0 and 4: padding"),
        ({"do_sample": True}, "prng_key=None and do_sample=True: tokens are drawn by a key; give prng_key="),
        (
            {"stop_strings": "x"},
            "stop_strings='x' and tokenizer=None: they are searched in text; give tokenizer",
        ),
        ({"num_beams": 2, "streamer": object()}, "streamer is given, and num_beams=2: a beam may be dropped"),
        ({"past_key_values": window(4), "chunk": 8}, "chunk=8 must be at most the WindowCache's max_append=4"),
        ({"chunk": 0}, "chunk=0 must be an int of at least 1"),
        ({"chunk": -1}, "chunk=-1 must be an int of at least 1"),
        (
            {"past_key_values": window(4), "prompt_lookup_num_tokens": 4},
            "past_key_values[0] was created with max_append=4, but a step appends 5 tokens, the last one and its",
        ),
        (
            {"past_key_values": pages(), "max_new_tokens": 3},
            "past_key_values[0] has room for 4 tokens in row 1, but 0 in it, 5 of the prompt and 3 - 1 generated ones "
            "are 7: give it the table of a pool that has reserved them, or generate fewer",
        ),
        ({"past_key_values": pages(), "input_ids": IDS[:1]}, "past_key_values have 2 rows, but input_ids 1: one row"),
        (
            {"past_key_values": window(4), "attention_mask": IDS * [0, 1, 1, 1, 1]},
            "attention_mask has left padding [1,",
        ),
        (
            {"past_key_values": window(4), "cache_implementation": "paged"},
            "past_key_values are given, and {'num_return",
        ),
        ({"past_key_values": ()}, "0 caches given, but the model has 1 layers"),
        ({"past_key_values": window(4) * 2}, "2 caches given, but the model has 1 layers"),
        ({"input_ids": [[1, 2], []]}, "input_ids[1] is empty, but a row must have a token to start from"),
        (
            {"input_ids": [[1, 2], [3]], "attention_mask": IDS},
            "input_ids has rows of [2, 1] tokens, which need no attention_mask",
        ),
        ({"bad_words_ids": [[1]]}, "bad_words_ids=[[1]]: generate honours cache_implementation, do_sample,"),
    ],
)
def test_what_does_not_fit_is_refused(model: CausalLM, options: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {"input_ids": IDS, "max_new_tokens": 2} | options
    with pytest.raises(ValueError, match=re.escape(text)):
        model.generate(**arguments)


@pytest.mark.slow
def test_beams_over_pages_of_the_caller_are_refused(model: CausalLM) -> None:
    caches, pool = model.init_ragged_pages(page_size=4, max_model_length=16, batch_size=2, pages=8)
    caches = tuple(cache.with_table(pool.reserve(np.array([8, 8])).table) for cache in caches)
    with pytest.raises(ValueError, match="beam search over a PagedCache needs its pool: set cache_implementation='pag"):
        model.generate(IDS, max_new_tokens=2, num_beams=2, past_key_values=caches)


def test_generate_is_not_traced(model: CausalLM) -> None:
    with pytest.raises(ValueError, match="input_ids or attention_mask is traced: generate compiles its own steps"):
        jax.jit(lambda ids: model.generate(ids).tokens)(IDS)


@pytest.mark.parametrize("name", ["token_type_ids", "mask_info"])
def test_prepare_inputs_refuses_what_no_model_has(model: CausalLM, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is given, but must be None"):
        model.prepare_inputs_for_generation(IDS, 8, **{name: IDS})  # type: ignore[arg-type]


@pytest.mark.slow
def test_prepare_inputs_refuses_a_prompt_that_is_too_long(model: CausalLM) -> None:
    with pytest.raises(ValueError, match="input_ids has 5 tokens, but max_length=4 is less"):
        model.prepare_inputs_for_generation(IDS, 4)
    with pytest.raises(ValueError, match="starts and attention_mask are both given"):
        model.prepare_inputs_for_generation(IDS, 8, starts=[0, 0], attention_mask=IDS)
