"""Install each distribution alone, with its declared dependencies and no others, and run its quick tests.

    make alone [ONLY="attnops attnops-caches"]

Wheels are built from this checkout, and each is installed with its extra ``test`` into an environment of its own; other
distributions of this repository are there only if it declares them. ``--also`` names further requirements
that are installed without their dependencies, such as weights and assemblers. Each distribution needs some minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Tests of several distributions together, which `make test` runs.
TOGETHER = (
    "tests/third_party", "tests/parity", "tests/dispatch/test_ranking.py", "tests/test_quick_tests.py",
    "tests/test_documents.py",
)  # fmt: skip


def folders() -> dict[str, Path]:
    """The folder of each distribution that has tests, by its name."""
    plugins = {path.parent.name.replace("_", "-"): path.parent for path in ROOT.glob("plugins/*/tests")}
    return {"attnops": ROOT} | plugins


def run(*command: str | Path, **changes: str) -> int:
    """The exit status of a command in the checkout, without this process's own paths of Python."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ATTNOPS_"))}
    return subprocess.run([str(x) for x in command], cwd=ROOT, env=env | changes, check=False).returncode


def alone(name: str, also: list[str], wheels: Path, work: Path) -> bool:
    """Whether the quick tests of a distribution pass where it is installed alone, with requirements ``also``."""
    python = work / name / "bin" / "python"
    if run(sys.executable, "-m", "venv", work / name):
        return False
    if run(python, "-m", "pip", "install", "--quiet", "--find-links", wheels, f"{name}[test]"):
        return False
    if also and run(python, "-m", "pip", "install", "--quiet", "--no-deps", *also):
        return False
    tests = ["tests"] if name == "attnops" else [str(folders()[name].relative_to(ROOT) / "tests")]
    left_out = [f"--ignore={path}" for path in TOGETHER]
    options = ["-q", "-p", "no:cacheprovider", "-o", "pythonpath=tests/support plugins/attnops_lm/tests/support"]
    marked = ["-m", "not slow and not exhaustive"]
    return run(python, "-m", "pytest", *options, *marked, *left_out, *tests, JAX_PLATFORMS="cpu") == 0


def main() -> None:
    """Exit with 1 if a distribution's tests fail."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", default=list(folders()), choices=[*folders()], metavar="NAME")
    parser.add_argument("--also", nargs="+", action="append", default=[], metavar=("NAME", "REQUIREMENT"))
    given = parser.parse_args()
    names, also = given.only, {name: requirements for name, *requirements in given.also}
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder) / "wheels"
        if run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", wheels, *folders().values()):
            sys.exit(1)
        failed = [name for name in names if not alone(name, also.get(name, []), wheels, Path(folder))]
    print(f"alone: {', '.join(failed)} failed" if failed else f"alone: {', '.join(names)} passed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
