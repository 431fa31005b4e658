"""What tests of commands share, and how they leave a few cases of the suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from command_fixtures import core_alone, register, run, run_json

from attnops_testing.suite import SUITE

__all__ = ["core_alone", "few", "register", "run", "run_json"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that leaves these cases of parts of the suite; all are quick."""

    def few(**cases: Any) -> None:
        for name, chosen in cases.items():
            part = dataclasses.replace(
                SUITE[name], listed=lambda chosen=chosen: chosen, quick=lambda case, interpret: True
            )
            monkeypatch.setitem(SUITE, name, part)

    return few
