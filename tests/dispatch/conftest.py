"""Installs distributions for tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attnops import OperationRegistry

# The source of a module that records its import.
OPERATION = Path(__file__).with_name("zeta.py").read_text()


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """A function that installs a distribution with one module; all of it is gone after the test."""
    site = tmp_path / "site"
    registered = OperationRegistry._registered[:]

    def install(
        name: str,
        source: str = OPERATION,
        *,
        module: str | None = None,
        entry_points: dict[str, str] | None = None,
        version: str = "1.0",
        requires: tuple[str, ...] = (),
        folder: Path = site,
    ) -> None:
        module = name.replace("-", "_") if module is None else module
        entry_points = {"zeta": f"{module}:Operation"} if entry_points is None else entry_points
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source)
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {text}" for text in requires)]
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.3", *lines, ""]))
        entries = [f"{entry} = {target}" for entry, target in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[attnops.operations]", *entries, ""]))
        OperationRegistry.refresh()

    with pytest.MonkeyPatch.context() as patch:
        for variable in ("ATTNOPS_DISABLE", "ATTNOPS_NO_AUTOLOAD"):
            patch.delenv(variable, raising=False)
        patch.setattr(sys, "imported_by_test", [], raising=False)
        patch.syspath_prepend(site)
        before = set(sys.modules)
        yield install
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
                del sys.modules[name]
    OperationRegistry._registered[:] = registered
    OperationRegistry.refresh()
