"""The text of tokens while they are generated: complete characters, stop strings, and streamers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

_REPLACEMENT = "�"


class TextDecoder(Protocol):
    """The methods that a tokenizer must have."""

    def decode(self, ids: list[int], /) -> str:
        """The text of tokens."""


class Streamer(Protocol):
    """An object that is given tokens while they are generated: the methods of Hugging Face's streamers."""

    def put(self, value: np.ndarray, /) -> None:
        """Called with the prompt [B, P], then with the next token of each row, int32 [B], padding after its end."""

    def end(self) -> None:
        """Called when all rows have ended."""


class Detokenizer:
    """The text of one row, token by token: the pieces that it returns, joined, are the text of all tokens.

    If a token ends within a character, its text is kept until the character is complete. Only the tokens since the last
    whole character, and the tokens of the piece before it, are decoded again.

    Args:
        tokenizer: the tokenizer of the model.
        context: tokens before the first one, such as the prompt's last; their text is not returned. Tokenizers of
            SentencePiece leave out the space that a text begins with, so that without it a word would lack its space.
    """

    def __init__(self, tokenizer: TextDecoder, context: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._ids = list(context)
        if context and tokenizer.decode(self._ids).endswith(_REPLACEMENT):  # the context ends within a character
            self._ids.clear()
        self._before, self._read = 0, len(self._ids)  # where the last piece begins, and where it ends
        self.held = 0  # whole characters of the text that is kept

    def push(self, token: int) -> str:
        """The text that one more token completes."""
        self._ids.append(token)
        return self._take(whole=True)

    def finish(self) -> str:
        """The rest of the text; an incomplete character becomes U+FFFD."""
        return self._take(whole=False)

    def _take(self, *, whole: bool) -> str:
        known = self.tokenizer.decode(self._ids[self._before : self._read])
        text = self.tokenizer.decode(self._ids[self._before :])
        if (whole and text.endswith(_REPLACEMENT)) or len(text) <= len(known):
            self.held = len(text[len(known) :].rstrip(_REPLACEMENT))
            return ""
        self.held = 0
        self._before, self._read = self._read, len(self._ids)
        return text[len(known) :]


class StopStrings:
    """Text up to the first of several stop strings, which may span several pieces of text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.stopped = False
        self._held = ""

    @property
    def held(self) -> int:
        """The number of characters that may begin a stop string."""
        return len(self._held)

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string; empty after one."""
        if self.stopped:
            return ""
        self._held += text
        places = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.stopped = True
            return self._release(min(places), drop=True)
        longest = max((self._overlap(stop) for stop in self.stops), default=0)
        return self._release(len(self._held) - longest)

    def finish(self) -> str:
        """The text that was held back."""
        return self._release(len(self._held))

    def _release(self, size: int, *, drop: bool = False) -> str:
        text, self._held = self._held[:size], "" if drop else self._held[size:]
        return text

    def _overlap(self, stop: str) -> int:
        """The number of last characters that may be the beginning of a stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class TextOfRow:
    """The text of one row until a stop string; ``context`` has the tokens before the first one."""

    def __init__(self, tokenizer: TextDecoder, stops: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._detokenizer, self._stops = Detokenizer(tokenizer, context), StopStrings(stops)
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has occurred."""
        return self._stops.stopped

    @property
    def length(self) -> int:
        """The number of whole characters so far, also those that may begin a stop string or precede a part of one."""
        return len(self.text) + self._stops.held + self._detokenizer.held

    def push(self, token: int) -> str:
        """The text that may be shown after one more token."""
        return self._shown(self._stops.push(self._detokenizer.push(token)))

    def finish(self) -> str:
        """The text that was held back."""
        rest = self._stops.push(self._detokenizer.finish())
        return self._shown(rest + ("" if self.stopped else self._stops.finish()))

    def _shown(self, text: str) -> str:
        self.text += text
        return text


class TextStreamer:
    """A streamer that gives the text of one row to a function, by default `print` without line ends.

    Args:
        tokenizer: the tokenizer of the model.
        show: is called with pieces of text; joined, they are the text of the tokens.
        stops: text ends before the first of these, which `generate` must be given too.
        skip_prompt: whether the prompt is left out.
        eos_ids: tokens that have no text.
    """

    def __init__(
        self,
        tokenizer: TextDecoder,
        show: Callable[[str], object] | None = None,
        *,
        stops: Sequence[str] = (),
        skip_prompt: bool = True,
        eos_ids: Sequence[int] = (),
    ) -> None:
        self.tokenizer, self.skip_prompt, self.stops, self.eos_ids = tokenizer, skip_prompt, stops, frozenset(eos_ids)
        self._show = _print if show is None else show
        self._row = TextOfRow(tokenizer, stops)
        self._is_prompt = True

    def put(self, value: np.ndarray) -> None:
        """Show the text of the prompt, [1, P], at the first call, then of the next token, [1].

        Raises:
            ValueError: there are several rows.
        """
        if value.shape[0] != 1:
            raise ValueError(f"{value.shape[0]} rows are streamed, but a TextStreamer shows the text of one")
        is_prompt, self._is_prompt = self._is_prompt, False
        if is_prompt:
            if not self.skip_prompt:
                self._show(self.tokenizer.decode(value[0].tolist()))
            return
        for token in value.tolist():
            if token not in self.eos_ids and (text := self._row.push(token)):
                self._show(text)

    def end(self) -> None:
        """Show the rest of the text. The streamer can be used again."""
        if text := self._row.finish():
            self._show(text)
        self._row, self._is_prompt = TextOfRow(self.tokenizer, self.stops), True


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
