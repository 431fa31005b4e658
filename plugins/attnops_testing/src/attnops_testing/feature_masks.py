"""The masks of the conformance suite, each with its expected booleans, computed only in NumPy.

A case is a function of (B, H, T, S) that returns the mask and booleans that broadcast to [B, H, T, S].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from attnops.masks import (
    Ancestors,
    Blocks,
    Causal,
    Chunked,
    Dense,
    KeyPadding,
    Lengths,
    Mask,
    MaskFn,
    PrefixLM,
    Segments,
    SlidingWindow,
)

Array = np.ndarray[Any, Any]


class ExpectedMask(NamedTuple):
    """A mask and its expected booleans, [B or 1, H or 1, T or 1, S or 1]."""

    mask: Mask
    visible: Array


MaskCase = Callable[[int, int, int, int], ExpectedMask]


class Padding(NamedTuple):
    """A mask, its expected booleans, and which tokens it hides: booleans [B, length] for query, key and value."""

    mask: Mask
    visible: Array
    hidden: dict[str, Array]


def _positions(T: int, S: int) -> tuple[Array, Array]:
    """Positions of queries, [T, 1], and of keys, [1, S]; the last query is at the last key."""
    return np.arange(T)[:, None] + S - T, np.arange(S)[None, :]


def _causal(B: int, H: int, T: int, S: int) -> ExpectedMask:
    q, kv = _positions(T, S)
    return ExpectedMask(Causal(), (kv <= q)[None, None])


def _offset(B: int, H: int, T: int, S: int) -> ExpectedMask:
    q, kv = np.arange(T)[:, None], np.arange(S)[None, :]
    return ExpectedMask(Causal(offset=3), (kv <= q + 3)[None, None])


def _window(B: int, H: int, T: int, S: int) -> ExpectedMask:
    q, kv = _positions(T, S)
    left = 5 if S <= 128 else S // 2 - 7  # in a long problem a window begins in one tile of 128 and ends in another
    return ExpectedMask(SlidingWindow(left, 2), ((q - left <= kv) & (kv <= q + 2))[None, None])


def _chunked(B: int, H: int, T: int, S: int) -> ExpectedMask:
    q, kv = _positions(T, S)
    return ExpectedMask(Chunked(7), (q // 7 == kv // 7)[None, None])


def _prefix(B: int, H: int, T: int, S: int) -> ExpectedMask:
    q, kv = _positions(T, S)
    return ExpectedMask(PrefixLM(S // 2), ((kv <= q) | (kv < S // 2))[None, None])


def _ids(B: int, length: int) -> Array:
    """Three documents per row, with other borders in each row, [B, length]."""
    return (np.arange(length)[None, :] * 3 + 2 * np.arange(B)[:, None]) // length


def _segments(B: int, H: int, T: int, S: int) -> ExpectedMask:
    q, kv = _ids(B, T), _ids(B, S)
    return ExpectedMask(Segments(q, kv), (q[:, :, None] == kv[:, None, :])[:, None])


def _kv_lengths(B: int, S: int) -> Array:
    return np.maximum(S - 5 * np.arange(1, B + 1), 1)


def _lengths(B: int, H: int, T: int, S: int) -> ExpectedMask:
    lengths = _kv_lengths(B, S)
    return ExpectedMask(Lengths(lengths), (np.arange(S) < lengths[:, None])[:, None, None, :])


def _is_token(B: int, S: int) -> Array:
    """Which keys are tokens, [B, S]: with holes, and with another first token in each row."""
    kv = np.arange(S)[None, :]
    return (kv >= 2 * np.arange(B)[:, None]) & (kv % 5 != 3)


def _key_padding(B: int, H: int, T: int, S: int) -> ExpectedMask:
    tokens = _is_token(B, S)
    return ExpectedMask(KeyPadding(tokens), tokens[:, None, None, :])


def _dense(B: int, H: int, T: int, S: int) -> ExpectedMask:
    array = np.random.default_rng(7).random((B, H, T, S)) < 0.5
    return ExpectedMask(Dense(array), array)


def _blocks(B: int, H: int, T: int, S: int) -> ExpectedMask:
    """Blocks that are no multiple of a tile; of more than two heads, two share a choice. Some queries see no key."""
    n = max(H // 2, 2) if H % 2 == 0 else H
    chosen = np.random.default_rng(13).random((B, n, -(-T // 12), -(-S // 7))) < 0.4
    return ExpectedMask(Blocks(chosen, 12, 7), _by_token(chosen, 12, 7, (H, T, S)))


def _block_indices(B: int, H: int, T: int, S: int) -> ExpectedMask:
    """The indices of blocks of 16 tokens, two of each row, of which one may be -1."""
    nq, nk = -(-T // 16), -(-S // 16)
    rng = np.random.default_rng(14)
    indices = np.stack([rng.integers(-1, nk, (B, 1, nq)), rng.integers(0, nk, (B, 1, nq))], axis=3)
    chosen = (indices[..., None] == np.arange(nk)).any(axis=3)
    return ExpectedMask(Blocks(indices, 16, 16), _by_token(chosen, 16, 16, (H, T, S)))


def _by_token(chosen: Array, q_block: int, kv_block: int, sizes: tuple[int, int, int]) -> Array:
    """Which keys each query sees [B, H, T, S], from the chosen blocks [B, n, nq, nk] and H, T and S."""
    H, T, S = sizes
    by_head = np.repeat(chosen, H // chosen.shape[1], axis=1)
    return by_head[:, :, np.arange(T) // q_block][..., np.arange(S) // kv_block]


def _dense_broadcast(B: int, H: int, T: int, S: int) -> ExpectedMask:
    array = np.random.default_rng(8).random((1, H, 1, S)) < 0.5
    return ExpectedMask(Dense(array), array)


def _tree(B: int, T: int) -> Array:
    """The parents of drafted tokens, with several roots, deep and shallow branches, [B, T]."""
    rng = np.random.default_rng(12)
    recent = np.arange(T) - 1 - rng.integers(0, 3, (B, T))
    return np.maximum(
        np.where(rng.random((B, T)) < 0.3, rng.integers(-1, T, (B, T)) % (np.arange(T) + 1) - 1, recent), -1
    )


def _descends(parents: Array, offset: Array, S: int) -> Array:
    """Which keys each drafted token sees, found by walking up from it to its root, [B, 1, T, S]."""
    B, T = parents.shape
    seen = np.broadcast_to(np.arange(S) < offset[:, None, None], (B, T, S)).copy()
    for b, i in np.ndindex(B, T):
        token = i
        while token >= 0:
            if 0 <= token + offset[b] < S:
                seen[b, i, token + offset[b]] = True
            token = parents[b, token]
    return seen[:, None]


def _ancestors(B: int, H: int, T: int, S: int) -> ExpectedMask:
    parents = _tree(B, T)
    return ExpectedMask(Ancestors(parents), _descends(parents, np.full(B, S - T), S))


def _ancestors_at(B: int, H: int, T: int, S: int) -> ExpectedMask:
    """A mask as over a cache whose rows differ in length: no query sees the keys after the drafted ones."""
    parents, committed = _tree(B, T), np.maximum(S // 2 - 3 * np.arange(B), 0)
    mask = Ancestors(parents).at(committed[:, None] + np.arange(T))
    return ExpectedMask(mask, _descends(parents, committed, S))


def both_masks(a: MaskCase, b: MaskCase) -> MaskCase:
    """The case whose mask is ``a & b``."""

    def both(B: int, H: int, T: int, S: int) -> ExpectedMask:
        (one, x), (other, y) = a(B, H, T, S), b(B, H, T, S)
        return ExpectedMask(one & other, x & y)

    return both


def _third(b: Array, h: Array, q: Array, kv: Array) -> Array:
    return (b + h + q + 2 * kv) % 3 != 0


def _function(B: int, H: int, T: int, S: int) -> ExpectedMask:
    return ExpectedMask(MaskFn(_third), _third(*np.ogrid[:B, :H, :T, :S]))


_and = both_masks(_causal, _segments)


def _or(B: int, H: int, T: int, S: int) -> ExpectedMask:
    (a, x), (b, y) = _window(B, H, T, S), _key_padding(B, H, T, S)
    return ExpectedMask(a | b, x | y)


def _not(B: int, H: int, T: int, S: int) -> ExpectedMask:
    mask, visible = _chunked(B, H, T, S)
    return ExpectedMask(~mask, ~visible)


def _at(B: int, H: int, T: int, S: int) -> ExpectedMask:
    rng = np.random.default_rng(9)
    q, kv = rng.integers(0, S, (B, T)), rng.permutation(S)
    return ExpectedMask(Causal().at(q, kv), (kv[None, None, :] <= q[:, :, None])[:, None])


def _per_head(B: int, H: int, T: int, S: int) -> ExpectedMask:
    q, kv = _positions(T, S)
    left = 4 * np.arange(1, H + 1)
    return ExpectedMask(SlidingWindow(left[None], 0), ((q - left[:, None, None] <= kv) & (kv <= q))[None])


def _per_batch(B: int, H: int, T: int, S: int) -> ExpectedMask:
    q, kv = np.arange(T)[:, None], np.arange(S)[None, :]
    offset = 5 * np.arange(B) + 1
    return ExpectedMask(Causal(offset=offset[:, None]), (kv <= q + offset[:, None, None])[:, None])


MASKS: Final[dict[str, MaskCase]] = {
    "Causal": _causal,
    "Causal(offset)": _offset,
    "SlidingWindow": _window,
    "Chunked": _chunked,
    "PrefixLM": _prefix,
    "Segments": _segments,
    "Lengths": _lengths,
    "KeyPadding": _key_padding,
    "Dense": _dense,
    "Dense, broadcast": _dense_broadcast,
    "Blocks": _blocks,
    "Ancestors": _ancestors,
    "MaskFn": _function,
    "mask & mask": _and,
    "mask | mask": _or,
    "~mask": _not,
    "mask.at(positions)": _at,
    "mask per head": _per_head,
    "mask per batch": _per_batch,
}

# Masks whose arrays are arguments of the compiled program.
TRACED_MASKS: Final[dict[str, MaskCase]] = {
    "traced Causal(offset)": _per_batch,
    "traced Segments": _and,
    "traced Lengths": _lengths,
    "traced Blocks": _block_indices,
    "traced Ancestors": _ancestors_at,
}


def _nan_key_padding(B: int, H: int, T: int, S: int) -> Padding:
    mask, visible = _key_padding(B, H, T, S)
    unseen = ~_is_token(B, S)
    return Padding(mask, visible, {"key": unseen, "value": unseen})


def _nan_lengths(B: int, H: int, T: int, S: int) -> Padding:
    kv, q = _kv_lengths(B, S), np.maximum(T - 7 * np.arange(B), 0)
    seen, sees = np.arange(S) < kv[:, None], np.arange(T) < q[:, None]
    visible = np.asarray(sees[:, :, None] & seen[:, None, :])[:, None]
    seen = seen & sees.any(axis=1, keepdims=True)
    return Padding(Lengths(kv, q), visible, {"query": ~sees, "key": ~seen, "value": ~seen})


def _nan_dense(B: int, H: int, T: int, S: int) -> Padding:
    array = np.random.default_rng(10).random((B, 1, T, S)) < 0.7
    array[..., 1::4, :] = False
    array[..., ::6] = False
    sees, seen = (np.asarray(array.any(axis=axis))[:, 0] for axis in (3, 2))
    return Padding(Dense(array), array, {"query": ~sees, "key": ~seen, "value": ~seen})


def _nan_offset(B: int, H: int, T: int, S: int) -> Padding:
    """No query sees the last three keys; if T ≥ S, the first queries see no key."""
    q, kv = np.arange(T) + S - T - 3, np.arange(S)
    visible = kv <= q[:, None]
    return Padding(Causal(offset=S - T - 3), visible[None, None], _hidden(B, visible))


def _nan_window(B: int, H: int, T: int, S: int) -> Padding:
    """Some queries see no key; if T < S, some keys are before every window."""
    q, kv = np.arange(T) + S - T - 4, np.arange(S)
    visible = (q[:, None] - 2 <= kv) & (kv <= q[:, None])
    return Padding(SlidingWindow(2, 0, offset=S - T - 4), visible[None, None], _hidden(B, visible))


def _hidden(B: int, visible: Array) -> dict[str, Array]:
    """The queries of a mask [T, S] that see no key, and the keys that no query sees."""
    sees, seen = (np.broadcast_to(visible.any(axis=axis), (B, visible.shape[1 - axis])) for axis in (1, 0))
    return {"query": ~sees, "key": ~seen, "value": ~seen}


def _masked_rows(B: int, H: int, T: int, S: int) -> Padding:
    array = np.asarray((np.arange(T)[:, None] + np.arange(B)[:, None, None, None]) % 3 != 1)
    return Padding(Dense(array), array, {})


def _masked_tiles(B: int, H: int, T: int, S: int) -> Padding:
    """A document whose queries see no key and whose keys no query sees; in the last batch no query sees a key."""
    q, kv = _ids(B, T), _ids(B, S)
    q = np.where(q == 1, 7, q)
    kv[-1] = 9
    return Padding(Segments(q, kv), (q[:, :, None] == kv[:, None, :])[:, None], {})


PADDINGS: Final[dict[str, Callable[[int, int, int, int], Padding]]] = {
    "NaN behind KeyPadding": _nan_key_padding,
    "NaN behind Lengths": _nan_lengths,
    "NaN behind Dense": _nan_dense,
    "NaN behind Causal(offset)": _nan_offset,
    "NaN behind a window": _nan_window,
    "fully masked rows": _masked_rows,
    "fully masked tiles": _masked_tiles,
}
