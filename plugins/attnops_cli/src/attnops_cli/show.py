"""`attnops show`: the keys that each query sees, and the coverage of tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import jax
import numpy as np
import typer

from attnops.masks import Coverage, Mask, block_map
from attnops.masks.picture import fitting
from attnops_cli.masks import parse_mask
from attnops_cli.output import fail, print_text

# Larger text is unreadable in a terminal; in a larger image a score would be smaller than a pixel.
_WIDEST_TEXT: Final = 128
_LARGEST_IMAGE: Final = 2048

_SYMBOLS: Final = {Coverage.EMPTY: "·", Coverage.PARTIAL: "▒", Coverage.FULL: "█"}
_MEANINGS: Final = {
    Coverage.EMPTY: "EMPTY: not visited",
    Coverage.PARTIAL: "PARTIAL: masked",
    Coverage.FULL: "FULL: not masked",
}
_COLOURS: Final = {Coverage.EMPTY: "#9a9a9a", Coverage.PARTIAL: "#D55E00", Coverage.FULL: "#009E73"}


def command(
    mask: Annotated[str, typer.Argument(help='An expression of attnops.masks: "Causal() & SlidingWindow(3, 0)".')],
    query_length: Annotated[int, typer.Option("-T", "--query-length", help="T, in tokens.", min=1)] = 16,
    key_length: Annotated[
        int | None, typer.Option("-S", "--key-length", help="S, in tokens.", show_default="T", min=1)
    ] = None,
    block_q: Annotated[int | None, typer.Option(help="Queries per tile: shows the tiles.", min=1)] = None,
    block_k: Annotated[int | None, typer.Option(help="Keys per tile.", show_default="block-q", min=1)] = None,
    b: Annotated[int, typer.Option("-b", "--batch", help="The index in the batch.", min=0)] = 0,
    h: Annotated[int, typer.Option("--head", help="The index of the head.", min=0)] = 0,
    output: Annotated[Path | None, typer.Option(help="Draw an image to this file: .png, .svg or .pdf.")] = None,
) -> None:
    """Show which query (row) sees which key (column) and, with block sizes, which tiles a kernel visits.

    Exits with 2 if the mask can't be read or shown.
    """
    T, S = query_length, key_length or query_length
    blocks = None
    if block_q or block_k:
        blocks = block_q or block_k or 1, block_k or block_q or 1
    try:
        parsed = mask_with_values(mask)
        B, H = fitting(parsed, T, S, b, h)
        tiles = None if blocks is None else _tiles(parsed, (B, H, T, S), blocks, b, h)
        title = f"{parsed!r}, T = {T}, S = {S}" + (f", b = {b}, h = {h}" if (B, H) != (1, 1) else "")
        if output is not None:
            needs_matplotlib("the image")
            _draw(_seen(parsed, (B, H, T, S), b, h), (T, S), tiles, blocks, title, output)
            print_text(f"{title}: {output}")
            return
        print_text(title)
        print_text(parsed.show(T, S, b=b, h=h) if max(T, S) <= _WIDEST_TEXT else _too_large(T, S))
        if tiles is not None and blocks is not None:
            print_text(f"\nTiles of {blocks[0]} × {blocks[1]}: {_count(tiles)}")
            large = max(tiles.shape) > _WIDEST_TEXT
            print_text(_too_large(*tiles.shape) if large else _tile_text(tiles))
    except (ValueError, OSError) as error:
        fail(error, 2)


def mask_with_values(text: str) -> Mask:
    """A mask whose arrays have values, which a picture or a coverage depends on.

    Raises:
        ValueError: it can't be parsed, or has an array given only by its shape.
    """
    mask = parse_mask(text)
    if not isinstance(mask, Mask) or any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(mask)):
        raise ValueError(
            f"mask={text!r} has an array given by its shape, but needs its values; list them: Segments([0, 0, 1, 1])"
        )
    return mask


def needs_matplotlib(what: str) -> None:
    """Exit with status 2 if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        fail(f"{what} needs {error.name}, which is not installed: pip install matplotlib", 2)


def _tiles(mask: Mask, shape: tuple[int, int, int, int], blocks: tuple[int, int], b: int, h: int) -> Any:
    """The coverage [tiles of queries, tiles of keys]."""
    coverage = block_map(mask, shape, *blocks).coverage
    return coverage[b if coverage.shape[0] > 1 else 0, h if coverage.shape[1] > 1 else 0]


def _seen(mask: Mask, shape: tuple[int, int, int, int], b: int, h: int) -> Any:
    """The mask as booleans [T, S]; None if it is too large to be drawn."""
    if max(shape[2:]) > _LARGEST_IMAGE:
        return None
    dense = np.asarray(mask.dense(*shape))
    return np.broadcast_to(dense, shape)[b, h]


def _count(tiles: Any) -> str:
    counts = {kind: int((tiles == kind).sum()) for kind in Coverage}
    visited = tiles.size - counts[Coverage.EMPTY]
    listed = ", ".join(f"{n} {kind.name}" for kind, n in counts.items())
    return f"{listed}; {visited} of {tiles.size} visited"


def _tile_text(tiles: Any) -> str:
    symbols = {int(kind): symbol for kind, symbol in _SYMBOLS.items()}
    legend = "   ".join(f"{_SYMBOLS[kind]} {meaning}" for kind, meaning in _MEANINGS.items())
    return "\n".join(" ".join(symbols[int(tile)] for tile in row) for row in tiles) + f"\n{legend}"


def _too_large(rows: int, columns: int) -> str:
    return f"({rows} × {columns}: too large for text; --output draws an image, --block-q shows tiles)"


def _draw(
    seen: Any, shape: tuple[int, int], tiles: Any, blocks: tuple[int, int] | None, title: str, path: Path
) -> None:
    """Draw the mask, and frames of tiles in the colour of their coverage; only tiles if the mask is too large."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    T, S = shape
    if seen is None and tiles is None:
        raise ValueError(f"T={T} and S={S} are too many to draw one by one; add --block-q to draw tiles")
    scale = 6.4 / max(T, S)
    width = max(S * scale, 2.4) + 1.4
    figure: Any = Figure(figsize=(width, max(T * scale, 1.6) + 1.7), layout="constrained")
    axes = figure.subplots()
    handles = []
    if seen is not None:
        axes.imshow(np.where(seen[..., None], (44, 62, 80), (240, 240, 240)).astype(np.uint8), interpolation="nearest")
        handles += [
            Patch(facecolor="#2c3e50", label="seen"),
            Patch(facecolor="#f0f0f0", edgecolor="#999", label="not seen"),
        ]
    if tiles is not None and blocks is not None:
        handles += _draw_tiles(axes, tiles, blocks, shape, filled=seen is None)
    axes.set(xlim=(-0.5, S - 0.5), ylim=(T - 0.5, -0.5), xlabel="key", ylabel="query", aspect="equal")
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    for axis, length in ((axes.xaxis, S), (axes.yaxis, T)):
        axis.set_major_locator(MaxNLocator(nbins=9, integer=True, min_n_ticks=min(length, 3)))
    figure.suptitle(title if tiles is None else f"{title}\n{_count(tiles)}", fontsize=10, wrap=True)
    figure.get_layout_engine().set(h_pad=0.1)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=max(1, int(width / 1.5)), frameon=False, fontsize=9
    )
    figure.savefig(path, dpi=150)


def _draw_tiles(axes: Any, tiles: Any, blocks: tuple[int, int], shape: tuple[int, int], filled: bool) -> list[Any]:
    """Draw a frame per tile, just inside it so that neighbours' colours stay apart; returns the legend's entries."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    (T, S), (block_q, block_k) = shape, blocks
    inset = 0.03 * min(blocks)
    handles = []
    for kind, colour in _COLOURS.items():
        frames = []
        for row, column in np.argwhere(tiles == kind):
            top, left = row * block_q - 0.5 + inset, column * block_k - 0.5 + inset
            bottom = min((row + 1) * block_q, T) - 0.5 - inset
            right = min((column + 1) * block_k, S) - 0.5 - inset
            frames.append([(left, top), (right, top), (right, bottom), (left, bottom)])
        face = colour if filled and kind is not Coverage.EMPTY else "none"
        width = 0.6 if kind is Coverage.EMPTY else max(0.8, min(2.5, 60 / max(tiles.shape)))
        axes.add_collection(PolyCollection(frames, facecolors=face, edgecolors=colour, linewidths=width))
        handles.append(Patch(facecolor=face, edgecolor=colour, linewidth=2, label=_MEANINGS[kind]))
    return handles
