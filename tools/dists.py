"""Build what is released of every distribution in ``dist``, check its metadata, and try it where nothing else is.

    make dists

Wheels are built from the source distributions. attnops-cpu's are compiled by ``make wheels``, or by cibuildwheel; here
it has its source distribution alone. The trial installs the wheels, without this repository, in an empty environment.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DIST: Final = ROOT / "dist"
COMPILED: Final = "attnops_cpu"
# What a new user installs, and the commands that then answer.
INSTALLED: Final = ("attnops", "attnops-cli", "attnops-testing", "attnops-tpu", "attnops-linear")
COMMANDS: Final = (
    ("doctor",), ("list",), ("explain", "auto", "--platform", "tpu"),
    ("prove", "attnops:flash", "--section", "First calls"),
)  # fmt: skip


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command; its failure is the end."""
    subprocess.run(command, cwd=cwd, check=True)


def build() -> list[Path]:
    """The source distributions and wheels of this version."""
    shutil.rmtree(DIST, ignore_errors=True)
    for project in (ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))):
        kinds = ["--sdist"] if project.name == COMPILED else []
        run(sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", DIST, project)
    return sorted(DIST.iterdir())


def trial() -> None:
    """Install the wheels in an empty environment, and run commands there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        binary = Path(folder, "bin")
        run(binary / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--find-links", DIST,
            *INSTALLED)  # fmt: skip
        for command in COMMANDS:
            run(binary / "attnops", *command, cwd=Path(folder))


if __name__ == "__main__":
    files = build()
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    trial()
    print(f"{len(files)} files in {DIST}")
