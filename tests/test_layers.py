"""The import linter's contracts (`make lint`) can fail: an import that points up, and one past the documented list."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {"attnops": "src", **{f"attnops_{name}": f"plugins/attnops_{name}/src" for name in ("ring", "tpu", "triton")}}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    paths = os.pathsep.join(str(folder / source) for source in SOURCES.values())
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(
        [*command, "--no-logo", "--no-cache"], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, which breaks no contract."""
    folder = tmp_path_factory.mktemp("sources")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, source in SOURCES.items():
        shutil.copytree(ROOT / source / name, folder / source / name)
    found = lint(folder)
    assert found.returncode == 0, found.stdout
    return folder


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        (
            "src/attnops/masks/tokens.py",
            "from attnops.dispatch.registry import OperationRegistry",
            "Layers",
        ),
        (
            "plugins/attnops_tpu/src/attnops_tpu/flash/plan.py",
            "from attnops.kernels.derivatives import attend",
            "Plugins",
        ),
        ("src/attnops/operations/auto.py", "import attnops_ring", "The core"),
    ],
)
@pytest.mark.slow
def test_an_import_that_breaks_a_contract_fails(sources: Path, module: str, line: str, broken: str) -> None:
    path = sources / module
    text = path.read_text()
    path.write_text(f"{text}\n{line}\n")
    found = lint(sources)
    path.write_text(text)
    assert found.returncode == 1
    assert any(text.startswith(broken) and text.endswith("BROKEN") for text in _contracts(found.stdout)), found.stdout


def _contracts(text: str) -> list[str]:
    """A line a contract: long names are wrapped."""
    lines, current = [], ""
    for line in text.splitlines():
        current = f"{current} {line.strip()}".strip() if line.strip() else ""
        current = re.sub(r" \(\d+ ignored imports?\)$", "", current)
        if current.endswith(("KEPT", "BROKEN")):
            lines.append(current)
            current = ""
    return lines
