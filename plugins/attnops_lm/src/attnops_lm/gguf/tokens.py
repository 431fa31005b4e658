"""The tokenizers of GGUF files: byte-level BPE ("gpt2") and SentencePiece's BPE ("llama")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from attnops_lm.gguf.file import required
from attnops_lm.tokenizer import Tokenizer

# GGUF's types of tokens: special ones, and others that are never split.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
# End a turn or a text, also where a file names only another token: those of the families here in llama.cpp's list.
_ENDS: Final = (
    "<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<end_of_turn>", "<|return|>", "<|call|>", "<|endoftext|>"
)  # fmt: skip
_SPACE: Final = "▁"  # SentencePiece's


class _Split(NamedTuple):
    """How a text is split before byte-level BPE."""

    pattern: str | None  # None: single digits, or all of a number, and GPT-2's expression
    single_digits: bool = False  # without a pattern
    begins: bool = False  # texts begin with BOS, also where the file doesn't say it
    ignore_merges: bool = False  # a whole word that is a token is that token
    normalizer: Any = None


# The expressions of transformers' tokenizers.
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_QWEN: Final = _Split(_WORDS % "", normalizer=normalizers.NFC())
_LLAMA3: Final = _Split(_WORDS % "{1,3}", begins=True, ignore_merges=True)
# By the name in GGUF files.
SPLITS: Final = {
    "gpt-2": _Split(None),
    "smollm": _Split(None, single_digits=True), "refact": _Split(None, single_digits=True),
    "starcoder": _Split(None, single_digits=True),
    "qwen2": _QWEN, "deepseek-r1-qwen": _QWEN,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "tekken": _Split(_CASES % ("", "", ""), begins=True, ignore_merges=True),
    "gpt-4o": _Split(_CASES % (_SUFFIX, _SUFFIX, "{1,3}")),
}  # fmt: skip


def tokenizer_from(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's fields describe.

    Raises:
        ValueError: it is of another kind, or a field is missing.
    """
    kind = fields.get("tokenizer.ggml.model", "gpt2")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model={kind!r} must be 'gpt2' (byte-level BPE) or 'llama' (SentencePiece)")
    _check(fields)
    begins = kind == "llama"
    if begins:
        backend = _sentence_piece(fields)
    else:
        backend, begins = _byte_level(fields)
    tokens, types = (required(fields, f"tokenizer.ggml.{x}") for x in ("tokens", "token_type"))
    special = (_CONTROL, _UNKNOWN) if kind == "llama" else (_CONTROL,)
    backend.add_tokens([
        AddedToken(token, special=of in special, normalized=False)
        for token, of in zip(tokens, types, strict=True)
        if of in (*special, _USER_DEFINED) and token
    ])  # fmt: skip
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown")}
    adds = {
        "bos": fields.get("tokenizer.ggml.add_bos_token", begins and ids["bos"] is not None),
        "eos": fields.get("tokenizer.ggml.add_eos_token", False),  # of models for embeddings
    }
    bos, eos = ([tokens[required(fields, f"tokenizer.ggml.{x}_token_id")]] if adds[x] else [] for x in adds)
    if bos or eos:
        backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos], pair=[*bos, "$A", *eos, *bos, "$B", *eos],
            special_tokens=[(token, backend.token_to_id(token)) for token in (*bos, *eos)],
        )  # fmt: skip
    template, tool_template = (fields.get(f"tokenizer.chat_template{x}") for x in ("", ".tool_use"))
    named = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    return Tokenizer(backend, template, named, eos_ids_of(fields), tool_template)


def eos_ids_of(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens with which a text or a turn ends, by a GGUF file's fields."""
    more = (fields.get(f"tokenizer.ggml.{x}_token_id") for x in ("eot", "eom"))
    _check(fields)
    tokens, types = (required(fields, f"tokenizer.ggml.{x}") for x in ("tokens", "token_type"))
    named = (i for i, (token, of) in enumerate(zip(tokens, types, strict=True)) if of == _CONTROL and token in _ENDS)
    ids = [required(fields, "tokenizer.ggml.eos_token_id"), *(x for x in more if x is not None), *named]
    return tuple(dict.fromkeys(int(x) for x in ids))


def _check(fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` if lists of tokens differ in length, or a token's number is beyond them."""
    count = len(required(fields, "tokenizer.ggml.tokens"))
    for name in ("token_type", "scores"):
        if (found := len(fields.get(f"tokenizer.ggml.{name}", range(count)))) != count:
            raise ValueError(f"tokenizer.ggml.{name} has {found} values, but there are {count} tokens")
    for name in ("bos", "eos", "eot", "eom", "unknown"):
        if not 0 <= (token := fields.get(f"tokenizer.ggml.{name}_token_id", 0)) < count:
            raise ValueError(f"tokenizer.ggml.{name}_token_id={token} must be below {count}, the number of tokens")


def _byte_level(fields: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE, and whether texts begin with BOS."""
    if (name := fields.get("tokenizer.ggml.pre")) not in SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre={name!r} must be one of {', '.join(SPLITS)}; others split text in another way"
        )
    split = SPLITS[name]
    tokens, merges = (required(fields, f"tokenizer.ggml.{x}") for x in ("tokens", "merges"))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise ValueError(f"tokenizer.ggml.merges has {' '.join(pair)!r}, which must join two tokens to a third one")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=split.ignore_merges))
    first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    if split.pattern is not None:
        first = [pre_tokenizers.Split(tokenizers.Regex(split.pattern), "isolated")]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, bytes_])
    if split.normalizer is not None:
        backend.normalizer = split.normalizer
    backend.decoder = decoders.ByteLevel()
    return backend, split.begins


def _sentence_piece(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: the pair whose token has the highest score is joined first; other characters are bytes."""
    for name in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if fields.get(f"tokenizer.ggml.{name}"):
            raise ValueError(f"tokenizer.ggml.{name} is set, but texts are not normalised here; use safetensors")
    tokens, scores, types = (required(fields, f"tokenizer.ggml.{x}") for x in ("tokens", "scores", "token_type"))
    normal = {token: i for i, (token, of) in enumerate(zip(tokens, types, strict=True)) if of == _NORMAL}
    if len(normal) > 1 and len(same := {scores[i] for i in normal.values()}) == 1:
        raise ValueError(
            f"tokenizer.ggml.scores are all {same.pop():g}, but must say which pair of pieces is joined first: convert "
            f"the model again, with its tokenizer.model, or use safetensors"
        )
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    options = {"unk_token": tokens[unknown], "fuse_unk": True, "byte_fallback": True}
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(normal, scores), **options))
    is_prefixed = fields.get("tokenizer.ggml.add_space_prefix", True)
    prefix: list[Any] = [normalizers.Prepend(_SPACE)] if is_prefixed else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if is_prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, the best first; of pairs for one piece, as in runs of spaces, the one
    whose left piece is longer, since SentencePiece joins from the left.
    """
    found = [
        (-scores[i], -at, piece[:at], piece[at:])
        for piece, i in pieces.items()
        for at in range(1, len(piece))
        if piece[:at] in pieces and piece[at:] in pieces
    ]
    return [(left, right) for *_, left, right in sorted(found)]
