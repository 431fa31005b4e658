"""The plot of time and memory over length. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnops_testing.bench.caches import CacheCase
from attnops_testing.bench.measure import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Distinguishable with most colour vision deficiencies (Okabe and Ito 2008), and by their markers.
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_MARKERS: Final = "osD^vPX*"


def plot(measurements: Sequence[Measurement], path: Path, title: str) -> None:
    """Draw time and memory over length, two panels for each dtype; peers are dashed.

    Args:
        measurements: the measurements; those that were not timed are left out.
        path: the file; its suffix determines the format.
        title: the heading.
    """
    from matplotlib.figure import Figure

    timed = [m for m in measurements if m.seconds]
    dtypes = list(dict.fromkeys(m.case.dtype for m in timed)) or ["nothing was timed"]
    names = list(dict.fromkeys(m.name for m in timed))
    figure = Figure(figsize=(11, 1.2 + 3.8 * len(dtypes)), layout="constrained")
    grid = figure.subplots(len(dtypes), 2, squeeze=False)
    for dtype, (times, memory) in zip(dtypes, grid, strict=True):
        for index, name in enumerate(names):
            series = sorted((m for m in timed if (m.name, m.case.dtype) == (name, dtype)), key=lambda m: m.case.length)
            style: dict[str, Any] = {
                "color": _COLOURS[index % len(_COLOURS)],
                "marker": _MARKERS[index % len(_MARKERS)],
                "linestyle": "--" if series and series[0].is_peer else "-",
                "label": name,
            }
            times.plot([m.case.length for m in series], [(m.best or 0) * 1e3 for m in series], **style)
            known = [m for m in series if m.temp_bytes]
            memory.plot([m.case.length for m in known], [(m.temp_bytes or 0) / 2**20 for m in known], **style)
        cached = any(isinstance(m.case, CacheCase) for m in timed)
        for axes, what, unit in ((times, "time of a call", "ms, best"), (memory, "temporary memory", "MiB")):
            _set_axes(axes, [m.case.length for m in timed], f"{dtype}: {what}", unit)
            axes.set_xlabel("S, slots per row" if cached else "T = S, tokens")
    handles, labels = grid[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 8), frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def _set_axes(axes: Axes, lengths: Sequence[int], title: str, unit: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted(set(lengths))
    axes.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n) for n in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(unit)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
