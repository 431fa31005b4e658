"""Steps of `attnops prove`, and their results; both are JSON."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class Ending(enum.StrEnum):
    """How a step ended. Those of `BAD` are faults."""

    RIGHT = "right"
    REFUSED = "refused"
    NOT_RUN = "not run"
    WRONG = "wrong"
    CRASH = "crash"
    HANG = "hang"


BAD = frozenset({Ending.WRONG, Ending.CRASH, Ending.HANG})


@dataclasses.dataclass(frozen=True)
class Step:
    """A row of the report.

    Attributes:
        section: the heading under which it is reported.
        name: what it checks; unique in its section.
        work: the function of `attnops_testing.prove.work` that runs it.
        arguments: that function's arguments, of JSON's types.
        seconds: the time limit.
    """

    section: str
    name: str
    work: str
    arguments: dict[str, Any]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a step.

    Attributes:
        ending: how it ended.
        detail: why, where it is not right; empty otherwise.
        seconds: how long its process ran.
        value: what its function returned, of JSON's types.
        output: the last lines that a process printed that crashed or hung, its Python stack included.
    """

    ending: Ending
    detail: str = ""
    seconds: float = 0.0
    value: Any = None
    output: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it is a fault."""
        return self.ending in BAD
