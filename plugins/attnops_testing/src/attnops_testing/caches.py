"""Checks of an operation's calls over caches; a feature is right, refused or wrong, as in `attnops_testing.runner`."""

from __future__ import annotations

from collections.abc import Sequence

from attnops_testing.cache_features import combine_cache
from attnops_testing.cache_problem import CacheProblem, Foreign
from attnops_testing.pairs import joined
from attnops_testing.runner import Outcome, Status, Subject, attempt


def check_cache(subject: Subject, names: Sequence[str], foreign: Foreign | None = None) -> Outcome:
    """Check the result of a call over a cache with these features; ``foreign`` is another project's storage, if any."""

    def check() -> None:
        problem = cache_problem(subject, names, foreign)
        problem.check(subject.make(problem.metadata), subject.compiler_options)

    return attempt(cache_name(names), check)


def check_cache_row(subject: Subject, row: Sequence[str]) -> list[Outcome]:
    """Check a row of features in one program, without those that are refused by themselves."""
    together = check_cache(subject, row)
    if together.status is not Status.REFUSED:
        return [together]
    refused = {name: outcome for name in row if (outcome := cache_refusal(subject, [name])) is not None}
    served = [name for name in row if name not in refused]
    if len(served) == len(row):
        return [together]  # only their combination is refused
    return [*refused.values(), *([check_cache(subject, served)] if served else [])]


def cache_refusal(subject: Subject, names: Sequence[str]) -> Outcome | None:
    """The outcome of these features together if it is known without compiling (refused or wrong), else None."""

    def check() -> None:
        problem = cache_problem(subject, names)
        problem.trace(subject.make(problem.metadata))

    outcome = attempt(cache_name(names), check)
    return None if outcome.status is Status.RIGHT else outcome


def cache_problem(subject: Subject, names: Sequence[str], foreign: Foreign | None = None) -> CacheProblem:
    """The problem that has these features, of sizes that the operation serves."""
    fit = subject.fit
    # Without a mode: the call over a cache determines it.
    tile = None if fit.own_tiles else fit.block
    metadata = subject.base.replace(mode=None, block_q=tile, block_k=tile)
    return CacheProblem(combine_cache(names), metadata, head_dim=fit.D, dtype=fit.dtype, foreign=foreign)


def cache_name(names: Sequence[str]) -> str:
    """The name of a combination of features of a call over a cache."""
    return joined(names) if names else "plain cache"
