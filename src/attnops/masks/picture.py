"""Masks drawn as text."""

from __future__ import annotations

import contextlib
import itertools

import jax
import numpy as np

from attnops.masks.base import Mask

_SMALL = 8


def picture(mask: Mask, T: int, S: int, b: int = 0, h: int = 0) -> str:
    """See `Mask.show`."""
    allowed = np.asarray(_dense(mask, T, S, b, h))
    rows = np.broadcast_to(allowed[min(b, allowed.shape[0] - 1), min(h, allowed.shape[1] - 1)], (T, S))
    return "\n".join(" ".join("█" if seen else "·" for seen in row) for row in rows)


def _dense(mask: Mask, T: int, S: int, b: int, h: int) -> jax.Array:
    """The mask for as many batches and heads as its own arrays have, which their shapes alone don't tell apart."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(mask) if getattr(leaf, "ndim", 0) > 1]
    batches, heads = (sorted({n + 1, *(shape[axis] for shape in shapes)}) for axis, n in ((0, b), (1, h)))
    for B, H in itertools.product(batches, heads):
        with contextlib.suppress(ValueError):
            return mask.dense(B, H, T, S)
    return mask.dense(b + 1, h + 1, T, S)  # says what does not fit


def small_picture(mask: Mask) -> str:
    """A picture of a size that the mask's own arrays allow, or of 8 × 8."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(mask)):
        return "(traced: no picture)"
    lengths = sorted({leaf.shape[-1] for leaf in jax.tree.leaves(mask) if getattr(leaf, "ndim", 0)})
    for size in [n for n in lengths if n > 1] or [_SMALL]:
        try:
            return picture(mask, size, size) if size <= 4 * _SMALL else f"({size} × {size}: too large to draw)"
        except ValueError:
            continue
    return "(mask.show(T, S) draws it)"
