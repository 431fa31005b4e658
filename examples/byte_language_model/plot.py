"""The picture: the curves, and how far each strays from the first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .comparison import Losses, difference


def write_plot(path: Path, curves: Mapping[str, Losses], control: Losses) -> None:
    """Losses over steps, and below them |difference| from the first curve; the format is that of the path's suffix.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # neither pyplot nor a display is needed to write a file

    reference, losses = next(iter(curves.items()))
    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    # Curves that agree lie upon one another: broken lines, shorter each time, let all be seen.
    for index, (name, curve) in enumerate(curves.items()):
        above.plot(curve, f"C{index}", label=name, linestyle="-" if index == 0 else (0, (6 / index, 4)))
    above.set_ylabel("loss, nats a byte")
    above.legend()
    others = {f"{reference} reversed (control)": control, **curves}
    del others[reference]
    for index, (name, curve) in enumerate(others.items()):
        strayed = difference(curve, losses)
        # Equal losses have no place on a logarithmic axis: a point is left out there.
        strayed = np.where(strayed > 0, strayed, np.nan)
        below.plot(strayed, ".", color=f"C{index}" if index else "0.6", markersize=4, label=name)
    below.set_yscale("log")
    below.set_ylabel(f"|difference from {reference}|")
    below.set_xlabel("step")
    below.legend()
    figure.savefig(path, dpi=150)
