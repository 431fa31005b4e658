"""Fixtures of tests of commands: the core as the only distribution, and functions that run a command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import attnops_cli
from attnops import OperationRegistry
from attnops.operations.vanilla import VanillaAttention


@pytest.fixture
def core_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No plugin that is installed here is loaded, and what the test registers is gone after it."""
    monkeypatch.setenv("ATTNOPS_NO_AUTOLOAD", "1")
    OperationRegistry.refresh()
    registered = OperationRegistry._registered[:]
    yield
    OperationRegistry._registered[:] = registered
    monkeypatch.undo()
    OperationRegistry.refresh()


@pytest.fixture
def run() -> Callable[..., Result]:
    """A function that runs ``attnops`` with arguments."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(attnops_cli.make_app(), list(arguments))

    return run


@pytest.fixture
def run_json(run: Callable[..., Result]) -> Callable[..., Any]:
    """A function that runs ``attnops`` with arguments and ``--json``, and returns what it prints."""

    def run_json(*arguments: str, status: int = 0) -> Any:
        result = run(*arguments, "--json")
        assert result.exit_code == status, result.output
        return json.loads(result.stdout)

    return run_json


@pytest.fixture
def register(core_alone: None) -> Callable[..., None]:
    """A function that registers an operation "zeta" of a distribution "acme".

    It takes the names of forwards without options that the operation has, and members of the class.
    """

    def forward(self: Any, query: Any, key: Any, value: Any) -> Any: ...

    def register(*forwards: str, base: type = VanillaAttention, **members: Any) -> None:
        name = {"get_impl_name": classmethod(lambda cls: "zeta"), "__module__": "acme.zeta"}
        OperationRegistry.register(type("Zeta", (base,), name | dict.fromkeys(forwards, forward) | members))

    return register
