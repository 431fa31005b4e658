"""Combinations that are also checked in long problems, with several tiles for kernels that ignore ``block``."""

from __future__ import annotations

from typing import Final

# Combinations of features; a window here is wider than a tile of 128.
LONG: Final = (("SlidingWindow",), ("GQA", "Segments"), ("T < S", "Causal"), ("GQA", "mask per head"))
