"""What the documents say of the files is true."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnops
from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ALiBi, alibi_slopes
from attnops.dispatch import operation
from attnops.masks import Causal
from attnops.sharding import create_mesh
from attnops_caches import PagedCache, Quantized

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# As CONTRIBUTING.md names a function: a file below src/attnops or a plugin's src, and a name in it.
STEP = re.compile(r"`([\w/]+\.py):([\w.]+)`")


@pytest.mark.parametrize("plugin", ["attnops_tpu", "attnops_triton", "attnops_ring", "attnops_vllm", "attnops_sglang"])
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


def section(title: str) -> str:
    """The text of CONTRIBUTING.md below a heading, up to the next."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", CONTRIBUTING, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def source_of(name: str) -> Path:
    package = name.partition("/")[0]
    return ROOT / (f"plugins/{package}/src" if package.startswith("attnops_") else "src/attnops") / name


def names_in(path: Path) -> Iterator[str]:
    """The functions, classes, methods and constants of a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_contributing_names_functions_that_are_there() -> None:
    named = STEP.findall(CONTRIBUTING)
    assert len(named) > 60
    there = {file: set(names_in(source_of(file))) if source_of(file).exists() else set() for file, _ in named}
    assert not [f"{file}:{name}" for file, name in named if name not in there[file]]


def calls(run: Callable[[], Any]) -> list[str]:
    """The functions of attnops and its plugins that are called, each once, in the order of their first calls."""
    found: dict[str, None] = {}

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        name = re.search(r"/src/(?:attnops/)?((?:attnops_\w+/)?[\w/]+\.py)$", code.co_filename)
        if event == "call" and name:
            found[f"{name[1]}:{code.co_qualname}"] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return list(found)


def flash(**metadata: Any) -> Callable[[], Any]:
    return lambda: OperationRegistry.create("flash", OperationMetadata(**metadata))


def on_a_mesh(name: str, sizes: tuple[int, ...], axes: tuple[str, ...]) -> Callable[[], Any]:
    def make() -> Any:
        mesh = create_mesh(sizes, axes, devices=jax.devices()[:4])
        return OperationRegistry.create(name, OperationMetadata(mesh=mesh))

    return make


# By section: the operation that is called, and the package that it needs.
PATHS = {
    "The dispatcher": (on_a_mesh("attnops:flash", (2, 2), ("dp", "tp")), "attnops"),
    "`flash` on a CPU": (flash(platform="cpu"), "attnops"),
    "`flash` on a TPU": (flash(platform="tpu", interpret=True), "attnops_tpu"),
    "`flash` on a GPU": (flash(platform="cuda", interpret=True), "attnops_triton"),
    "`ring`": (on_a_mesh("ring", (1, 4), ("dp", "sp")), "attnops_ring"),
}


@pytest.mark.parametrize("title", [title for title, (_, package) in PATHS.items() if importlib.util.find_spec(package)])
@pytest.mark.tier(quick=["`flash` on a TPU"])
def test_a_call_takes_the_steps_in_the_order_that_contributing_says(title: str) -> None:
    op = PATHS[title][0]()
    x = jax.ShapeDtypeStruct((2, 72, 2, 8), jnp.float32)

    def run(q: Any, k: Any, v: Any) -> Any:
        return op(q, k, v, mask=Causal()).attention_outputs.sum()

    def both() -> None:
        jax.eval_shape(run, x, x, x)
        jax.eval_shape(jax.grad(run, (0, 1, 2)), x, x, x)

    steps = [":".join(step) for step in STEP.findall(section(title).partition("\n\n`auto`")[0])]
    called = calls(both)
    assert set(steps) <= set(called)
    assert steps == sorted(dict.fromkeys(steps), key=called.index)


@pytest.mark.parametrize(
    ("title", "name"), [("A call over a cache", "vanilla"), ("`flash` over a cache, in place", "flash")]
)
@pytest.mark.slow
def test_a_call_over_a_cache_takes_the_steps_in_the_order_that_contributing_says(title: str, name: str) -> None:
    op = OperationRegistry.create(f"attnops:{name}", OperationMetadata(platform="cpu"))
    table = np.arange(8).reshape(2, 4)
    cache = PagedCache.create(
        batch=2, pages=8, page_size=4, max_pages=4, kv_heads=2, head_dim=8, dtype=jnp.float32, codec=Quantized("int8"),
        table=table,
    )  # fmt: skip
    x, bias = jax.ShapeDtypeStruct((2, 3, 2, 8), jnp.float32), ALiBi(alibi_slopes(2))

    def run(q: Any, k: Any, v: Any) -> Any:
        return op.step(q, k, v, cache, mask=Causal(), bias=bias)[0].attention_outputs

    steps = [":".join(step) for step in STEP.findall(section(title)) if "Request" not in step[1]]
    called = calls(lambda: jax.eval_shape(run, x, x, x))
    assert len(steps) > 4
    assert set(steps) <= set(called)
    assert steps == sorted(dict.fromkeys(steps), key=called.index)


def test_the_plugin_api_is_one_list() -> None:
    listed = re.findall(
        r"`(attnops[\w.]*)`", "".join(re.findall(r"^\|(.*?)\|", section("The plugin API"), re.MULTILINE))
    )
    assert listed
    documented = (ROOT / "src/attnops/dispatch/operation.py").read_text(encoding="utf-8")
    about = documented.partition("API_VERSION: Final")[2].partition('"""\n\n')[0]
    for module in listed:
        assert f"`{module}`" in about
        assert importlib.import_module(module).__all__
    assert f"api_version = {operation.API_VERSION}`" in section("The plugin API")


def test_the_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs/api/index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\.\. auto\w+:: (\w+)$", page, re.MULTILINE))
    assert listed == set(attnops.__all__) - {"__version__"}


@pytest.mark.slow
def test_plugins_import_names_of_the_list_alone() -> None:
    # These are released with the core, and have contracts of their own (pyproject.toml).
    own = ("attnops_adapters", "attnops_caches", "attnops_cli", "attnops_testing")
    folders = [x for x in ROOT.glob("plugins/*/src/*") if x.name not in own]
    sources = [*(x for folder in folders for x in folder.rglob("*.py")), *ROOT.glob("examples/plugin/*.py")]
    found = {
        (node.module, alias.name)
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "attnops"
        for alias in node.names
    }
    assert found
    assert not sorted(x for x in found if x[1] not in getattr(importlib.import_module(x[0]), "__all__", ()))
