"""Batch invariance: whether a row's results are the same to the bit alone and in a batch."""

from __future__ import annotations

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops import OperationImpl
from attnops.masks import Causal

NAMES: Final = ("output", "query", "key", "value")


class Sizes(NamedTuple):
    """The sizes of a row.

    Attributes:
        T: queries.
        S: keys.
        H: query heads.
        K: kv heads.
        D: the head dim.
    """

    T: int
    S: int
    H: int = 4
    K: int = 2
    D: int = 64


def changed_by_batch(
    operation: OperationImpl, sizes: Sizes, dtype: jax.typing.DTypeLike, batches: tuple[int, ...] = (2, 5)
) -> set[str]:
    """The results of a row that are not the same to the bit in every batch: "output", or an argument for its gradient.

    The row is computed alone, and as the first and the last of batches of other rows; causal, under `jax.jit`.

    Args:
        operation: in the layout "BTHD".
        sizes: the sizes of the row.
        dtype: the dtype of query, key and value.
        batches: the numbers of rows.
    """
    T, S, H, K, D = sizes
    rng = np.random.default_rng(0)
    shapes = (T, H, D), (S, K, D), (S, K, D), (T, H, D)
    rows = [rng.standard_normal((max(batches), *shape)).astype(jnp.dtype(dtype)) for shape in shapes]

    @jax.jit
    def results(query: jax.Array, key: jax.Array, value: jax.Array, d_out: jax.Array) -> list[jax.Array]:
        def attend(*args: jax.Array) -> jax.Array:
            return operation(*args, mask=Causal()).attention_outputs

        out, pull_back = jax.vjp(attend, query, key, value)
        return [out, *pull_back(d_out)]

    alone = [np.asarray(x)[0] for x in results(*(x[:1] for x in rows))]
    changed: set[str] = set()
    for batch in batches:
        for order in ([*range(batch)], [*range(1, batch), 0]):
            found = [np.asarray(x)[order.index(0)] for x in results(*(x[order] for x in rows))]
            same = [a.tobytes() == b.tobytes() for a, b in zip(found, alone, strict=True)]
            changed |= {name for name, is_same in zip(NAMES, same, strict=True) if not is_same}
    return changed
