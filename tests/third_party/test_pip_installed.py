"""The distributions in this file's folder, built as wheels and pip-installed into one environment.

The fixtures examine that environment once; the tests check the results.
`dispatch/test_plugins.py` has every state of a distribution, in process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

SOURCES = Path(__file__).parent
REPOSITORY = SOURCES.parents[1]
DISTRIBUTIONS = sorted(path.parent.name for path in SOURCES.glob("*/pyproject.toml"))
FIRST_PARTY = [REPOSITORY, *sorted(path.parent for path in REPOSITORY.glob("plugins/*/pyproject.toml"))]

# Prints what a fresh interpreter finds, as JSON. Asking comes last, since it imports.
EXAMINE = """
import json, os, sys, warnings
import jax.numpy as jnp
import attnops
from attnops import OperationMetadata, OperationRegistry

warnings.simplefilter("ignore", attnops.PluginWarning)

def modules(*packages):
    return sorted(m for m in sys.modules if m.startswith(packages))

def ask(name, platform="cpu"):
    try:
        return OperationRegistry.get(name, platform).__module__
    except Exception as error:
        return [type(error).__name__, str(error), repr(error.__cause__)]

def run(name):
    q = jnp.arange(24, dtype=jnp.float32).reshape(1, 3, 2, 4) / 24
    metadata = OperationMetadata()
    return OperationRegistry.create(name, metadata)(q, q, q).attention_outputs.reshape(-1).tolist()

found = {
    "file": attnops.__file__,
    "cli_modules": modules("typer", "rich", "click"),
    "operation_modules": modules("attnops.operations", "acme"),
    "names": OperationRegistry.list_implementations(),
    "states": {p.name: [p.state, p.cause, p.version] for p in OperationRegistry.plugins()},
    "imported_by_listing": os.listdir(os.environ["ATTNOPS_TEST_IMPORTS"]),
    "vanilla": run("vanilla"),
    "imported_by_running_vanilla": sorted(os.listdir(os.environ["ATTNOPS_TEST_IMPORTS"])),
    "asked": {name: ask(name) for name in ("acme", "broken", "too_new", "unmet", "rival", "acme-rival-one:rival")},
    "vanilla_by_platform": {p: ask("vanilla", p) for p in ("cpu", "cuda", "tpu")},
    "acme": run("acme") if "acme" in OperationRegistry.list_implementations() else None,
}
json.dump(found, sys.stdout)
"""


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of its programs, with no module imported by a third party on record yet."""
        imports = self.folder / "imports"
        shutil.rmtree(imports, ignore_errors=True)
        imports.mkdir()
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ATTNOPS_"))}
        env |= {"JAX_PLATFORMS": "cpu", "ATTNOPS_TEST_IMPORTS": str(imports)}
        command = [self.folder / "bin" / program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=self.folder, check=False)

    def pip(self, *arguments: str) -> None:
        done = self.run("python", "-m", "pip", "--disable-pip-version-check", *arguments)
        assert done.returncode == 0, done.stderr

    def link(self, names: Iterable[str]) -> None:
        """Install distributions by links to those of this interpreter, for which no network is needed."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        for name in names:
            distribution = importlib.metadata.distribution(name)
            for entry in {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}:
                if not (site / entry).exists():
                    (site / entry).symlink_to(str(distribution.locate_file(entry)))

    def examine(self) -> dict[str, Any]:
        done = self.run("python", "-c", EXAMINE)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def imported(self) -> list[str]:
        """The third-party modules that the last program imported."""
        return sorted(os.listdir(self.folder / "imports"))


def required(name: str, *extras: str) -> set[str]:
    """The distributions that one requires with these extras, and those that they require."""
    found: set[str] = set()
    for text in importlib.metadata.requires(name) or ():
        one = Requirement(text)
        if one.name not in found and (not one.marker or any(one.marker.evaluate({"extra": x}) for x in ("", *extras))):
            found |= {one.name, *required(one.name, *one.extras)}
    return found


def build(folder: Path, *projects: Path) -> list[Path]:
    """Build a wheel of each project, without leaving anything in its sources."""
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", folder, *projects], check=True)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of the core, its command line and all distributions in this file's folder, by name."""
    projects = [REPOSITORY, REPOSITORY / "plugins/attnops_cli", *(SOURCES / name for name in DISTRIBUTIONS)]
    built = build(tmp_path_factory.mktemp("wheels"), *projects)
    return {wheel.name.partition("-")[0].replace("_", "-"): wheel for wheel in built}


@pytest.fixture(scope="session")
def fresh(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the core and what it requires, and nothing else."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    subprocess.run([sys.executable, "-m", "venv", environment.folder], check=True)
    environment.link(required("attnops"))
    environment.pip("install", "--quiet", "--no-index", str(wheels["attnops"]))
    return environment


@pytest.fixture(scope="session")
def clean(fresh: Environment) -> dict[str, Any]:
    """What there is to know of the environment with the core alone."""
    done = fresh.run("python", "-m", "attnops", "list")
    return fresh.examine() | {"command": [done.returncode, done.stdout, done.stderr]}


@pytest.fixture(scope="session")
def full(fresh: Environment, clean: dict[str, Any], wheels: dict[str, Path]) -> dict[str, Any]:
    """What there is to know of the environment with everything installed, and once one is uninstalled again."""
    fresh.link(required("attnops-cli") - {"attnops"})
    fresh.pip("install", "--quiet", "--no-index", f"{wheels['attnops']}[cli]", str(wheels["attnops-cli"]))
    fresh.pip("install", "--quiet", "--no-index", "--no-deps", *(str(wheels[name]) for name in DISTRIBUTIONS))
    found = fresh.examine()
    for name, arguments in {
        "list": ["list", "--no-load", "--json"],
        "load": ["list", "--json"],
        "load as text": ["list"],
        "doctor": ["doctor", "--json"],
        "doctor as text": ["doctor", "--verbose"],
    }.items():
        done = fresh.run("attnops", *arguments)
        found[name] = json.loads(done.stdout) if "--json" in arguments else done.stdout
        found[f"{name} imported"], found[f"{name} status"] = fresh.imported(), done.returncode
    done = fresh.run("attnops", "demo")
    found["demo"] = [done.returncode, done.stdout, done.stderr]
    fresh.pip("uninstall", "--quiet", "--yes", "acme-attention")
    return found | {"afterwards": fresh.examine()}


def test_the_core_in_a_clean_environment(clean: dict[str, Any], full: dict[str, Any]) -> None:
    assert "site-packages" in clean["file"]
    assert (clean["cli_modules"], clean["operation_modules"]) == ([], [])
    assert "vanilla" in clean["names"]
    assert {state for state, _, _ in clean["states"].values()} == {"discovered"}
    assert full["vanilla"] == clean["vanilla"]
    assert full["operation_modules"] == []


def test_without_the_command_python_m_attnops_names_what_to_install(clean: dict[str, Any]) -> None:
    status, stdout, stderr = clean["command"]
    assert (status, stdout) == (1, "")
    assert stderr.endswith("which is not installed: pip install attnops-cli\n")
    assert stderr.count("\n") == 1


def test_listing_imports_none_and_running_only_what_is_named(full: dict[str, Any]) -> None:
    assert full["imported_by_listing"] == []
    assert full["list imported"] == []
    assert full["imported_by_running_vanilla"] == ["acme_tpu_vanilla"]  # it has the name, so it is asked
    assert {"acme", "broken", "too_new", "unmet", "rival"} <= set(full["names"])
    assert full["states"]["acme-attention:acme"] == ["discovered", "", "1.0"]


def test_one_that_works_runs_and_is_gone_when_uninstalled(full: dict[str, Any]) -> None:
    mean = [sum(i + 8 * row for row in range(3)) / 72 for i in range(8)]
    assert full["asked"]["acme"] == "acme_attention"
    assert full["acme"] == pytest.approx(mean * 3)
    afterwards = full["afterwards"]
    assert set(full["names"]) - set(afterwards["names"]) == {"acme"}
    error, message, _ = afterwards["asked"]["acme"]
    assert (error, "impl_name='acme' is not an installed operation" in message) == ("UnknownOperationError", True)
    assert afterwards["vanilla"] == full["vanilla"]
    assert {name for name, _ in full["asked"].items() if afterwards["asked"][name] != full["asked"][name]} == {"acme"}


BROKEN = {
    "acme-broken:broken": ("failed", "importing acme_broken:Operation raised OSError: libacme.so.2: cannot open"),
    "acme-too-new:too_new": ("incompatible", "acme_too_new:Operation has api_version=99, but this attnops has"),
    "acme-unmet:unmet": ("incompatible", "requires numpy>=999, but "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_shows_its_cause(full: dict[str, Any], name: str) -> None:
    state, cause = BROKEN[name]
    error, message, chained = full["asked"][name.partition(":")[2]]
    assert (error, f"{name} is {state}: {cause}" in message) == ("PluginError", True)
    assert chained.startswith("OSError('libacme.so.2" if state == "failed" else "None")

    (listed,) = (plugin for plugin in full["load"] if plugin["name"] == name)
    assert (listed["state"], listed["platforms"], cause in listed["cause"]) == (state, None, True)
    assert ("raise OSError" in listed["traceback"]) is (state == "failed")
    assert f"{name} is {state}: {cause}" in full["load as text"]

    distribution = name.partition(":")[0]
    (problem,) = (problem for problem in full["doctor"]["problems"] if name in problem["what"])
    assert f"{name} is {state}: {cause}" in problem["what"]
    assert problem["install"].startswith(f"pip install --upgrade attnops {distribution}; ")
    assert f"{name} is {state}: {cause}" in full["doctor as text"]


def test_two_rivals_are_ambiguous_and_named(full: dict[str, Any]) -> None:
    served = "'rival' on cpu is served by acme-rival-one:rival and acme-rival-two:rival with the same priority=0"
    error, message, _ = full["asked"]["rival"]
    assert (error, message.startswith(served)) == ("AmbiguousOperationError", True)
    assert full["asked"]["acme-rival-one:rival"] == "acme_rival_one"
    assert served in full["load as text"]
    assert any(problem["what"].startswith(served) for problem in full["doctor"]["problems"])
    states = {plugin["name"]: (plugin["state"], plugin["platforms"]) for plugin in full["load"]}
    assert states["acme-rival-one:rival"] == states["acme-rival-two:rival"] == ("loaded", ["cpu"])


def test_one_that_overrides_vanilla_for_tpu_only(full: dict[str, Any]) -> None:
    core = "attnops.operations.vanilla"
    assert full["vanilla_by_platform"] == {"cpu": core, "cuda": core, "tpu": "acme_tpu_vanilla"}
    platforms = {plugin["name"]: plugin["platforms"] for plugin in full["load"]}
    assert platforms["acme-tpu-vanilla:vanilla"] == ["tpu"]
    assert platforms["attnops:vanilla"] == ["any"]


def test_doctor_imports_each_and_finds_nothing_else_wrong(full: dict[str, Any]) -> None:
    assert (full["doctor status"], full["doctor as text status"], full["load status"]) == (1, 1, 0)
    assert full["doctor imported"] == [
        name.replace("-", "_") for name in DISTRIBUTIONS if name not in ("acme-unmet", "acme-engine-pages")
    ]  # what is known not to work is not imported, nor what has no operations
    assert len(full["doctor"]["problems"]) == len(BROKEN) + 1
    assert "raise OSError" in full["doctor as text"]


def test_a_command_that_is_not_installed_names_its_distribution(full: dict[str, Any]) -> None:
    assert full["demo"] == [2, "", "attnops: attnops demo is a command of attnops-lm: pip install attnops-lm\n"]


@pytest.mark.parametrize("project", FIRST_PARTY, ids=["attnops", *(x.name for x in FIRST_PARTY[1:])])
@pytest.mark.tier(every=6)
def test_wheels_are_reproducible(tmp_path: Path, project: Path) -> None:
    """The same sources give the same bytes, wherever they lie and whenever they were written."""
    ignored = shutil.ignore_patterns(".*_cache", ".venv*", "__pycache__", ".git", "docs", "tests", "plugins")
    digests = set()
    copy = shutil.copytree(project, tmp_path / "a" / "source", ignore=ignored)
    for place, time in (("a", 1_600_000_000), ("b", 1_700_000_000)):
        if place == "b":
            copy = copy.rename(tmp_path / "source-elsewhere")
        for path in copy.rglob("*"):
            os.utime(path, (time, time))
        (wheel,) = build(tmp_path / place / "wheels", copy)
        digests.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert len(digests) == 1
