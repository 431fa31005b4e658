"""The libraries of the scoreboard, and an environment for each."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any, Final

from attnops_testing.score.cases import Size

ADAPTERS: Final = Path(__file__).parent / "adapters"


@dataclasses.dataclass(frozen=True)
class Library:
    """A library's attention.

    Attributes:
        name: the name of the adapter's file.
        path: the adapter.
        requirements: what pip installs, from the inline metadata of scripts (PEP 723) in the adapter; its constant
            ``ALONE`` lists what is installed in addition, without what that requires.
        declared: the adapter's constants.
        about: the adapter's docstring.
    """

    name: str
    path: Path
    requirements: tuple[str, ...]
    declared: dict[str, Any]
    about: str

    @property
    def size(self) -> Size:
        """The plain problem that it serves."""
        return Size(**self.declared.get("SIZE", {}))

    @property
    def alone(self) -> tuple[str, ...]:
        """What is installed without what it requires."""
        return tuple(self.declared.get("ALONE", ()))

    def environment(self, folder: Path, python: str) -> Path:
        """The Python of its environment, which is made if it is not there.

        Args:
            folder: has all environments; libraries with the same requirements share one.
            python: the Python that makes it.

        Raises:
            subprocess.CalledProcessError: the environment can't be made; `stderr` has pip's message.
        """
        key = hashlib.sha256(repr(((*self.requirements, *self.alone), python)).encode()).hexdigest()[:12]
        made = folder / key
        ready = made / "ready"
        if not ready.exists():
            pip = [str(made / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
            commands = [[python, "-m", "venv", "--clear", str(made)], [*pip, "numpy", *self.requirements]]
            for command in [*commands, *([*pip, "--no-deps", x] for x in self.alone)]:
                subprocess.run(command, check=True, capture_output=True, text=True)
            ready.write_text("\n".join((*self.requirements, *self.alone)))
        return made / "bin" / "python"


def libraries(folder: Path = ADAPTERS) -> dict[str, Library]:
    """The libraries by name; nothing of them is imported."""
    return {path.stem: _read(path) for path in sorted(folder.glob("*.py"))}


def _read(path: Path) -> Library:
    text = path.read_text()
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", text, re.MULTILINE)
    assert block is not None, f"{path} has no inline metadata of scripts (PEP 723)"
    lines = (line.removeprefix("#").removeprefix(" ") for line in block[1].splitlines())
    tree = ast.parse(text)
    declared = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
    }
    requirements = tomllib.loads("\n".join(lines))["dependencies"]
    return Library(path.stem, path, tuple(requirements), declared, ast.get_docstring(tree) or "")
