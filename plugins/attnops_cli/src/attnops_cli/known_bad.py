"""Versions that are known not to work together: all of `doctor`'s knowledge about other projects, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from packaging.version import Version


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that is wrong with the installation, or something that it could gain.

    Attributes:
        what: the problem, in a sentence.
        install: what to do about it; a command where one helps.
    """

    what: str
    install: str


# Distributions that are released together: if both are installed, their minor versions must be equal.
SAME_MINOR: Final = (
    ("jax", "jaxlib"),
    ("jaxlib", "jax-cuda12-plugin"),
    ("jaxlib", "jax-cuda12-pjrt"),
    ("jaxlib", "jax-cuda13-plugin"),
    ("jaxlib", "jax-cuda13-pjrt"),
)


def known_problems(versions: Mapping[str, str]) -> list[Problem]:
    """Known problems of these versions, a mapping by distribution, including "python"."""
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
