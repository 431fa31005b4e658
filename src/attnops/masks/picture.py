"""Masks drawn as text."""

from __future__ import annotations

import jax
import numpy as np

from attnops.masks.base import Mask

_SMALL = 8


def picture(mask: Mask, T: int, S: int, b: int = 0, h: int = 0) -> str:
    """See `Mask.show`."""
    # An array of the mask may fix the batch and the heads; others accept what is asked for.
    allowed = np.asarray(mask.dense(*_batch_and_heads(mask, b, h), T, S))
    rows = np.broadcast_to(allowed[min(b, allowed.shape[0] - 1), min(h, allowed.shape[1] - 1)], (T, S))
    return "\n".join(" ".join("█" if seen else "·" for seen in row) for row in rows)


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


def _batch_and_heads(mask: Mask, b: int, h: int) -> tuple[int, int]:
    sizes = [leaf.shape for leaf in jax.tree.leaves(mask) if getattr(leaf, "ndim", 0) > 1]
    batch = max([b + 1, *(shape[0] for shape in sizes)])
    heads = max([h + 1, *(shape[1] for shape in sizes if len(shape) == 4)])
    return batch, heads
