"""Documents of any length, packed into rows of one length without padding.

::

    documents        "abc" "de" "fghij"                 T = 6

    row 0   tokens    a b c ◦ d e      row 1   tokens    ◦ f g h i j      row 2 …
            segments  0 0 0 0 1 1              segments  0 1 1 1 1 1
            positions 0 1 2 3 0 1              positions 0 0 1 2 3 4
            predicts  █ █ █ · █ ·              predicts  · █ █ █ █ ·

A document ends with `END` (◦), so that the model learns to end. If a row ends within a document, the rest of the
document is a new segment of the next row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

END = 0  # a byte that no text has
VOCABULARY = 256

Array = Any  # a NumPy array, or inside `jit` a JAX array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """N rows of T tokens, NumPy arrays at first; a pytree, so that a batch can be an argument of a `jit` function."""

    tokens: Array  # [N, T] int32, bytes
    segments: Array  # [N, T] int32, the token's document, counted in the row: 0, 1, 2, …
    positions: Array  # [N, T] int32, counted from the first token of the segment
    predicts: Array  # [N, T] bool, whether the next token is of the same document, so that it is a target

    def take(self, rows: np.ndarray) -> PackedRows:
        """The rows with these indices, in this order."""
        taken: PackedRows = jax.tree.map(lambda array: array[rows], self)
        return taken

    def shuffled(self, seed: int) -> PackedRows:
        """The rows in random order, so that one long document does not fill a batch."""
        return self.take(np.random.default_rng(seed).permutation(len(self.tokens)))

    def batch(self, step: int, size: int) -> PackedRows:
        """The batch [size, T] of a step. Steps are counted from 0; after the last row the first one follows."""
        return self.take((step * size + np.arange(size)) % len(self.tokens))


def pack(documents: Sequence[str], length: int) -> PackedRows:
    """Pack documents, as UTF-8, into rows of ``length`` tokens. The last row ends with a segment without targets."""
    texts = [text.encode() + bytes([END]) for text in documents]
    padding = -sum(map(len, texts)) % length
    stream = np.frombuffer(b"".join(texts) + bytes([END]) * padding, np.uint8)
    owners = np.repeat(np.arange(len(texts) + 1), [*map(len, texts), padding])  # the padding counts as a last document

    tokens = stream.reshape(-1, length)
    owner = owners.reshape(-1, length)
    goes_on = owner[:, 1:] == owner[:, :-1]  # [N, T - 1]: the next token is of the same document
    never = np.zeros((len(tokens), 1), bool)
    here = np.arange(length)
    first = np.where(np.hstack([never, goes_on]), 0, here)  # its own index where a segment begins, else 0
    return PackedRows(
        tokens=tokens.astype(np.int32),
        segments=(owner - owner[:, :1]).astype(np.int32),
        positions=(here - np.maximum.accumulate(first, axis=1)).astype(np.int32),
        predicts=np.hstack([goes_on & (owner[:, 1:] < len(texts)), never]),
    )
