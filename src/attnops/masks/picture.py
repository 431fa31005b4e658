"""Masks as text: pictures, and arrays inside an expression. Below `attnops.masks.base`, which calls these."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import numpy as np

from attnops.typing import Leaf

if TYPE_CHECKING:
    from attnops.masks.base import Mask

_SMALL = 8


def text(value: Leaf) -> str:
    """An array by dtype and shape, ``<int32 [2, 8]>``; anything else as Python prints it."""
    is_array = isinstance(value, jax.Array) or getattr(value, "shape", ()) != ()
    return f"<{value.dtype} {list(value.shape)}>" if is_array else repr(value)


def picture(mask: Mask, T: int, S: int, b: int = 0, h: int = 0) -> str:
    """See `Mask.show`."""
    shape = (*fitting(mask, T, S, b, h), T, S)
    rows = np.broadcast_to(np.asarray(mask.dense(*shape)), shape)[b, h]
    return "\n".join(" ".join("█" if seen else "·" for seen in row) for row in rows)


def fitting(mask: Mask, T: int, S: int, b: int, h: int) -> tuple[int, int]:
    """The smallest (B, H) that the mask's arrays fit and that has this ``b`` and ``h``.

    The shapes alone don't tell which axis is the batch, so that candidates are tried.

    Raises:
        ValueError: the arrays fit no call that has these lengths, this ``b`` and this ``h``.
    """
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(mask)]
    batches = sorted({b + 1, *(shape[0] for shape in shapes if shape)})
    heads = sorted({h + 1, *(shape[1] for shape in shapes if len(shape) > 1)})
    for B, H in itertools.product((n for n in batches if n > b), (n for n in heads if n > h)):
        try:
            mask.bind(B, H, T, S)
        except ValueError:
            continue
        return B, H
    mask.bind(b + 1, h + 1, T, S)  # raises the error that names the array
    return b + 1, h + 1


def small_picture(mask: Mask) -> str:
    """A picture of a size that the mask's own arrays allow, or of 8 × 8."""
    leaves = jax.tree.leaves(mask)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return "(traced: no picture)"
    lengths = sorted({size for size in _lengths(mask) if size > 1})
    for size in lengths or [_SMALL]:
        try:
            return picture(mask, size, size) if size <= 4 * _SMALL else f"({size} × {size}: too large to draw)"
        except ValueError:
            continue
    return "(mask.show(T, S) draws it)"


def _lengths(value: Leaf) -> Iterator[int]:
    """The last dimension of each array of a mask, except arrays with one value per batch, which fit any length."""
    if hasattr(value, "coverage_bounds"):
        for name, field in vars(value).items():
            if (value.axes or {}).get(name) != "b":
                yield from _lengths(field)
    else:
        yield from (leaf.shape[-1] for leaf in jax.tree.leaves(value) if getattr(leaf, "ndim", 0))
