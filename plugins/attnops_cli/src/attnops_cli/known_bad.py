"""Versions that are known not to work together: all of `doctor`'s knowledge about other projects, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from packaging.version import Version


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something wrong, or something to gain.

    Attributes:
        what: the problem, in a sentence.
        install: what to do about it, as a command where that is possible.
    """

    what: str
    install: str


# Pairs that are released together: the second, if it is installed, must have the first one's minor version.
SAME_MINOR: Final = (
    ("jax", "jaxlib"),
    ("jaxlib", "jax-cuda12-plugin"),
    ("jaxlib", "jax-cuda12-pjrt"),
    ("jaxlib", "jax-cuda13-plugin"),
    ("jaxlib", "jax-cuda13-pjrt"),
)


def known_problems(versions: Mapping[str, str]) -> list[Problem]:
    """What is known to be wrong with these versions, by distribution, "python" among them."""
    problems = []
    for first, second in SAME_MINOR:
        if first in versions and second in versions and _minor(versions[first]) != _minor(versions[second]):
            what = (
                f"{first} {versions[first]} and {second} {versions[second]} do not work together: the minor versions "
                "must be equal"
            )
            problems.append(Problem(what, f"pip install '{second}=={versions[first]}'"))
    return problems


def _minor(version: str) -> tuple[int, ...]:
    return Version(version).release[:2]
