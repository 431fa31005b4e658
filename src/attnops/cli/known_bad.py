"""Versions that are known not to work together: all of `doctor`'s knowledge about other projects, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.version import Version


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something wrong, or something to gain.

    Attributes:
        what: it, in a sentence.
        install: what to do about it, as a command where that is possible.
    """

    what: str
    install: str


@dataclasses.dataclass(frozen=True)
class BadCombination:
    """Versions that do not work together.

    Attributes:
        versions: by distribution, and "python": the affected versions, as PEP 440 specifiers; all must match.
        problem: what goes wrong.
        install: the command that puts it right.
    """

    versions: Mapping[str, str]
    problem: str
    install: str


BAD_COMBINATIONS: Final = (
    BadCombination(
        {"jax": ">=0.12", "jax-triton": ">=0.4,<=0.4.1"},
        "every traced triton_call fails: _triton_kernel_call_dce_rule() takes 2 positional arguments but 3 were given",
        "pip install 'jax>=0.11.1,<0.12'",
    ),
    BadCombination(
        {"python": ">=3.12", "jax": "<0.11.1", "jax-triton": ">=0.4"},
        "jax-triton 0.4 needs a newer jax",
        "pip install 'jax>=0.11.1,<0.12'",
    ),
    BadCombination(
        {"python": "<3.12", "jax-triton": "!=0.3.1"},
        "on this Python attnops-triton works with jax-triton 0.3.1 only",
        "pip install jax-triton==0.3.1",
    ),
    BadCombination(
        {"triton": "<3.7", "jax-triton": ">=0.4"},
        "jax-triton 0.4 can't lower kernels with so old a Triton",
        "pip install 'triton>=3.7', or pip install jax-triton==0.3.1",
    ),
)

# Pairs that are released together, and of which the second, where installed, must have the first one's minor version.
SAME_MINOR: Final = (
    ("jax", "jaxlib"),
    ("jaxlib", "jax-cuda12-plugin"),
    ("jaxlib", "jax-cuda12-pjrt"),
    ("jaxlib", "jax-cuda13-plugin"),
    ("jaxlib", "jax-cuda13-pjrt"),
)


def known_problems(versions: Mapping[str, str]) -> list[Problem]:
    """What is known to be wrong with these versions, by distribution, "python" among them."""
    found = [
        Problem(f"{_listed(bad.versions, versions)} do not work together: {bad.problem}", bad.install)
        for bad in BAD_COMBINATIONS
        if all(
            name in versions and SpecifierSet(specifier).contains(versions[name], prereleases=True)
            for name, specifier in bad.versions.items()
        )
    ]
    for first, second in SAME_MINOR:
        if first in versions and second in versions and _minor(versions[first]) != _minor(versions[second]):
            what = f"{_listed((first, second), versions)} do not work together: the minor versions must be equal"
            found.append(Problem(what, f"pip install '{second}=={versions[first]}'"))
    return found


def _listed(names: Mapping[str, str] | tuple[str, ...], versions: Mapping[str, str]) -> str:
    *most, last = (f"{name} {versions[name]}" for name in names)
    return f"{', '.join(most)} and {last}"


def _minor(version: str) -> tuple[int, ...]:
    return Version(version).release[:2]
