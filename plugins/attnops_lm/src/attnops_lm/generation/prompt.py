"""The prompts of a batch: left or right padding, and chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

# Longer chunks would gain nothing, and short prompts should not be padded to long chunks.
LARGEST_CHUNK, SMALLEST_CHUNK = 512, 16


class Prompt(NamedTuple):
    """B prompts.

    Attributes:
        tokens: int32 [B, P], padding included.
        starts: int32 [B], the number of left padding tokens.
        lengths: int32 [B], the length of each row with its left padding; right padding follows.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def repeated(self, times: int) -> Prompt:
        """Each row repeated ``times`` times, in consecutive rows."""
        return self if times == 1 else Prompt(*(np.repeat(x, times, axis=0) for x in self))

    def chunks(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Chunks of all tokens but the last of each row: int32 [B, size], and the number of real ones, int32 [B]."""
        longest = int(self.lengths.max()) - 1
        padded = np.pad(self.tokens, ((0, 0), (0, max(0, longest + size - self.tokens.shape[1]))))
        for first in range(0, longest, size):
            yield padded[:, first : first + size], np.clip(self.lengths - 1 - first, 0, size).astype(np.int32)

    def history(self, used: np.ndarray, length: int) -> np.ndarray:
        """Tokens by index, int32 [B, length]; −1 for padding, and for the ``used[b]`` tokens before the prompt."""
        tokens = np.full((len(self.lengths), length), -1, np.int32)
        for b, (start, end) in enumerate(zip(self.starts, self.lengths, strict=True)):
            tokens[b, used[b] + start : used[b] + end] = self.tokens[b, start:end]
        return tokens


def read_prompt(input_ids: Any, attention_mask: Any, vocab_size: int) -> Prompt:
    """Prompts from tokens and their mask.

    Args:
        input_ids: integers [B, P]; or lists of integers of different lengths, which are padded right.
        attention_mask: [B, P], 0 or False for padding, which is left or right of a row's tokens; None: no padding.
        vocab_size: V.

    Raises:
        ValueError: another shape or dtype, a token outside the vocabulary, a row without tokens, or padding between
            tokens.
    """
    if isinstance(input_ids, jax.core.Tracer) or isinstance(attention_mask, jax.core.Tracer):
        raise ValueError("input_ids or attention_mask is traced: generate compiles its own steps; call it outside jit")
    _refuse_text(input_ids)
    input_ids, attention_mask = _padded(input_ids, attention_mask)
    tokens = np.asarray(input_ids)
    if tokens.size == 0:
        raise ValueError(f"input_ids have shape {tokens.shape}, but every row must have a token to start from")
    if tokens.dtype.kind in "iu" and tokens.ndim == 1:
        raise ValueError(
            f"input_ids have shape {tokens.shape}, but must be integers [B, P]; for one prompt give [input_ids]"
        )
    if tokens.dtype.kind not in "iu" or tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"input_ids are {tokens.dtype} {tokens.shape}, but must be integers [B, P]")
    B, P = tokens.shape
    if attention_mask is None:
        is_real = np.ones((B, P), bool)
    else:
        is_real = np.asarray(attention_mask) != 0
        if is_real.shape != (B, P):
            raise ValueError(f"attention_mask has shape {is_real.shape}, but must have that of input_ids, {(B, P)}")
    count = is_real.sum(axis=1)
    for b in np.flatnonzero(count == 0):
        raise ValueError(f"attention_mask[{b}] is all 0, but a row must have a token to start from")
    starts = is_real.argmax(axis=1)
    lengths = P - is_real[:, ::-1].argmax(axis=1)
    for b in np.flatnonzero(lengths - starts != count):
        raise ValueError(
            f"attention_mask[{b}] has {lengths[b] - starts[b] - count[b]} zeros between tokens {starts[b]} and "
            f"{lengths[b] - 1}: padding must be left or right of a row's tokens"
        )
    real = tokens[is_real]
    if real.min() < 0 or real.max() >= vocab_size:
        raise ValueError(
            f"input_ids has tokens from {real.min()} to {real.max()}, but the vocabulary is 0 to {vocab_size - 1}"
        )
    tokens = np.where(is_real, tokens, 0).astype(np.int32)
    return Prompt(tokens, starts.astype(np.int32), lengths.astype(np.int32))


def _refuse_text(input_ids: Any) -> None:
    """Raise if the prompts are text."""
    is_list = isinstance(input_ids, (list, tuple)) and bool(input_ids)
    if (
        isinstance(input_ids[0] if is_list else input_ids, str)
        or getattr(input_ids, "dtype", np.dtype(int)).kind in "US"
    ):
        given = f"[{input_ids[0]!r}, ...]" if is_list else repr(input_ids)
        raise ValueError(
            f"input_ids={given} is text, but must be tokens, integers [B, P]; give [tokenizer.encode(text)]"
        )


def _padded(input_ids: Any, attention_mask: Any) -> tuple[Any, Any]:
    """Lists of different lengths as an array, and its mask."""
    if not isinstance(input_ids, (list, tuple)) or not all(np.ndim(row) == 1 for row in input_ids):
        return input_ids, attention_mask
    lengths = [len(row) for row in input_ids]
    if len(set(lengths)) < 2:
        return input_ids, attention_mask
    if attention_mask is not None:
        raise ValueError(f"input_ids has rows of {lengths} tokens, which need no attention_mask; leave it out")
    if 0 in lengths:
        raise ValueError(f"input_ids[{lengths.index(0)}] is empty, but a row must have a token to start from")
    rows = [np.asarray(row) for row in input_ids]
    padded = np.zeros((len(rows), max(lengths)), np.result_type(*rows))
    for row, tokens in zip(padded, rows, strict=True):
        row[: len(tokens)] = tokens
    return padded, np.arange(max(lengths)) < np.asarray(lengths)[:, None]


def chunk_size(given: int | None, tokens: int, most: int | None) -> int:
    """The number of tokens of a prompt that are computed at a time.

    Args:
        given: the size that the caller sets. None: equal chunks of at most `LARGEST_CHUNK`, padded to one of the four
            sizes between two powers of two, for little padding and few programs.
        tokens: the tokens of the longest prompt.
        most: the most tokens that can be appended to a cache at a time; None for no limit.

    Raises:
        ValueError: ``given`` is more than ``most``, or is not an int of at least 1.
    """
    if given is None:
        part = -(-tokens // max(1, -(-tokens // LARGEST_CHUNK)))
        unit = max(1 << max(part - 1, 0).bit_length() >> 3, SMALLEST_CHUNK)
        size = max(-(-part // unit), 1) * unit
        return size if most is None else min(size, most)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"chunk={given!r} must be an int of at least 1, or None")
    if most is not None and given > most:
        raise ValueError(f"chunk={given} must be at most the WindowCache's max_append={most}")
    return given
