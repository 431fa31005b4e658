"""A tokenizer of a directory reads whole texts, and begins them as it is asked to."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from .tokenizer import Tokenizer


def test_texts_are_whole_and_special_tokens_added_on_request_alone(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="b"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("a b a b") == [1, 2, 1, 2]
    assert tokenizer.encode("a b a b", add_special_tokens=True) == [0, 1, 2, 1, 2]


@pytest.mark.slow
def test_chat_templates_have_the_functions_of_transformers() -> None:
    template = (
        "{{ strftime_now('%Y')|length }}{% for m in messages %}{% if m.role != 'user' %}"
        "{{ raise_exception('only users') }}{% endif %}{{ m.content|tojson }}{% break %}{% endfor %}"
    )
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.WordLevel({})), template)
    assert tokenizer.chat([{"role": "user", "content": "a<é"}] * 2) == '4"a<é"'
    with pytest.raises(jinja2.TemplateError, match="only users"):
        tokenizer.chat([{"role": "system", "content": "a"}])
