"""Every example of the documentation runs as printed; `make docs` builds its pages."""

import importlib
import inspect
import re
import runpy
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import attnops
import attnops_testing
from attnops import masks
from attnops_caches import DenseCache

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


PUBLIC = (
    "attnops", "attnops.masks", "attnops.biases", "attnops.sharding", "attnops.softmax", "attnops.dropout",
    "attnops.kernels", "attnops_caches", "attnops_testing",
)  # fmt: skip


def examples() -> dict[str, str]:
    """The indented blocks after ``::`` of public docstrings, by the name of what they document."""
    found: dict[str, str] = {}
    for module in map(importlib.import_module, PUBLIC):
        for name in module.__all__:
            thing = getattr(module, name)
            methods = {f"{name}.{n}": x for n, x in vars(thing).items()} if inspect.isclass(thing) else {}
            for label, x in {name: thing, **methods}.items():
                text = inspect.getdoc(x) if inspect.isclass(x) or callable(x) else None
                for block in re.findall(r"::\n\n((?: {4}.*\n|\n)+)", f"{text}\n") if text else ():
                    found[label] = textwrap.dedent(block).strip()
    return found


@pytest.mark.slow
def test_pictures_of_masks_in_docstrings_are_of_these_masks() -> None:
    pictures = {name: block for name, block in examples().items() if "█" in block}
    assert len(pictures) == 8
    for block in pictures.values():
        head, *rows = block.splitlines()
        starts = [m.start() for m in re.finditer(r"(?:^|(?<= {3}))\S", head)]
        expression = ""
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            title, _, size = head[start:end].strip().partition(", T = ")
            expression = expression if title == "the same" else title
            drawn = [line for row in rows if (line := row[start:end].strip())]
            shape = len(drawn), len(drawn[0].split())
            assert [line.rstrip() for line in eval(expression, vars(masks)).show(*shape).splitlines()] == drawn, title
            assert not size or size.removeprefix("S = ") in (str(shape[0]), f"{shape[0]}, S = {shape[1]}"), title


@pytest.mark.slow
def test_examples_in_docstrings_run() -> None:
    x = jnp.ones((1, 4, 2, 8))
    names = {
        "attnops": attnops, "jax": jax, "jnp": jnp, "Causal": masks.Causal,
        "query": x, "key": x, "value": x, "x": x, "mask": masks.Causal().bind(1, 2, 4, 4),
        "B": 1, "H": 2, "T": 4, "S": 4, "L": 2, "op": attnops.OperationRegistry.create("flash"),
        "cache": DenseCache.create(batch=1, length=4, kv_heads=2, head_dim=8, dtype=jnp.float32, layers=2),
        "function": jnp.sin, "Rank": attnops.Rank, "RankBetween": attnops.RankBetween,
        "TraceContext": attnops.kernels.TraceContext, "Conformance": attnops_testing.Conformance,
        "OperationConformance": attnops_testing.OperationConformance,
    }  # fmt: skip
    ran = {name: block for name, block in examples().items() if "█" not in block}
    # An equation, and a call whose operation test_reference.py has.
    for name in ("Cache", "check_against"):
        del ran[name]
    assert len(ran) >= 7
    for name, block in ran.items():
        exec(compile(block, name, "exec"), dict(names))
