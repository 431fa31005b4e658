"""Every example of the documentation runs as printed; `make docs` builds its pages."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {page.name: re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
         for page in sorted(DOCS.glob("*.md"))}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("page", [name for name, blocks in PAGES.items() if blocks])
@pytest.mark.tier(every=5)
def test_the_examples_of_a_page_run_from_top_to_bottom(page: str) -> None:
    names = {"__name__": page}
    for block in PAGES[page]:
        exec(compile(block, page, "exec"), names)


def test_most_pages_have_examples() -> None:
    assert {"index.md", "tutorial.md", "choosing.md", "frameworks.md", "numerics.md"} <= {n for n in PAGES if PAGES[n]}


def test_pages_name_sections_that_are_there(monkeypatch) -> None:
    """Sections of the README and its like are parts of pages."""
    text = (DOCS / "conf.py").read_text(encoding="utf-8")
    pattern = re.compile(re.search(r'SECTION = re.compile\(r"(.+)", re.MULTILINE\)', text)[1], re.MULTILINE)
    found = [m for page in DOCS.glob("*.md") for m in pattern.finditer(page.read_text(encoding="utf-8"))]
    assert len(found) >= 8
    for m in found:
        document = (DOCS.parent / m["file"]).read_text(encoding="utf-8")
        assert re.search(rf"^#+ {re.escape(m['title'])}$", document, re.MULTILINE), m[0]


@pytest.mark.slow
def test_every_picture_is_of_a_mask() -> None:
    pictures = runpy.run_path(str(DOCS / "pictures.py"))
    assert len({str(pictures["mask_of"](expression)) for expression in pictures["MASKS"].values()}) == 11
