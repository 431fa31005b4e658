"""No file imports, directly or through others, a file that imports it; in any distribution."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [ROOT / "src", *sorted(ROOT.glob("plugins/*/src"))]


def imported(tree: ast.AST) -> Iterator[str]:
    """The names that a module imports when it is imported: not for type checking, and not in functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imported(node)


def graph(modules: dict[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports, of sources by module."""
    found: dict[str, set[str]] = {}
    for name, text in modules.items():
        named = [given if given in modules else given.rpartition(".")[0] for given in imported(ast.parse(text))]
        found[name] = {other for other in named if other in modules and other != name}
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
def test_no_files_import_each_other(source: Path) -> None:
    parts = {path: path.relative_to(source).with_suffix("").parts for path in source.rglob("*.py")}
    names = {path: ".".join(part for part in own if part != "__init__") for path, own in parts.items()}
    modules = {name: path.read_text(encoding="utf-8") for path, name in names.items()}
    assert modules
    graphlib.TopologicalSorter(graph(modules)).prepare()


def test_a_circle_is_found() -> None:
    with pytest.raises(graphlib.CycleError, match=r"'a', 'c', 'b', 'a'|'b', 'a', 'c', 'b'|'c', 'b', 'a', 'c'"):
        graphlib.TopologicalSorter(graph({"a": "import b", "b": "from c import x", "c": "import a"})).prepare()
