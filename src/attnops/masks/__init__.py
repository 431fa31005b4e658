"""Which query sees which key, as small expressions instead of T × S arrays.

``Causal() & SlidingWindow(4095, 0) & Segments(ids)``; the primitives combine with ``&``, ``|`` and ``~``.
"""

from attnops.masks.ancestors import Ancestors
from attnops.masks.at import At
from attnops.masks.base import And, Dense, Mask, Not, Or
from attnops.masks.blocks import BlockMap, block_map
from attnops.masks.chosen import Blocks, block_sizes
from attnops.masks.coverage import Coverage, CoverageBounds, Grid
from attnops.masks.functions import MaskFn
from attnops.masks.positions import Causal, Chunked, Full, PrefixLM, SlidingWindow
from attnops.masks.shift import Shifted
from attnops.masks.structure import Band, MaskStructure, Split
from attnops.masks.tokens import KeyPadding, Lengths, Segments

__all__ = [
    "Ancestors", "And", "At", "Band", "BlockMap", "Blocks", "Causal", "Chunked", "Coverage", "CoverageBounds", "Dense",
    "Full", "Grid", "KeyPadding", "Lengths", "Mask", "MaskFn", "MaskStructure", "Not", "Or", "PrefixLM", "Segments",
    "Shifted", "SlidingWindow", "Split", "block_map", "block_sizes",
]  # fmt: skip
