"""Checks of the arrays that masks and biases hold."""

from __future__ import annotations

import numpy as np

from attnops.typing import Leaf


def check_broadcastable(name: str, shape: tuple[int, ...], scores: tuple[int, int, int, int], hint: str) -> None:
    """Raise a `ValueError` unless ``shape`` is 4-D and broadcasts to ``scores`` = (B, H, T, S)."""
    if len(shape) != 4:
        raise ValueError(f"{name} has shape {shape}, but must be 4-D and broadcast to [B, H, T, S]={scores}; {hint}")
    for letter, size, full in zip("BHTS", shape, scores, strict=True):
        if size not in (1, full):
            raise ValueError(
                f"{name} has shape {shape}: its dimension {letter} is {size}, but must be 1 or {full} to broadcast to "
                f"[B, H, T, S]={scores}"
            )


def check_boolean(name: str, mask: Leaf) -> None:
    """Raise a `ValueError` unless an array mask holds booleans."""
    if mask.dtype != np.bool_:
        raise ValueError(
            f"{name} has dtype {mask.dtype}, but must be boolean, True where a query may attend; give an additive mask "
            f"as bias=..., and a 0/1 mask as mask.astype(bool)"
        )
