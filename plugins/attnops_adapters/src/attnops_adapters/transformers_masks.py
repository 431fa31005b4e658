"""Masks of transformers' models as expressions of attnops' masks.

A model creates its mask once and gives it to all its attention layers. It describes the mask as a function of indices,
composed of a few known ones; `structured` makes the same expression of attnops' masks, without a T × S array.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from transformers import masking_utils

from attnops.masks import Causal, Chunked, Dense, Full, KeyPadding, Mask, PrefixLM, Segments, SlidingWindow
from attnops_adapters.buckets import pad_mask
from attnops_adapters.torch_arrays import to_jax


class ExpressionTensor(torch.Tensor):
    """A mask in the form of a tensor [B, 1, T, S] with one element of memory, since models pass on only tensors.

    Its values mean nothing: all functions except those in `_PASSED_ON` and `_READS_NO_VALUES` raise a `TypeError`.
    """

    mask: Mask
    _padded: dict[tuple[int, int], Mask]

    @classmethod
    def create(cls, mask: Mask, shape: tuple[int, int, int]) -> ExpressionTensor:
        B, T, S = shape
        self = torch.zeros((), dtype=torch.bool).expand(B, 1, T, S).as_subclass(cls)
        self.mask = mask
        self._padded = {}
        return self

    def padded(self, B: int, H: int) -> Mask:
        """The mask of `pad_mask`, made once for all layers of H heads."""
        if (B, H) not in self._padded:
            T, S = self.shape[2:]
            self._padded[B, H] = pad_mask(self.mask, B, H, T, S)
        return self._padded[B, H]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _PASSED_ON:
            return args[0]
        if name in _READS_NO_VALUES:
            result = super().__torch_function__(func, types, args, kwargs)
            if not isinstance(result, torch.Tensor):
                return result
        if name == "to" and super().__torch_function__(func, types, args, kwargs).dtype == torch.bool:
            return args[0]
        raise TypeError(f"{name} must not be called on attnops' mask, which has no values; pass the mask on unchanged")


# Functions that return the mask as it is, and functions that read no values; properties are "__get__".
_PASSED_ON: Final = frozenset({"contiguous", "detach", "requires_grad_"})
_READS_NO_VALUES: Final = frozenset({
    "__get__", "size", "dim", "ndimension", "numel", "is_contiguous", "is_floating_point", "is_complex", "data_ptr",
    "untyped_storage", "element_size", "__len__", "get_device", "stride", "storage_offset",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Indices:
    """The indices, among all tokens, of the queries and keys for which a model's mask function is evaluated."""

    batch: int
    queries: range
    keys: range
    offset: int | None  # of the first query from the first key; None where positions are given

    def at_queries(self, tokens: torch.Tensor) -> np.ndarray:
        """The columns of ``tokens`` at the indices of the queries, [B, T]."""
        return tokens.numpy()[:, self.queries.start : self.queries.stop]

    def at_keys(self, tokens: torch.Tensor) -> np.ndarray:
        """The columns of ``tokens`` at the indices of the keys, [B, S]."""
        return tokens.numpy()[:, self.keys.start : self.keys.stop]

    def dense(self, function: Callable[..., torch.Tensor]) -> Mask:
        """The mask of a function whose structure is not known: an array of its values."""
        lengths = (self.batch, len(self.queries), len(self.keys), self.queries.start, self.keys.start)
        values = masking_utils.sdpa_mask(*lengths, function, allow_is_causal_skip=False, use_vmap=True)
        return Dense(to_jax(values))


def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **ignored: Any,
) -> ExpressionTensor:
    """The mask that a model's layers give to `attention`. Never None: each layer would then choose a mask.

    Args:
        batch_size: B.
        q_length: T.
        kv_length: S.
        q_offset: the index of the first query.
        kv_offset: the index of the first key.
        mask_function: a function of indices (b, h, q, kv) that says whether the query sees the key.
        attention_mask: [B, tokens so far], False for padding.
        ignored: arguments that only other implementations need.
    """
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    queries, keys = range(q_offset, q_offset + q_length), range(kv_offset, kv_offset + kv_length)
    indices = Indices(batch_size, queries, keys, q_offset - kv_offset)
    mask = structured(mask_function, indices)
    if attention_mask is not None:
        tokens = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        mask = mask & KeyPadding(indices.at_keys(tokens))
    return ExpressionTensor.create(mask, (batch_size, q_length, kv_length))


def structured(function: Callable[..., torch.Tensor], indices: Indices) -> Mask:
    """The mask that a function of transformers' `masking_utils` describes, by its name and closure; else an array."""
    known = getattr(function, "__module__", None) == masking_utils.__name__
    translate = STRUCTURES.get(function.__qualname__.partition(".")[0]) if known else None
    result = translate(indices, **inspect.getclosurevars(function).nonlocals) if translate else None
    return indices.dense(function) if result is None else result


def _union(indices: Indices, mask_functions: tuple[Callable[..., torch.Tensor], ...]) -> Mask:
    masks = [structured(function, indices) for function in mask_functions]
    match masks:
        case [Causal(offset=0), Segments(q_ids=ids)] if (lengths := _prefix_lengths(ids)) is not None:
            return PrefixLM(lengths, 0)
    return functools.reduce(operator.or_, masks)


def _prefix_lengths(ids: np.ndarray) -> np.ndarray | None:
    """The length of each row's block, [B, 1]; None unless each row has at most one block, at its start."""
    lengths = (ids >= 0).sum(1, keepdims=True)
    inside = np.arange(ids.shape[1]) < lengths
    return lengths if np.array_equal(np.where(inside, ids[:, :1], -1), ids) else None


def _intersection(indices: Indices, mask_functions: tuple[Callable[..., torch.Tensor], ...]) -> Mask:
    return functools.reduce(operator.and_, [structured(function, indices) for function in mask_functions])


def _chunks(indices: Indices, chunk_size: int, left_padding: torch.Tensor) -> Mask:
    """Chunks counted from the first token of each row."""
    start = left_padding.numpy()[:, None]
    return Chunked(chunk_size).at(np.array(indices.queries) - start, np.array(indices.keys) - start)


def _blocks(indices: Indices, block_sequence_ids: torch.Tensor) -> Mask:
    """Tokens see only tokens of the same block; a token with a negative id sees none."""
    q_ids, kv_ids = indices.at_queries(block_sequence_ids), indices.at_keys(block_sequence_ids)
    return Segments(np.where(q_ids < 0, -1, q_ids), np.where(kv_ids < 0, -2, kv_ids))


def _packed(indices: Indices, packed_sequence_mask: torch.Tensor) -> Mask:
    return Segments(indices.at_queries(packed_sequence_mask), indices.at_keys(packed_sequence_mask))


def _remapped(indices: Indices, mask_function: Callable[..., torch.Tensor], position_ids: torch.Tensor) -> Mask | None:
    """A mask of positions in the tokens' own sequences."""
    inner = structured(mask_function, dataclasses.replace(indices, offset=None))
    if not inner.kinds() <= {"Causal", "SlidingWindow", "Chunked", "at", "&", "|"}:
        return None  # it would read a token's array at a position, which is not the token's index
    return inner.at(indices.at_queries(position_ids), indices.at_keys(position_ids))


def _padding(indices: Indices, padding_mask: torch.Tensor) -> Mask:
    return KeyPadding(indices.at_keys(padding_mask))


def _causal(indices: Indices) -> Mask:
    return Causal(indices.offset)


def _all(indices: Indices) -> Mask:
    return Full()


def _window(indices: Indices, sliding_window: int) -> Mask:
    return SlidingWindow(sliding_window - 1, None, indices.offset)


def _window_both_ways(indices: Indices, sliding_window: int) -> Mask:
    return SlidingWindow(sliding_window, sliding_window, indices.offset)


STRUCTURES: dict[str, Callable[..., Mask | None]] = {
    "causal_mask_function": _causal,
    "bidirectional_mask_function": _all,
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": _window_both_ways,
    "chunked_overlay": _chunks,
    "blockwise_overlay": _blocks,
    "packed_sequence_mask_function": _packed,
    "remap_positions_for_packed_sequence": _remapped,
    "padding_mask_function": _padding,
    "and_masks": _intersection,
    "or_masks": _union,
}
