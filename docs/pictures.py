"""The pictures of the documentation, drawn from the code when it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
import numpy as np

from attnops import masks
from attnops.masks import block_map

SEEN, HIDDEN = "#2c3e50", "#eceff1"
TOKENS, TILE = 16, 4
IDS = np.repeat([0, 1, 2], [5, 7, 4])[None]

# By file name, expressions that `attnops show` accepts too; `ids` is IDS.
MASKS = {
    "causal": "Causal()",
    "window": "Causal() & SlidingWindow(4, 0)",
    "two_sides": "SlidingWindow(3, 3)",
    "chunks": "Causal() & Chunked(6)",
    "prefix": "PrefixLM(5)",
    "documents": "Causal() & Segments(ids)",
    "lengths": "Lengths(np.array([11]))",
    "union": "SlidingWindow(2, 0) | (Causal() & MaskFn(lambda b, h, q, kv: kv % 5 == 0))",
    "negation": "~SlidingWindow(1, 1)",
    "chosen": "Causal() & Blocks(np.array([[[[0, -1, -1], [1, 0, -1], [2, 0, -1], [3, 1, 2]]]]), 4, 4)",
    "tree": "Ancestors(np.array([[-1, 0, 0, 1, 1, 2]]))",
}


def mask_of(expression: str) -> masks.Mask:
    """The mask of an expression of `MASKS`."""
    names = {name: getattr(masks, name) for name in masks.__all__} | {"np": np, "ids": IDS}
    mask: masks.Mask = eval(expression, names)
    return mask


def draw_all(folder: Path) -> None:
    """Draw every picture into a folder, as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "attnops"  # the same file for the same picture
    for name, expression in MASKS.items():
        _mask(folder / f"{name}.svg", expression)
    _overview(folder / "overview.svg")


def tile_codes(mask: masks.Mask, T: int, S: int) -> np.ndarray:
    """EMPTY, PARTIAL or FULL of each tile, [T / 4, S / 4]."""
    return np.asarray(block_map(mask, (1, 1, T, S), TILE, TILE).coverage)[0, 0]


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _mask(path: Path, expression: str) -> None:
    """Which query sees which key, and the tiles of 4 × 4 that a kernel visits."""
    T = 6 if path.stem == "tree" else TOKENS
    S = T + 4 if path.stem == "tree" else T
    mask = mask_of(expression)
    seen = np.asarray(mask.dense(1, 1, T, S))[0, 0]
    figure, axes = plt.subplots(figsize=(3.0, 3.1 * T / S), layout="constrained")
    axes.imshow(seen, cmap=mpl.colors.ListedColormap([HIDDEN, SEEN]), vmin=0, vmax=1)
    if T == TOKENS:
        codes = tile_codes(mask, T, S)
        colours = ["#b0bec5", "#e67e22", "#27ae60"]  # EMPTY, PARTIAL, FULL
        for (i, j), code in np.ndenumerate(codes):
            corner = (j * TILE - 0.42, i * TILE - 0.42)
            axes.add_patch(plt.Rectangle(corner, TILE - 0.16, TILE - 0.16, fill=False, lw=1.6, ec=colours[int(code)]))
    axes.set(xlabel="key", ylabel="query", xticks=[], yticks=[])
    _save(figure, path)


def _overview(path: Path) -> None:
    """From a call to the kernel that runs."""
    figure, axes = plt.subplots(figsize=(8.6, 3.6), layout="constrained")
    axes.set(xlim=(0, 100), ylim=(0, 42))
    axes.axis("off")

    def box(x: float, y: float, w: float, h: float, text: str, colour: str) -> None:
        style = {"boxstyle": "round,pad=0.2,rounding_size=1.2", "fc": colour, "ec": "#455a64"}
        axes.add_patch(mpl.patches.FancyBboxPatch((x, y), w, h, **style))
        axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=8.5)

    def arrow(x: float, y: float, to_x: float, to_y: float) -> None:
        axes.annotate("", (to_x, to_y), (x, y), arrowprops={"arrowstyle": "-|>", "color": "#455a64"})

    box(1, 15, 17, 12, "your model\nop(q, k, v,\nmask=Causal())", "#e3f2fd")
    box(26, 15, 19, 12, "request\nshapes, dtypes,\nmask, platform", "#fff8e1")
    box(53, 15, 17, 12, "dispatcher\nserves it,\nor reasons why not", "#fff8e1")
    arrow(19.5, 21, 24.5, 21)
    arrow(46.5, 21, 51.5, 21)
    kernels = [
        "attnops-tpu: Pallas",
        "attnops-triton: Triton",
        "attnops-ring: sequences",
        "yours",
        "attnops: plain JAX",
    ]
    for i, name in enumerate(kernels):
        y = 34 - 8 * i
        box(78, y, 21, 5, name, "#e8f5e9" if name != "yours" else "#fce4ec")
        arrow(71.5, 21, 76.5, y + 2.5)
    _save(figure, path)
