"""What the distributions of this repository are: their requirements, their licences, and what their wheels hold."""

import email
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from attnops import __version__

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
PROJECTS = [ROOT, *PLUGINS]
# A link that leads nowhere from a package index, which shows the README without the repository.
RELATIVE_LINK = re.compile(r"\[[^\]]+\]\((?!https?://|#)([^)\s]+)\)")


def project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: project(folder)["name"])
def test_plugins_move_with_the_core(folder):
    """All versions move together, and what a plugin requires says so."""
    extras = project(folder).get("optional-dependencies", {})
    wanted = [*project(folder)["dependencies"], *(text for extra in extras.values() for text in extra)]
    assert f"attnops=={__version__}" in wanted
    assert all(f"=={__version__}" in text for text in wanted if text.startswith("attnops"))
    (version,) = folder.glob("src/*/_version.py")
    assert version.read_text(encoding="utf-8") == (ROOT / "src/attnops/_version.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: project(folder)["name"])
def test_licences_are_one_and_links_lead_somewhere(folder):
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    text = re.sub(r"```.*?```", "", (folder / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert RELATIVE_LINK.findall(text) == []
    assert RELATIVE_LINK.findall("[map](CONTRIBUTING.md) and [a](https://a.b)") == ["CONTRIBUTING.md"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", folder, *PROJECTS], check=True)
    return {path.name.partition("-")[0]: zipfile.ZipFile(path) for path in folder.glob("*.whl")}


@pytest.mark.slow
@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: project(folder)["name"])
def test_wheels_hold_licence_and_types_and_no_tests(wheels, folder):
    package = project(folder)["name"].replace("-", "_")
    names = wheels[package].namelist()
    metadata = f"{package}-{__version__}.dist-info"
    assert f"{metadata}/licenses/LICENSE" in names
    assert f"{package}/py.typed" in names
    assert [name for name in names if re.search(r"(^|/)(test_|tests/|conftest)", name)] == []
    read = email.message_from_bytes(wheels[package].read(f"{metadata}/METADATA"))
    assert (read["License-Expression"], read["Requires-Python"]) == ("Apache-2.0", ">=3.11")


@pytest.mark.slow
def test_the_language_models_wheel_has_the_data_that_the_demo_reads(wheels):
    held = {*wheels["attnops_lm"].namelist()}
    data = ("reference.npz", "sentence_embeddings/reference.npz", "sentence_embeddings/sentences.txt")
    assert {f"attnops_lm/{name}" for name in data} <= held


@pytest.mark.slow
def test_the_cores_wheel_has_the_core_alone(wheels):
    folders = {name.split("/")[1] for name in wheels["attnops"].namelist() if name.startswith("attnops/")}
    assert not folders & {"adapters", "bench", "caches", "cli", "examples", "flax.py", "keras.py", "testing"}
