"""Writes the generated parts of README.md: what the example prints, features, plugin.

``--check`` only says whether they are up to date.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from attnops import OperationRegistry
from attnops.dispatch.plugins import Plugin
from attnops.features import markdown_table

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
# The files of the example of a plugin, in the order in which the README shows them.
PLUGIN = {"pyproject.toml": "toml", "attnops_mykernel.py": "python"}


def core_only() -> contextlib.AbstractContextManager[Any]:
    """A context in which no operations but the core's are installed."""
    plugins = OperationRegistry.plugins

    def of_the_core(**options: bool) -> list[Plugin]:
        return [found for found in plugins(**options) if found.distribution == "attnops"]

    return mock.patch.object(OperationRegistry, "plugins", of_the_core)


def printed(text: str) -> str:
    """What the first example of the README prints where the core alone is installed, as a block of code."""
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    if code is None:
        raise ValueError("README.md has no example")
    with core_only(), contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code[1], "README.md", "exec"), {})
    return f"```text\n{out.getvalue().rstrip()}\n```"


def plugin() -> str:
    """The files of the example of a plugin, each as a block of code that begins with its name."""
    files = {name: (ROOT / "examples" / "plugin" / name).read_text(encoding="utf-8") for name in PLUGIN}
    return "\n\n".join(f"```{PLUGIN[name]}\n# {name}\n{text.rstrip()}\n```" for name, text in files.items())


def updated(text: str, name: str, part: str) -> str:
    """The text of the README with one of its generated parts as it must be."""
    begin, end = f"<!-- {name}: written by tools/readme.py -->", f"<!-- {name} end -->"
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"README.md has no part between {begin} and {end}")
    return f"{head}{begin}\n{part}\n{end}{tail}"


if __name__ == "__main__":
    before = README.read_text(encoding="utf-8")
    after = updated(before, "printed", printed(before))
    after = updated(updated(after, "features", markdown_table()), "plugin", plugin())
    if "--check" in sys.argv:
        sys.exit("README.md is not what tools/readme.py writes; run it" if before != after else 0)
    README.write_text(after, encoding="utf-8")
