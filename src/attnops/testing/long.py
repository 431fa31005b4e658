"""What is checked in long problems too: where a kernel has several tiles of its own, whatever tiles are asked for."""

from __future__ import annotations

from typing import Final

# Combinations of features; a window here is wider than a tile of 128.
LONG: Final = (("SlidingWindow",), ("GQA", "Segments"), ("T < S", "Causal"), ("GQA", "mask per head"))
