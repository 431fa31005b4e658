"""Blocks of keys that are chosen for blocks of queries."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from attnops.masks.base import Dense, Mask
from attnops.masks.coverage import CoverageBounds, Grid
from attnops.masks.integers import check_integers, is_known, numpy_of
from attnops.masks.picture import text
from attnops.typing import Array, BoolArray, Index, Leaf


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Blocks(Mask):
    """Queries see the blocks of keys that were chosen for their block of queries: the top k of a router or an indexer.

    ::

        Blocks([[[[0, -1], [0, 1]]]], 2, 2)
        █ █ · ·
        █ █ · ·
        █ █ █ █
        █ █ █ █

    Attributes:
        chosen: for each block of queries, the blocks of keys: booleans [B or 1, n, nq, nk], or the indices of blocks,
            integers [B or 1, n, nq, top_k], -1 for none. nq is ``ceil(T / q_block)`` and nk ``ceil(S / kv_block)``; n
            is 1, H, or a divisor of H such as K, where each choice serves H / n consecutive query heads.
        q_block: queries per block, an int.
        kv_block: keys per block, an int.

    The choice may be traced: one program serves all choices. Traced indices are not checked: indices outside [0, nk)
    choose nothing. Blocks are of indices, not of positions. A bound mask has O(B · H · nq · nk) memory.
    """

    chosen: Leaf
    q_block: int
    kv_block: int

    axes: ClassVar = {"chosen": "bh.."}

    def __post_init__(self) -> None:
        for name in ("q_block", "kv_block"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
                raise ValueError(f"Blocks' {name}={size!r} must be an int of at least 1, known when tracing")
            object.__setattr__(self, name, int(size))
        if not hasattr(self.chosen, "shape"):
            object.__setattr__(self, "chosen", np.asarray(self.chosen))

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        """See `Mask.bind`.

        Raises:
            ValueError: the choice does not fit, has another dtype, or has a known index outside [-1, nk).
        """
        chosen, shape, nq, nk = self.chosen, self.chosen.shape, -(-T // self.q_block), -(-S // self.kv_block)
        if np.dtype(chosen.dtype) != np.bool_:
            check_integers("Blocks' chosen", chosen)
        last = (nk,) if np.dtype(chosen.dtype) == np.bool_ else shape[3:]
        if len(shape) != 4 or shape[0] not in (1, B) or not shape[1] or H % shape[1] or (nq, *last) != shape[2:]:
            raise ValueError(
                f"Blocks' chosen is {text(chosen)}, but must be boolean [B or 1, n, nq, nk]=[{B}, n, {nq}, {nk}] or "
                f"integers [{B}, n, {nq}, top_k], with n a divisor of H={H}, for T={T} queries and S={S} keys in "
                f"blocks of {self.q_block} and {self.kv_block}"
            )
        chosen = chosen if np.dtype(chosen.dtype) == np.bool_ else _marked(chosen, nk)
        return type(self)(chosen if shape[1] in (1, H) else numpy_of(chosen).repeat(chosen, H // shape[1], 1),
                          self.q_block, self.kv_block)  # fmt: skip

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        return Dense(self.chosen).allowed(b, h, q // self.q_block, kv // self.kv_block)

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        # Exact: from sums over all blocks before a corner, the number of chosen ones between a tile's corners.
        (q, q_stop), (kv, kv_stop) = (
            (first // size, last // size + 1) for first, last, size in (
                (grid.q_first, grid.q_last, self.q_block), (grid.kv_first, grid.kv_last, self.kv_block)
            )
        )  # fmt: skip
        xp = numpy_of(self.chosen, q, kv)
        sums = xp.pad(xp.asarray(self.chosen), ((0, 0), (0, 0), (1, 0), (1, 0))).astype(np.int32)
        sums = sums.cumsum(2).cumsum(3)
        below, above = _rows(sums, q), _rows(sums, q_stop)
        count = _rows(above - below, kv_stop, 3) - _rows(above - below, kv, 3)
        return CoverageBounds(count > 0, count == (q_stop - q) * (kv_stop - kv))

    def __repr__(self) -> str:
        return f"Blocks({text(self.chosen)}, {self.q_block}, {self.kv_block})"


def block_sizes(mask: Mask | None) -> tuple[int, int] | None:
    """The fewest queries and keys per block of the `Blocks` in a mask; None without any."""
    parts = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, Blocks))
    sizes = [(x.q_block, x.kv_block) for x in parts if isinstance(x, Blocks)]
    return (min(q for q, _ in sizes), min(kv for _, kv in sizes)) if sizes else None


def _rows(sums: Array, index: Array, axis: int = 2) -> Array:
    """The sums at indices [B or 1, 1, tiles, 1], or [B or 1, 1, 1, tiles] of axis 3; indices outside are clamped."""
    xp = numpy_of(sums, index)
    index = xp.clip(index, 0, sums.shape[axis] - 1)
    if index.shape[0] == 1:
        return xp.take(sums, index.reshape(-1), axis=axis)
    return xp.take_along_axis(sums, index, axis=axis)


def _marked(indices: Leaf, nk: int) -> Array:
    """Indices of blocks [..., top_k] as booleans [..., nk]."""
    indices = indices.astype(np.int32) if indices.dtype.itemsize < 4 else indices
    outside = (indices < 0) | (indices >= nk)
    if is_known(indices):
        known = np.asarray(indices)
        wrong = np.argwhere(np.asarray(outside) & (known != -1))
        if len(wrong):
            raise ValueError(
                f"Blocks' chosen{wrong[0].tolist()}={known[tuple(wrong[0])]} must be -1, for none, or the index of one "
                f"of the {nk} blocks of keys"
            )
    xp = numpy_of(indices)
    marked, indices = xp.zeros((*indices.shape[:-1], nk + 1), bool), xp.where(outside, nk, indices)
    if xp is np:
        np.put_along_axis(marked, indices, True, axis=-1)
    else:
        marked = jnp.put_along_axis(marked, indices, True, axis=-1, inplace=False)
    return marked[..., :nk]
