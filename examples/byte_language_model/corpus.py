"""The text that ships with Python: its help topics, its licence and the docstrings of its standard library.

Nothing is downloaded, and only the help topics are imported. One Python version always gives the same documents.
"""

from __future__ import annotations

import ast
import functools
import pydoc_data.topics
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def load_documents(seed: int = 0) -> tuple[str, ...]:
    """Every document once, in an order that the seed determines: about 4,000 of 1.5 MB, which needs some seconds.

    A Python without its licence or without its sources gives fewer documents: the help topics alone are 0.5 MB.
    """
    # Many methods have the same docstring as another; a dict drops the copies and keeps the order.
    documents = list(dict.fromkeys([*topics(), *licences(), *docstrings()]))
    random.Random(seed).shuffle(documents)
    return tuple(documents)


def topics() -> list[str]:
    """What `help("topics")` lists: the language reference, in parts."""
    return [text.strip() for _, text in sorted(pydoc_data.topics.topics.items())]


def licences() -> list[str]:
    """The text of `license()`, if this Python has it. Unlike `license()`, it reads no file of the working directory."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = (folder / name for folder in (stdlib, stdlib.parent) for name in ("LICENSE.txt", "LICENSE"))
    texts = (file.read_text(encoding="utf-8") for file in files if file.is_file())
    return [text.strip() for text in texts if "PYTHON SOFTWARE FOUNDATION" in text][:1]


def docstrings() -> Iterator[str]:
    """The docstrings of the standard library's modules, classes and functions whose source is installed. Imports none
    of them.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names):
        for file in (stdlib / f"{name}.py", stdlib / name / "__init__.py"):
            if file.is_file():
                tree = ast.parse(file.read_bytes())
                texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
                yield from filter(None, texts)
