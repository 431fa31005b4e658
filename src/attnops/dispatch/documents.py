"""The layout "THD": documents one after the other, as masks and biases of one sequence of all tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.biases import Bias, RelativeBias, ScoreFn
from attnops.masks.ancestors import Ancestors
from attnops.masks.at import At
from attnops.masks.base import And, Mask, Not, Or
from attnops.masks.integers import is_known, numpy_of
from attnops.masks.positions import _Band
from attnops.masks.structure import Band
from attnops.masks.tokens import Segments, cumulative_lengths
from attnops.typing import Array, Index, Leaf

NAMES = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")


class Documents(NamedTuple):
    """The documents of T queries and S keys.

    Attributes:
        segments: the document of each token; padding queries and padding keys are in different ones.
        q: the index of each query in its document, int32 [T].
        kv: the index of each key in its document, int32 [S].
        excess: for each query, how many more keys than queries its document has, int32 [T].
        start: for each query, the first key of its document, int32 [T].
        same: whether queries and keys have the same documents.
    """

    segments: Segments
    q: Array
    kv: Array
    excess: Array
    start: Array
    same: bool


def documents(options: dict[str, Any], T: int, S: int) -> Documents:
    """The documents that the options ``cu_seqlens``, or ``cu_seqlens_q`` and ``cu_seqlens_k``, describe.

    Raises:
        ValueError: the options are missing, exclude each other, or are not cumulative lengths.
    """
    given = [name for name in NAMES if options.get(name) is not None]
    if given not in (["cu_seqlens"], ["cu_seqlens_q", "cu_seqlens_k"]):
        raise ValueError(f"layout='THD' with {given}, but must have cu_seqlens, or both cu_seqlens_q and cu_seqlens_k")
    if len(given) == 1 and T != S:
        raise ValueError(f"query has {T} tokens and key {S}, but one cu_seqlens: give cu_seqlens_q and cu_seqlens_k")
    of_queries, of_keys = options[given[0]], options[given[-1]]
    same = of_queries is of_keys and T == S
    q_ends = _ends(given[0], of_queries, T)
    kv_ends = q_ends if same else _ends(given[-1], of_keys, S)
    if q_ends.shape != kv_ends.shape:
        raise ValueError(
            f"cu_seqlens_q has {q_ends.size} numbers and cu_seqlens_k {kv_ends.size}, but they must have as many: one "
            f"more than documents"
        )
    of_query, q, q_padding = _placed(q_ends, T)
    of_key, kv, kv_padding = (of_query, q, q_padding) if same else _placed(kv_ends, S)
    xp = numpy_of(of_query, of_key)
    if same and is_known(q_padding) and not np.asarray(q_padding).any():
        segments = Segments(of_query)  # each token sees itself
    else:
        segments = Segments(xp.where(q_padding, -1, of_query), xp.where(kv_padding, -2, of_key))
    lengths = xp.diff(kv_ends, prepend=0) - xp.diff(q_ends, prepend=0)
    starts = xp.concatenate([xp.zeros_like(kv_ends[:1]), kv_ends])
    last = xp.minimum(of_query, q_ends.size - 1)
    return Documents(segments, q, kv, lengths[last], starts[last], same)


def _ends(name: str, values: Leaf, length: int) -> Array:
    """Cumulative lengths, int32; traced ones are made to lie between 0 and ``length`` and not to decrease."""
    ends = cumulative_lengths(name, values, length)
    return ends if is_known(ends) else lax.cummax(jnp.clip(ends, 0, length))


def _placed(ends: Array, length: int) -> tuple[Array, Array, Array]:
    """For each token: its document, counted from 1; its index in the document; whether it is padding."""
    xp = numpy_of(ends) if isinstance(length, int) else jnp  # symbolic
    index = xp.arange(length, dtype=np.int32)
    if xp is np:
        document = np.searchsorted(ends, index, side="right").astype(np.int32)
    else:  # `jnp.searchsorted` needs a known number of documents
        document = jnp.cumsum(jnp.zeros(length, np.int32).at[ends].add(1, mode="drop"))
    starts = xp.concatenate([xp.zeros_like(ends[:1]), ends])
    return document, index - starts[document], (document == 0) | (document == ends.size)


def mask_by_document(mask: Mask | None, documents: Documents) -> Mask:
    """``mask`` applied to each document as to a separate sequence; no token sees another document.

    Masks of positions use the tokens' positions in their documents, aligned at the end unless they have an offset;
    masks with given positions (`Mask.at`), and masks of tokens, are unchanged.
    """
    return documents.segments if mask is None else _placed_mask(mask, documents) & documents.segments


def _placed_mask(mask: Any, documents: Documents) -> Mask:
    match mask:
        case And() | Or():
            return type(mask)(_placed_mask(mask.left, documents), _placed_mask(mask.right, documents))
        case Not():
            return Not(_placed_mask(mask.mask, documents))
        case Ancestors():
            raise ValueError(f"{mask!r} is a tree of one sequence, but layout='THD' has documents; use layout='BTHD'")
        case At():
            return mask
        case _Band() if documents.same:
            return mask  # two tokens of a document have the distance of their indices
    if type(mask).at is Mask.at:
        return mask
    q = _query_positions(mask, documents)
    if getattr(mask, "offset", None) is not None:
        mask = mask.with_offset(None)
    if isinstance(mask, _Band):  # as indices of keys, which mostly rise, so that few tiles are PARTIAL
        placed: Mask = mask.at(q + documents.start)
        return placed
    placed = mask.at(q, documents.kv)
    return placed


def _query_positions(of: Any, documents: Documents) -> Array:
    """The position of each query among the keys of its document."""
    offset = 0 if isinstance(of, Band) else getattr(of, "offset", 0)
    if offset is not None and np.shape(offset) != ():
        raise ValueError(
            f"{type(of).__name__}'s offset has shape {np.shape(offset)}, but must be a number with layout='THD'"
        )
    return documents.q + (documents.excess if offset is None else offset)


def bias_by_document(bias: Bias, documents: Documents, shape: tuple[int, int, int, int]) -> Bias:
    """``bias`` applied to each document as to a separate sequence, for scores [1, H, T, S]."""
    kv = documents.kv
    if isinstance(bias, RelativeBias):
        if documents.same:
            return bias
        q = _query_positions(bias, documents)
        bias = dataclasses.replace(bias, offset=0)  # type: ignore[type-var]
    else:
        q = documents.q
    return ScoreFn(_at_positions, (bias.bind(*shape), q, kv))


def _at_positions(
    scores: jax.Array, b: Index, h: Index, q: Index, kv: Index, bias: Bias, q_positions: Array, kv_positions: Array
) -> jax.Array:
    return bias.apply(scores, b, h, q_positions[q], kv_positions[kv])
