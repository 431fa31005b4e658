"""Text comes in whole characters, and ends before a stop string."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from attnops_lm.generation.text import Detokenizer, StopStrings, TextOfRow, TextStreamer


class Bytes:
    """Token i is byte i."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["plain", "naïve ∀x 🙂 é", "🙂" * 5])
def test_pieces_are_whole_characters_and_joined_are_the_text(text: str) -> None:
    row = Detokenizer(Bytes())
    pieces = [row.push(token) for token in text.encode()]
    assert "".join(pieces) + row.finish() == text
    assert not any("�" in piece for piece in pieces)


def test_a_word_after_a_prompt_has_its_space() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"▁Paris": 0, "▁is": 1, "<end>": 2}))
    words.decoder = decoders.Metaspace()
    words.add_special_tokens(["<end>"])
    for context, first in (((), "Paris"), ((1,), " Paris"), ((1, 1), " Paris"), ((2,), "Paris")):
        row = Detokenizer(words, context)
        assert [row.push(token) for token in (0, 1)] == [first, " is"]
    row = Detokenizer(Bytes(), "🙂".encode()[:2])  # a prompt that ends within a character
    assert row.push(ord("a")) == "a"


def test_a_broken_character_comes_at_the_end() -> None:
    row = Detokenizer(Bytes())
    assert [row.push(token) for token in "a🙂".encode()[:3]] == ["a", "", ""]
    assert row.finish() == "�"


def test_the_length_has_whole_characters_before_a_part_of_one() -> None:
    class Pairs:
        """Tokens of two bytes."""

        def decode(self, ids: list[int]) -> str:
            return b"".join(token.to_bytes(2) for token in ids).decode("utf-8", errors="replace")

    row = TextOfRow(Pairs())
    lengths = []
    for token in (0x61C3, 0xB162, 0x6364):  # "a" and half of "ñ"; the rest of it and "b"; "cd"
        lengths.append(row.length)
        row.push(token)
    assert lengths == [0, 1, 3]
    assert (row.text, row.length) == ("añbcd", 5)


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (100,)])
@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [
        ("one END two", ("END",), "one "),
        ("one EN D two", ("END",), "one EN D two"),
        ("aaab", ("aab",), "a"),
        ("x<|a|>y", ("<|b|>", "<|a|>"), "x"),
        ("ends EN", ("END",), "ends EN"),
        ("first of two", ("two", "of"), "first "),
    ],
)
def test_text_ends_before_the_first_stop_across_pieces(
    text: str, stops: tuple[str, ...], wanted: str, sizes: tuple[int, ...]
) -> None:
    stop, out, at = StopStrings(stops), "", 0
    for size in itertools.cycle(sizes):
        out += stop.push(text[at : at + size])
        assert wanted.startswith(out)  # nothing is taken back
        at += size
        if at >= len(text) or stop.stopped:
            break
    assert out + ("" if stop.stopped else stop.finish()) == wanted
    assert stop.stopped == (wanted != text)


def test_a_streamer_shows_the_text_of_a_row() -> None:
    shown: list[str] = []
    streamer = TextStreamer(Bytes(), shown.append, stops=("STOP",), eos_ids=(0,))
    for _ in range(2):  # it can be used again
        shown.clear()
        streamer.put(np.frombuffer(b"prompt", np.uint8)[None])
        for token in "né STOP".encode() + b"\0":
            streamer.put(np.asarray([token]))
        streamer.end()
        assert "".join(shown) == "né "
    with pytest.raises(ValueError, match="2 rows are streamed, but a TextStreamer shows the text of one"):
        streamer.put(np.zeros(2, np.int32))


def test_the_text_of_a_row_is_what_was_shown() -> None:
    row = TextOfRow(Bytes(), ("!",))
    shown = [row.push(token) for token in b"ab!c"]
    assert ("".join(shown) + row.finish(), row.text, row.stopped) == ("ab", "ab", True)
