"""Draws the curves, and how far each one differs from the first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .comparison import Losses, difference


def write_plot(path: Path, curves: Mapping[str, Losses], control: Losses) -> None:
    """Draw losses over steps, and below them |difference| from the first curve. The path's suffix gives the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # neither pyplot nor a display is needed to write a file

    reference, losses = next(iter(curves.items()))
    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    # Curves that agree cover one another: dashes, shorter for each further curve, let all be seen.
    for index, (name, curve) in enumerate(curves.items()):
        above.plot(curve, f"C{index}", label=name, linestyle="-" if index == 0 else (0, (6 / index, 4)))
    above.set_ylabel("loss, nats a byte")
    above.legend()
    others = {f"{reference} reversed (control)": control, **curves}
    del others[reference]
    for index, (name, curve) in enumerate(others.items()):
        distance = difference(curve, losses)
        # A logarithmic axis has no 0: points of equal losses are left out.
        distance = np.where(distance > 0, distance, np.nan)
        below.plot(distance, ".", color=f"C{index}" if index else "0.6", markersize=4, label=name)
    below.set_yscale("log")
    below.set_ylabel(f"|difference from {reference}|")
    below.set_xlabel("step")
    below.legend()
    figure.savefig(path, dpi=150)
