"""The budget of programs: what exceeds a bound is named by file; see tests/support/program_budget.py."""

from __future__ import annotations

import tomllib

import program_budget

FILES = {"tests/a.py": {"compiled": 7, "processes": 1}, "tests/b.py": {"compiled": 2, "interpreted": 3}}


def test_the_counts_of_a_run_are_within_the_budget_that_it_writes() -> None:
    budget = tomllib.loads(program_budget.written(FILES))
    assert budget["files"] == {"tests/a.py": [7, 0, 0, 1], "tests/b.py": [2, 3, 0, 0]}
    assert program_budget.exceeded(FILES, budget["bounds"], budget["files"]) == []


def test_files_that_grew_are_named() -> None:
    bounds = {"compiled": 8, "interpreted": 3, "assembled": 0, "processes": 1}
    (line,) = program_budget.exceeded(FILES, bounds, {"tests/a.py": [6, 0, 0, 1], "tests/b.py": [2, 3, 0, 0]})
    assert line.startswith("compiled: 9, but tests/budget.toml allows 8; more than before: tests/a.py 6 -> 7. ")


def test_the_table_adds_up_what_it_does_not_list() -> None:
    *_, rest, total = program_budget.table(FILES, lines=1)
    assert rest.split() == ["2", "3", "0", "0", "1", "other", "files"]
    assert total.split() == ["9", "3", "0", "1", "in", "all"]
