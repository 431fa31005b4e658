"""Pads lengths and masks to few distinct sizes, so that calls of many lengths share compiled programs."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from attnops.masks import And, Causal, KeyPadding, Lengths, Mask
from attnops.programs.pytree import replaced
from attnops.typing import Leaf

# The least padded S if T ≠ S: the keys are then in a growing cache.
_CACHE = 64


def bucket(length: int) -> int:
    """The padded length: a power of 2 up to 64, a multiple of 64 up to 512, beyond that at most an eighth more."""
    if length <= 64:
        return 1 << (length - 1).bit_length()
    step = max(64, 1 << ((length - 1).bit_length() - 4))
    return -(-length // step) * step


def bucket_lengths(T: int, S: int) -> tuple[int, int]:
    """The lengths to which T queries and S keys are padded."""
    return bucket(T), bucket(S) if T == S > 1 else max(bucket(S), _CACHE)


def pad_mask(mask: Mask, B: int, H: int, T: int, S: int) -> Mask:
    """A mask of scores [B, H, T, S], padded to `bucket_lengths` so that no query sees a padding key.

    Numbers that differ between decoding steps, such as offsets, become arrays: masks of one structure share programs.
    """
    bound, lengths = mask.bind(B, H, T, S), bucket_lengths(T, S)
    padded = _padded(bound, (T, S), lengths)
    if not _hides_padding(bound, T, S) and (T == 1 or lengths != (T, S)):
        padded = padded & Lengths(np.full(B, S, np.int32))
    return jax.device_put(padded)


def _hides_padding(mask: Mask, T: int, S: int) -> bool:
    """Whether a padded mask of T queries already hides all keys from S on."""
    match mask:
        case And():
            return _hides_padding(mask.left, T, S) or _hides_padding(mask.right, T, S)
        case Causal():
            return isinstance(mask.offset, int) and mask.offset + T <= S
    return isinstance(mask, KeyPadding)


def _padded(mask: Mask, lengths: tuple[int, int], wanted: tuple[int, int]) -> Mask:
    """A bound mask with its arrays of tokens padded, by False or the last token's value, and offsets as arrays."""
    changes: dict[str, Leaf] = {}
    for field in dataclasses.fields(mask):  # type: ignore[arg-type]
        value = getattr(mask, field.name)
        if isinstance(value, Mask):
            changes[field.name] = _padded(value, lengths, wanted)
        elif field.name == "offset" and isinstance(value, int) and value:
            changes[field.name] = np.full((1, 1), value, np.int32)
        elif hasattr(value, "shape"):
            changes[field.name] = _padded_array(np.asarray(value), (mask.axes or {})[field.name], lengths, wanted)
    return replaced(mask, changes)


def _padded_array(values: np.ndarray, letters: str, lengths: tuple[int, int], wanted: tuple[int, int]) -> np.ndarray:
    more = dict(zip("ts", zip(lengths, wanted, strict=True), strict=True))
    by_axis = [more.get(letter, (size, size)) for letter, size in zip(letters, values.shape, strict=True)]
    widths = [(0, new - old if size == old else 0) for size, (old, new) in zip(values.shape, by_axis, strict=True)]
    return np.pad(values, widths, mode="constant" if values.dtype == np.bool_ else "edge")
