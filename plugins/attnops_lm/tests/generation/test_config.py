"""Every field of a config is honoured or refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from attnops_lm.generation.config import GenerationConfig


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"temperature": 0.0, "do_sample": True}, "temperature=0.0 must be a finite number above 0; for the most"),
        ({"temperature": 0.5}, "temperature=0.5 is given, but do_sample=False takes the most probable token"),
        ({"top_k": 5}, "top_k=5 is given, but do_sample=False"),
        ({"top_p": 1.5, "do_sample": True}, "top_p=1.5 must be above 0 and at most 1; None for no limit"),
        ({"top_k": 0, "do_sample": True}, "top_k=0 must be an int of at least 1"),
        ({"top_k": 2**32 + 5, "do_sample": True}, "top_k=4294967301 must be an int of at least 1, below 2**31"),
        ({"pad_token_id": 2**31}, "pad_token_id=2147483648 must be an int of at least 0, below 2**31"),
        ({"num_beams": True}, "num_beams=True must be an int of at least 1"),
        ({"eos_token_id": (1, -1)}, "eos_token_id=-1 must be an int of at least 0"),
        ({"max_new_tokens": 3, "max_length": 5}, "max_new_tokens=3 and max_length=5 both limit a row: give one"),
        ({"max_new_tokens": 3, "min_new_tokens": 5}, "min_new_tokens=5 must be at most max_new_tokens=3"),
        ({"num_beams": 2, "do_sample": True}, "do_sample=True and num_beams=2: beam search compares whole"),
        ({"num_beams": 2, "prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens=4 and num_beams=2"),
        ({"num_beams": 2, "stop_strings": "a"}, "stop_strings='a' and num_beams=2"),
        ({"length_penalty": 2.0}, "length_penalty=2.0 is for beam search, but num_beams=1"),
        ({"early_stopping": "soon", "num_beams": 2}, "early_stopping='soon' must be True, False or 'never'"),
        ({"num_return_sequences": 3, "num_beams": 2}, "num_return_sequences=3 must be at most num_beams=2 without do_"),
        ({"page_size": 8}, "page_size=8 is given, but cache_implementation=None has no pages: set it to 'paged'"),
        ({"cache_implementation": "dynamic"}, "cache_implementation='dynamic' must be 'static', 'sliding_window' or"),
        ({"stop_strings": ("a", "")}, "stop_strings=('a', '') must be strings of at least one character"),
    ],
)
def test_fields_that_do_not_fit_are_refused_with_both_values(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        GenerationConfig(**fields)


def test_numbers_of_numpy_are_numbers() -> None:
    given = GenerationConfig(
        max_new_tokens=np.int64(3), do_sample=np.bool(True), temperature=np.float32(0.5), eos_token_id=[np.int32(1)]
    )
    assert given == GenerationConfig(max_new_tokens=3, do_sample=True, temperature=0.5, eos_token_id=(1,))


def test_a_file_of_hugging_face_is_read() -> None:
    values = {"bos_token_id": 1, "eos_token_id": [2, 3], "do_sample": True, "top_p": 0.9, "transformers_version": "5"}
    config = GenerationConfig.from_dict(values | {"typical_p": 1.0, "use_cache": True, "temperature": None})
    assert config == GenerationConfig(eos_token_id=(2, 3), do_sample=True, top_p=0.9)
    assert config.eos_ids((7,)) == (2, 3)
    assert GenerationConfig().eos_ids((7,)) == (7,)
    assert GenerationConfig(eos_token_id=()).eos_ids((7,)) == ()


@pytest.mark.parametrize("values", [{"typical_p": 0.5}, {"use_cache": False}, {"guidance_scale": 2.0}, {"topk": 5}])
def test_a_field_that_is_not_honoured_is_refused(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ValueError, match=f"{name}={values[name]!r}: generate honours .*; {name} "):
        GenerationConfig.from_dict(values)


def test_max_length_counts_the_prompt() -> None:
    assert GenerationConfig(max_length=12).new_tokens(5) == 7
    assert GenerationConfig().new_tokens(5) == 20
    with pytest.raises(ValueError, match="max_length=12 must be above the 12 tokens of the prompt"):
        GenerationConfig(max_length=12).new_tokens(12)
