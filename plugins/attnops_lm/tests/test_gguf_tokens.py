"""Tokenizers of GGUF files, by hand-worked texts.

On the texts of llama.cpp's test vectors the tokens were equal, by hand, for its files llama-spm, phi-3, llama-bpe,
qwen2, gpt-2, refact and starcoder; and SentencePiece's for Mistral's two models, v1 and v3.
"""

from __future__ import annotations

from typing import Any

import pytest

from attnops_lm.gguf.tokens import tokenizer_from
from attnops_lm.tokenizer import _BYTES

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# Pieces with scores: the pair whose piece has the highest score is joined first.
SCORES = {"ab": -1, "bc": -2, "▁a": -3, "▁ab": -4, "▁▁": -5, "▁▁▁": -6, "▁▁▁▁": -7}
LETTERS = "▁abcn"
MORE = {"<start_of_turn>": CONTROL, "<end_of_turn>": CONTROL, "<b>": USER_DEFINED, "\n\n": USER_DEFINED}


def fields(**changes: Any) -> dict[str, Any]:
    """Those of SentencePiece's BPE; ``__`` is a dot after "tokenizer.ggml"."""
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    types = special | {f"<0x{i:02X}>": BYTE for i in range(256)} | dict.fromkeys([*SCORES, *LETTERS], NORMAL) | MORE
    scores = {letter: -10.0 - i for i, letter in enumerate(LETTERS)} | SCORES
    given = {
        "model": "llama", "tokens": [*types], "token_type": [*types.values()],
        "scores": [float(scores.get(x, 0)) for x in types], "bos_token_id": 1, "eos_token_id": 2,
        "unknown_token_id": 0,
    }  # fmt: skip
    return {f"tokenizer.ggml.{x}": y for x, y in (given | changes).items() if y is not None}


def pieces(text: str, given: dict[str, Any], **options: Any) -> list[str]:
    tokenizer = tokenizer_from(given)
    ids = tokenizer.encode(text, **options)
    assert tokenizer.decode(ids) == text
    return [given["tokenizer.ggml.tokens"][i] for i in ids]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("abc", ["▁ab", "c"]),
        ("cbc", ["▁", "c", "bc"]),
        ("a é", ["▁a", "▁", "<0xC3>", "<0xA9>"]),
        ("a    b", ["▁a", "▁▁▁▁", "b"]),
        ("a   b", ["▁a", "▁▁▁", "b"]),
        ("b<b>a\n\n", ["▁", "b", "<b>", "▁a", "\n\n"]),
    ],
)
def test_pairs_with_the_highest_score_are_joined_first(text: str, wanted: list[str]) -> None:
    if "<b>" in text:  # a space is put before each text between added tokens, and decoded
        assert [fields()["tokenizer.ggml.tokens"][i] for i in tokenizer_from(fields()).encode(text)] == wanted
        return
    assert pieces(text, fields()) == wanted


def test_a_file_without_prefixes_has_none() -> None:
    given = fields(add_space_prefix=False)
    assert pieces("abc ab", given) == ["ab", "c", "▁ab"]
    assert pieces("b<b>a\n\n", given) == ["b", "<b>", "a", "\n\n"]
    assert pieces(" a", given) == ["▁a"]


def test_runs_of_spaces_that_are_never_split_may_be_stored_with_spaces() -> None:
    """As llama.cpp's converter does for Gemma."""
    given = fields(add_space_prefix=False)
    at = given["tokenizer.ggml.tokens"].index("▁▁▁")
    given["tokenizer.ggml.tokens"][at], given["tokenizer.ggml.token_type"][at] = "   ", USER_DEFINED
    assert pieces("a   b", given) == ["a", "   ", "b"]


def test_texts_begin_with_bos_unless_the_file_denies_it() -> None:
    def first(**changes: Any) -> list[str]:
        given = fields(**changes)
        ids = tokenizer_from(given).encode("a", add_special_tokens=True)
        return [given["tokenizer.ggml.tokens"][i] for i in ids]

    assert first() == ["<s>", "▁a"]
    assert first(add_bos_token=False) == ["▁a"]
    assert first(add_eos_token=True) == ["<s>", "▁a", "</s>"]
    tokenizer = tokenizer_from(fields())
    assert tokenizer.eos_ids == (2, fields()["tokenizer.ggml.tokens"].index("<end_of_turn>"))
    assert tokenizer.decode(tokenizer.encode("<s>a</s>")) == "a"
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [-1000.0] * len(fields()["tokenizer.ggml.tokens"])}, "tokenizer.ggml.scores are all -1000, but"),
        ({"scores": None}, "has no field tokenizer.ggml.scores, which is needed"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is set, but texts are not normalised here"),
        ({"model": "t5"}, "tokenizer.ggml.model='t5' must be"),
        ({"eos_token_id": 10_000}, r"eos_token_id=10000 must be below \d+, the number of tokens"),
        ({"eot_token_id": 10_000}, r"eot_token_id=10000 must be below \d+, the number of tokens"),
        ({"unknown_token_id": 10_000}, r"unknown_token_id=10000 must be below \d+, the number of tokens"),
        ({"token_type": [NORMAL]}, r"tokenizer.ggml.token_type has 1 values, but there are \d+ tokens"),
        ({"scores": [0.0]}, r"tokenizer.ggml.scores has 1 values, but there are \d+ tokens"),
        ({"model": "gpt2", "pre": "qwen2", "merges": ["a b c"]}, "merges has 'a b c', which must join two tokens"),
        ({"model": "gpt2", "pre": "qwen2", "merges": ["a é"]}, "merges has 'a é', which must join two tokens"),
        ({"model": "gpt2", "pre": "default"}, "tokenizer.ggml.pre='default' must be one of"),
    ],
)
def test_other_tokenizers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer_from(fields(**changes))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("gpt-2", ["He", "'ll", "Ġpay", "Ġ12345", "McDo", "ĊĊĠ", "Ġnow", "/."]),
        ("refact", ["He", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "McDo", "ĊĊĠ", "Ġnow", "/."]),
        ("gpt-4o", ["He'll", "Ġpay", "Ġ", "123", "45", "Mc", "Do", "ĊĊ", "Ġ", "Ġnow", "/."]),
        ("tekken", ["He", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "Mc", "Do", "ĊĊ", "Ġ", "Ġnow", "/."]),
        ("llama3", ["He", "'ll", "Ġpay", "Ġ", "123", "45", "McDo", "ĊĊ", "Ġ", "Ġnow", "/."]),
        ("qwen2", ["He", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "5", "McDo", "ĊĊ", "Ġ", "Ġnow", "/."]),
    ],
)
def test_texts_are_split_as_the_file_names_it(kind: str, wanted: list[str]) -> None:
    tokens = [*_BYTES, "<|return|>", "<|end|>", "<|endoftext|>"]
    given = {
        "pre": kind, "tokens": tokens, "token_type": [NORMAL] * 256 + [CONTROL] * 3, "merges": [], "eos_token_id": 257
    }  # fmt: skip
    tokenizer = tokenizer_from({f"tokenizer.ggml.{x}": y for x, y in given.items()})
    text = "He'll pay 12345McDo\n\n  now/."
    assert [x for x, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)] == wanted
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_ids == (257, 256, 258)
