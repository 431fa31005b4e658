"""Sphinx: `make docs` builds with warnings as errors."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

from pictures import MASKS, draw_all  # noqa: E402

import attnops  # noqa: E402
from attnops.dispatch.rank import Rank  # noqa: E402

for module in (attnops, attnops.kernels, importlib.import_module("attnops_testing")):
    for public in module.__all__:  # names are imported at first use; autodoc sees them only after that
        getattr(module, public)

project = "attnops"
version = release = attnops.__version__
copyright = "The attnops authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"attnops {release}"
html_static_path = ["_static"]
html_css_files = ["masks.css", "tables.css", "layout.css"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# What single backticks in docstrings mean: a name, linked where the API has it.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["torch", "transformers", "keras"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Class attributes", "Attributes")]


SECTION = re.compile(r"^\{\{(?P<file>[\w/.]+): (?P<title>.+)\}\}$", re.MULTILINE)


def section(file: str, title: str) -> str:
    """The text below a heading of a document of the repository; links to files become their paths.

    Raises:
        KeyError: the document has no such heading.
    """
    text = (ROOT / file).read_text(encoding="utf-8")
    fences = [m.span() for m in re.finditer(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)]
    headings = [
        m for m in re.finditer(r"^(#+) (.+)$", text, re.MULTILINE) if not any(a <= m.start() < b for a, b in fences)
    ]
    for i, heading in enumerate(headings):
        if heading[2] != title:
            continue
        later = [m.start() for m in headings[i + 1 :] if len(m[1]) <= len(heading[1])]
        end = later[0] if later else len(text)
        inside = [m for m in headings if heading.end() <= m.start() < end]
        body = text[heading.end() : end]
        for m in reversed(inside):  # its own headings are of the second level and below
            at = m.start() - heading.end()
            body = f"{body[:at]}{'#' * (len(m[1]) - len(heading[1]) + 1)}{body[at + len(m[1]) :]}"
        parts = re.split(r"(^```.*?^```)", body, flags=re.MULTILINE | re.DOTALL)
        # A link to a file of the repository is its path.
        parts[::2] = [
            re.sub(
                r"\[([^]]+)\]\(([^)#:]+)[^)]*\)", lambda m: f"{m[1]} (`{(Path(file).parent / m[2]).as_posix()}`)", part
            )
            for part in parts[::2]
        ]
        return re.sub(r"<!--.*?-->\n?", "", "".join(parts), flags=re.DOTALL).strip()
    raise KeyError(f"{file} has no heading {title!r}")


def masks_with_pictures() -> str:
    """The pictures of masks, each with its expression."""
    figures = "\n\n".join(
        f"```{{figure}} _build/pictures/{name}.svg\n:alt: {name}\n\n`{expression}`\n```"
        for name, expression in MASKS.items()
    )
    return f"````{{container}} masks\n\n{figures}\n````"


def ranks() -> str:
    """The order in which `auto` picks."""
    return "\n".join(f"{rank.place}. {rank.reason}" for rank in Rank)


def include_sections(app: Any, name: str, source: list[str]) -> None:
    """Put sections of the repository's documents in place of ``{{README.md: The contract}}``."""
    text = SECTION.sub(lambda m: section(m["file"], m["title"]), source[0])
    source[0] = text.replace("{{pictures}}", masks_with_pictures()).replace("{{ranks}}", ranks())


def tables(app: Any, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Convert Markdown tables in docstrings to reStructuredText."""
    # reStructuredText reads "B." alone as the start of a list.
    lines[:] = [re.sub(r"^(:\w+ \w+: [A-Z])\.$", r"\1", line) for line in lines]
    spans, start = [], None
    for i, line in enumerate([*lines, ""]):
        if line.startswith("|") and start is None:
            start = i
        elif not line.startswith("|") and start is not None:
            spans.append((start, i))
            start = None
    for start, end in reversed(spans):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]
        rows = [row for row in rows if not all(set(cell) <= set("-: ") and cell for cell in row)]
        listed = ["", ".. list-table::", "   :header-rows: 1", ""]
        for row in rows:
            listed += [f"   {'*' if i == 0 else ' '} - {cell}" for i, cell in enumerate(row)]
        lines[start:end] = [*listed, ""]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    draw_all(Path(__file__).parent / "_build" / "pictures")
    app.connect("source-read", include_sections)
    app.connect("autodoc-process-docstring", tables)
