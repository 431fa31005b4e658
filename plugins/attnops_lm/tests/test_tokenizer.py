"""A `Tokenizer` from a directory encodes whole texts, and adds special tokens on request only."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import jinja2
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from attnops_lm.origin import Origin
from attnops_lm.tokenizer import Tokenizer


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
def test_other_threads_run_while_a_long_text_is_read() -> None:
    tokenizer, text = words(), "a é " * 300_000
    began, ended = threading.Event(), threading.Event()

    def read() -> None:
        began.set()
        tokenizer.encode(text)
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    began.wait()
    turns = 0
    while not ended.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 10  # 1 if the tokenizer held the interpreter's lock


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


def words() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "é": 3}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unknown_token": "a"}
    return Tokenizer(backend, "{% for m in messages %}{{ m.content }} é {% endfor %}", special, [1])


def check_equal(found: Tokenizer, expected: Tokenizer) -> None:
    assert found.encode("a é a") == expected.encode("a é a") == [2, 3, 2]
    turns = [{"role": "user", "content": "a"}]
    assert found.chat(turns) == expected.chat(turns) == "a é "
    assert found.eos_ids == expected.eos_ids


def test_what_a_tokenizer_writes_it_reads_again(tmp_path: Path) -> None:
    words().save_pretrained(tmp_path)
    check_equal(Tokenizer.from_pretrained(tmp_path), words())


def test_a_template_for_tools_is_used_with_tools_alone(tmp_path: Path) -> None:
    words().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "{{ tools[0] }} é"}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": templates}))
    found = Tokenizer.from_pretrained(tmp_path)
    found.save_pretrained(tmp_path)
    for tokenizer in (found, Tokenizer.from_pretrained(tmp_path)):
        assert tokenizer.chat([]) == tokenizer.chat([], tools=[]) == "a"
        assert tokenizer.chat([], tools=["x"]) == "x é"  # type: ignore[list-item]


def test_a_directory_without_a_tokenizer_is_told_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=f"{tmp_path} has no tokenizer.json: copy it, and tokenizer_config.json"
    ):
        Tokenizer.from_pretrained(tmp_path)


def test_a_tokenizer_goes_from_the_directory_of_a_model_to_where_it_is_saved(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    Origin().write_tokenizer(new)
    Origin(old).write_tokenizer(new)  # which has none
    assert not list(new.iterdir())
    words().save_pretrained(old)
    (old / "chat_template.jinja").write_text("{{ messages[0].content }} é ", encoding="utf-8")
    (old / "weights").write_text("")
    for target in (new, old):
        Origin(old).write_tokenizer(target)
        check_equal(Tokenizer.from_pretrained(target), words())
    assert not (new / "weights").exists()
    with pytest.warns(UserWarning, match="is written without a tokenizer: .*gone, where the model was loaded from, is"):
        Origin(tmp_path / "gone").write_tokenizer(new)


def test_the_bytes_of_tokens_joined_are_the_text() -> None:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3} | {f"<0x{i:02X}>": 4 + i for i in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    found, text = Tokenizer(backend), "a a€ a"
    ids = found.encode(f"<s>{text}")
    assert [found.token_bytes(x) for x in ids] == [b"<s>", b"a", b" a", b"\xe2", b"\x82", b"\xac", b" a"]
    assert found.token_bytes(10_000) == b""
    backend.add_tokens(["▁▁"])  # runs of spaces, as in Gemma's vocabulary
    assert found.decode(found.encode("a▁▁a")) == "a  a"
    assert Tokenizer(backend).token_bytes(backend.token_to_id("▁▁")) == b"  "
