"""Writes the generated parts of README.md: the output of the examples, the table of features, the example plugin.

``--check`` writes nothing, and fails unless they are up to date.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

# The table has `flash` on CPUs as it is everywhere: attnops-cpu is installed only where it could be compiled.
if [*importlib.metadata.distributions(name="attnops-cpu")]:
    os.environ["ATTNOPS_DISABLE"] = "attnops-cpu"

from attnops import OperationRegistry
from attnops.dispatch.plugins import Plugin
from attnops_linear.testing import markdown_table as linear_table
from attnops_testing.support_table import markdown_table

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
# The files of the example of a plugin, in the order in which the README shows them.
PLUGIN = {"pyproject.toml": "toml", "attnops_mykernel.py": "python"}


def core_only() -> contextlib.AbstractContextManager[Any]:
    """A context in which only the core's operations are installed."""
    plugins = OperationRegistry.plugins

    def of_the_core(**options: bool) -> list[Plugin]:
        return [plugin for plugin in plugins(**options) if plugin.distribution == "attnops"]

    return mock.patch.object(OperationRegistry, "plugins", of_the_core)


def printed(text: str) -> list[str]:
    """The output of each of the README's first two examples, run in turn with only the core installed."""
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    if len(examples) < 2:
        raise ValueError("README.md has fewer than two examples in Python")
    names: dict[str, Any] = {}
    outputs = []
    for code in examples:
        with core_only(), contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, "README.md", "exec"), names)
        outputs.append(f"```text\n{out.getvalue().rstrip()}\n```")
    return outputs


def plugin() -> str:
    """The files of the example plugin, each as a block of code that begins with its name."""
    files = {name: (ROOT / "examples" / "plugin" / name).read_text(encoding="utf-8") for name in PLUGIN}
    return "\n\n".join(f"```{PLUGIN[name]}\n# {name}\n{text.rstrip()}\n```" for name, text in files.items())


def updated(text: str, name: str, part: str) -> str:
    """The text of the README with one of its generated parts replaced."""
    begin, end = f"<!-- {name}: written by tools/readme.py -->", f"<!-- {name} end -->"
    head, _, rest = text.partition(begin)
    _, separator, tail = rest.partition(end)
    if not separator:
        raise ValueError(f"README.md has no part between {begin} and {end}")
    return f"{head}{begin}\n{part}\n{end}{tail}"


if __name__ == "__main__":
    before = README.read_text(encoding="utf-8")
    first, second = printed(before)
    after = updated(updated(before, "printed", first), "decoded", second)
    after = updated(updated(after, "features", markdown_table()), "plugin", plugin())
    after = updated(after, "linear", linear_table())
    if "--check" in sys.argv:
        sys.exit("README.md is out of date; run tools/readme.py" if before != after else 0)
    README.write_text(after, encoding="utf-8")
