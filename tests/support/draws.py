"""Properties whose number of draws depends on the tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest


def draws(slow: int, exhaustive: int, *strategies: Any) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """A decorator in place of ``hypothesis.given(*strategies)``, with the number of draws in either tier."""

    def decorate(holds: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.slow
        @pytest.mark.parametrize("examples", [slow, pytest.param(exhaustive, marks=pytest.mark.exhaustive)])
        def test(examples: int) -> None:
            hypothesis.settings(max_examples=examples)(hypothesis.given(*strategies)(holds))()

        test.__name__, test.__doc__ = holds.__name__, holds.__doc__
        return test

    return decorate
