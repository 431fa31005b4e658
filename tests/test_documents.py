"""What the documents say of the files is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("plugin", ["attnops_tpu", "attnops_triton", "attnops_ring"])
def test_the_map_in_a_plugins_readme_names_files_that_are_there(plugin: str) -> None:
    text = (ROOT / "plugins" / plugin / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z_/]+\.py)`", row)}
    source = ROOT / "plugins" / plugin / "src" / plugin
    there = {str(path.relative_to(source)) for path in source.rglob("*.py") if not path.name.startswith("_")}
    assert named
    assert named <= there


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"])
def test_paths_and_links_lead_to_files(path: str) -> None:
    document = ROOT / path
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [document.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    named = [ROOT / name for name in re.findall(r"`((?:benchmarks|examples|plugins|src|tests|tools)/[\w./]+)`", text)]
    assert links or named
    assert not [str(found) for found in links + named if not found.exists()]


def test_the_figures_name_every_script() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert not [path.name for path in (ROOT / "benchmarks").glob("*.py") if f"`{path.name}`" not in text]
