"""Times that counts of the compilers predict, for `attnops prove` to print beside measured ones."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any


def predicted(device: str, measurement: dict[str, Any]) -> str:
    """The predicted milliseconds of a measurement with their range, as text; empty if no model covers it.

    `benchmarks/predictions.py` writes the file that this reads, and says what the models are.

    Args:
        device: the kind of the device, as JAX names it.
        measurement: a measurement as JSON.
    """
    for row in _rows():
        same = all(measurement.get(name) == value for name, value in row["call"].items())
        if same and device in row["devices"] and measurement["name"] in row["operations"]:
            rows = measurement["batch"] * measurement["heads"]
            low, middle, high = (rows * x for x in row["ms_per_head"])
            return f"{middle:.3f} ({low:.3f} to {high:.3f})"
    return ""


@functools.cache
def _rows() -> list[dict[str, Any]]:
    text = importlib.resources.files(__package__).joinpath("predictions.json").read_text()
    rows: list[dict[str, Any]] = json.loads(text)["rows"]
    return rows
