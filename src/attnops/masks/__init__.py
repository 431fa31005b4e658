"""Which query sees which key, as small expressions instead of T × S arrays.

``Causal() & SlidingWindow(4095, 0) & Segments(ids)``; the primitives combine with ``&``, ``|`` and ``~``.
"""

from attnops.masks.algebra import And, At, Not, Or
from attnops.masks.base import Mask
from attnops.masks.functions import MaskFn
from attnops.masks.positions import Causal, Chunked, Full, PrefixLM, SlidingWindow
from attnops.masks.shift import Shifted
from attnops.masks.structure import Band, MaskStructure, Split
from attnops.masks.tiles import BlockMap, Coverage, Grid, TileCoverage, block_map
from attnops.masks.tokens import Dense, KeyPadding, Lengths, Segments

__all__ = [
    "And",
    "At",
    "Band",
    "BlockMap",
    "Causal",
    "Chunked",
    "Coverage",
    "Dense",
    "Full",
    "Grid",
    "KeyPadding",
    "Lengths",
    "Mask",
    "MaskFn",
    "MaskStructure",
    "Not",
    "Or",
    "PrefixLM",
    "Segments",
    "Shifted",
    "SlidingWindow",
    "Split",
    "TileCoverage",
    "block_map",
]
