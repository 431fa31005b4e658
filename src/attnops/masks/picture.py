"""Masks drawn as text."""

from __future__ import annotations

import itertools

import jax
import numpy as np

from attnops.masks.base import Mask
from attnops.masks.tokens import Lengths

_SMALL = 8


def picture(mask: Mask, T: int, S: int, b: int = 0, h: int = 0) -> str:
    """See `Mask.show`."""
    shape = (*fitting(mask, T, S, b, h), T, S)
    rows = np.broadcast_to(np.asarray(mask.dense(*shape)), shape)[b, h]
    return "\n".join(" ".join("█" if seen else "·" for seen in row) for row in rows)


def fitting(mask: Mask, T: int, S: int, b: int, h: int) -> tuple[int, int]:
    """The batch and heads that the mask's own arrays have, which their shapes alone don't tell apart.

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
    mask.bind(b + 1, h + 1, T, S)  # says what does not fit
    return b + 1, h + 1


def small_picture(mask: Mask) -> str:
    """A picture of a size that the mask's own arrays allow, or of 8 × 8."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(mask)):
        return "(traced: no picture)"
    # Arrays of lengths are one a batch, and fit any number of tokens.
    arrays = [x for x in jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, Lengths)) if getattr(x, "ndim", 0)]
    lengths = sorted({array.shape[-1] for array in arrays})
    for size in [n for n in lengths if n > 1] or [_SMALL]:
        try:
            return picture(mask, size, size) if size <= 4 * _SMALL else f"({size} × {size}: too large to draw)"
        except ValueError:
            continue
    return "(mask.show(T, S) draws it)"
