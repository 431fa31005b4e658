"""Runs scripts of docs/scoreboard that show faults and undocumented conventions of other libraries."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement
from packaging.version import Version

FOLDER = Path(__file__).parents[2] / "docs" / "scoreboard"


def check(*libraries: str) -> list[str]:
    """Run the scripts whose dependencies are all among these libraries, and assert that they show what they say.

    Where a newer version than the script's is installed, it may have been mended: the script then only has to run.

    Returns:
        The names of the scripts.
    """
    names = []
    for path in sorted(FOLDER.glob("*.py")):
        (listed,) = re.findall(r"^# dependencies = \[(.*)\]$", path.read_text(), re.MULTILINE)
        needed = [Requirement(x) for x in re.findall(r'"(.*?)"', listed)]
        if not {x.name for x in needed} <= {*libraries, "numpy"}:
            continue
        names.append(path.name)
        namespace = runpy.run_path(str(path))
        got, expected = namespace["got"], namespace["expected"]
        pinned = {x.name: Version(str(x.specifier).removeprefix("==")) for x in needed if x.specifier}
        newer = any(Version(importlib.metadata.version(name)) > pin for name, pin in pinned.items())
        same = got == expected if isinstance(got, str) else np.allclose(got, expected, rtol=1e-2, atol=1e-3)
        assert newer or not same, f"{path.name} shows no difference: {got}"
    return names
