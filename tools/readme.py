"""Writes the generated part of README.md: the feature table. ``--check`` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from attnops.features import markdown_table

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- features: written by tools/readme.py -->", "<!-- features end -->"


def updated(text: str) -> str:
    """The text of the README with the feature table of the code as it is."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{markdown_table()}\n{END}{tail}"


if __name__ == "__main__":
    before = README.read_text(encoding="utf-8")
    after = updated(before)
    if "--check" in sys.argv:
        sys.exit("README.md's feature table is out of date; run tools/readme.py" if before != after else 0)
    README.write_text(after, encoding="utf-8")
