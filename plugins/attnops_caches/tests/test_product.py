"""Every pair of storage, codec, content and length, with all masks, padded or packed, by the operations of the core.

A test has the combinations of one storage, codec, content and length: all masks are in two programs, one of rows [B, T]
and one of packed rows. Rows of T queries each have the program of ragged rows, with ``query_lengths`` of T. On one core
of an AMD EPYC a test takes 8.5 seconds with `flash` and 4 with `vanilla`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from attnops_testing.cache_features import CACHE_FEATURES, are_compatible
from attnops_testing.cache_problem import CacheProblem
from attnops_testing.caches import cache_name, cache_problem
from attnops_testing.problem import FAST_COMPILE
from attnops_testing.runner import Subject

GROUPS = ("storage", "codec", "content", "length")


def group(name: str) -> list[str | None]:
    """The features of a group, and None."""
    return [None, *(feature for feature, x in CACHE_FEATURES.items() if x.group == name)]


def problems(subject: Subject, names: list[str]) -> dict[str, CacheProblem]:
    """A problem for each mask that can be combined with these features, over the same tokens; by name."""
    plain = cache_problem(subject, names)
    masks = [mask for mask in group("mask") if mask is None or all(are_compatible(mask, name) for name in names)]
    return {cache_name([*names, *([mask] if mask else [])]): plain.with_mask(mask) for mask in masks}


def arguments(problem: CacheProblem) -> tuple[Any, ...]:
    """Those of the call, with the number of queries of each row also where it is T."""
    *given, rows = problem.arguments
    return *given, np.array(problem.counts, np.int32) if rows is None else rows


def outputs(subject: Subject, of: dict[str, CacheProblem], *calls: tuple[Any, ...]) -> list[list[Any]]:
    """The outputs and logsumexps of all problems, from one program, for each of some calls' arguments."""

    def run(*given: Any) -> list[Any]:
        found = []
        for name, problem in of.items():
            try:
                found.append(problem.program(subject.make(problem.metadata))(*given)[:2])
            except Exception as error:
                error.add_note(f"in the call with {name}")
                raise
        return found

    program = jax.jit(run).lower(*calls[0]).compile(compiler_options=FAST_COMPILE)
    return [jax.tree.map(np.asarray, program(*call)) for call in calls]


def mistakes(of: dict[str, CacheProblem], found: list[Any]) -> Iterator[str]:
    """What is wrong about some outputs."""
    for (name, problem), (out, lse) in zip(of.items(), found, strict=True):
        try:
            problem.check_output(out, lse)
        except AssertionError as error:
            yield f"{name}: {error}"


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """Let go of what a test compiled and traced; hundreds take gigabytes."""
    yield
    jax.clear_caches()


def are_all_compatible(names: tuple[str | None, ...]) -> bool:
    given = [name for name in names if name is not None]
    return all(are_compatible(x, y) for x, y in itertools.combinations(given, 2))


def combinations() -> list[tuple[str | None, ...]]:
    """A sixth of the product, in which every pair of features of two groups is that do not exclude each other."""
    groups = [group(name) for name in GROUPS]
    indices = (x for x in itertools.product(*map(range, map(len, groups))) if sum(x) % 6 == 0)
    every = (tuple(of[i] for of, i in zip(groups, x, strict=True)) for x in indices)
    return [x for x in every if are_all_compatible(x)]


def test_every_pair_is_there() -> None:
    found = combinations()
    for (i, first), (j, second) in itertools.combinations(enumerate(GROUPS), 2):
        wanted = {x for x in itertools.product(group(first), group(second)) if are_all_compatible(x)}
        assert {(x[i], x[j]) for x in found} == wanted, (first, second)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(GROUPS, combinations())
@pytest.mark.parametrize("operation", ["attnops:flash", "attnops:vanilla"])
def test_every_combination(
    operation: str, storage: str | None, codec: str | None, content: str | None, length: str | None
) -> None:
    subject = Subject(operation=operation)
    names = [name for name in (storage, codec, content, length) if name is not None]
    full, ragged, packed = (problems(subject, names + rows) for rows in ([], ["query_lengths"], ["packed rows"]))
    first, second = (next(iter(x.values())) for x in (full, ragged))
    of_full, of_ragged = outputs(subject, ragged, arguments(first), arguments(second))
    (of_packed,) = outputs(subject, packed, arguments(next(iter(packed.values()))))
    results = (full, of_full), (ragged, of_ragged), (packed, of_packed)
    found = list(itertools.chain.from_iterable(itertools.starmap(mistakes, results)))
    assert not found, "\n".join(found)
