"""Each script of docs/scoreboard shows what it says of another library, in the versions that `make parity` has."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from packaging.requirements import Requirement
from packaging.version import Version

SCRIPTS = sorted((Path(__file__).parents[2] / "docs" / "scoreboard").glob("*.py"))
flags.FLAGS.mark_as_parsed()  # tokamax would take pytest's command line for its own


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_it_shows_a_difference_unless_a_newer_version_has_none(path: Path) -> None:
    namespace = runpy.run_path(str(path))
    got, expected = (np.asarray(namespace[name]) for name in ("got", "expected"))
    if got.dtype.kind == "U":
        different = got != expected
    else:
        assert np.isfinite(expected).all()
        different = not np.allclose(got, expected, rtol=1e-2, atol=1e-3)
    (listed,) = re.findall(r"^# dependencies = \[(.*)\]$", path.read_text(), re.MULTILINE)
    pinned = [x for x in map(Requirement, re.findall(r'"(.*?)"', listed)) if x.specifier]
    newer = any(Version(importlib.metadata.version(x.name)) > Version(str(x.specifier).strip("=")) for x in pinned)
    assert different or newer, got
