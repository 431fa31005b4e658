"""`attnops score` finds a wrong library, a crash and a hang, and goes on after each; every fault has a script."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnops_testing.score.cases import Case, Size, cases
from attnops_testing.score.environments import libraries
from attnops_testing.score.judge import FAULTS, Row, Verdict, judge
from attnops_testing.score.process import run
from attnops_testing.score.report import find_repros, markdown

PAGE = Path(__file__).parents[4] / "docs" / "scoreboard.md"
# Right but for the scale, which it ignores if it is positive; that dies in calls with sinks, never returns in calls
# with a soft cap, and refuses biases.
PLANTED = '''
"""A planted library."""
# /// script
# dependencies = ["numpy"]
# ///

import os, time
import numpy as np
from worker import Refused

FRAMEWORK, PACKAGE, GRADIENTS = "numpy", "numpy", False
LINK = "https://numpy.org"
CONVENTIONS = {"rows that see no key are NaN": "“NaN”"}
NOT_RUN = {"no device": "it needs a device"}

def attend(q, k, v, *, causal=False, mask=None, bias=None, soft_cap=None, sinks=None, scale=None, lse=False):
    if sinks is not None:
        os.abort()
    while soft_cap is not None:
        time.sleep(1)
    if bias is not None:
        raise Refused("no biases")
    if scale is not None and scale < 0:
        return {}["no device"]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = np.where(np.tri(*scores.shape[2:]), scores, -np.inf)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    if scores.shape[-1] == 0:
        return {}["no keys"]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
'''
# What becomes of each case of the planted library; the others are right.
VERDICTS = {
    "scale": (Verdict.WRONG, "out["),
    "negative scale": (Verdict.NOT_RUN, "it needs a device"),
    "causal, T < S": (Verdict.OPEN, "aligned top left"),
    "rows that see no key": (Verdict.CONVENTION, "rows that see no key are NaN"),
    "no keys (S = 0)": (Verdict.CRASH, "KeyError: 'no keys'"),
    "sinks": (Verdict.CRASH, "the process died of SIGABRT"),
    "soft cap": (Verdict.CRASH, "did not end in 4 s"),
    "bias [1, H, T, S]": (Verdict.REFUSED, "no biases"),
    "dropout": (Verdict.REFUSED, "no argument for it: dropout"),
    "lengths of keys": (Verdict.REFUSED, "no argument for it: lengths"),
    "logsumexp": (Verdict.WRONG, "it returns no lse"),
    "causal": (Verdict.FORWARD, "forward alone"),
    "GQA": (Verdict.FORWARD, "forward alone"),
    "strided arrays": (Verdict.FORWARD, "forward alone"),
}


@pytest.mark.slow
def test_a_wrong_library_a_crash_and_a_hang_are_rows_and_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    library = libraries(tmp_path)["planted"]
    assert library.requirements == ("numpy",)
    chosen = [case for case in cases(library.size) if case.name in VERDICTS]
    outcomes = run(library.path, Path(sys.executable), chosen, 4)
    conventions = library.declared["CONVENTIONS"]
    found = {case.name: judge(case, *outcomes[case.name], conventions) for case in chosen}
    for name, (verdict, text) in VERDICTS.items():
        assert found[name].verdict is verdict, (name, found[name])
        assert text in found[name].detail, (name, found[name])
    rows = {name: [row.verdict, row.detail] for name, row in found.items()}
    record = {"planted": {"version": "1", "date": "2026-11-27", "rows": rows}}
    (tmp_path / "shows_it.py").write_text("# /// script\n# ///\n# shows: planted: scale\n")
    page = markdown(record, {"planted": library}, tmp_path, "repros")
    for text in (
        "| scale | **wrong** |",
        "[shows_it.py](repros/shows_it.py)",
        "no script yet",
        "(“NaN”)",
        "Undocumented conventions:\n\n- causal, T < S: aligned top left\n",
    ):
        assert text in page, text
    (tmp_path / "broken.py").write_text("import nonesuch")
    first = chosen[:2]
    outcomes = run(tmp_path / "broken.py", Path(sys.executable), first, 10)
    assert [judge(case, *outcomes[case.name]).verdict for case in first] == [Verdict.NOT_RUN] * 2
    assert "nonesuch" in judge(first[0], *outcomes[first[0].name]).detail


def test_adapters_are_short_and_say_where_their_library_is_documented() -> None:
    for library in libraries().values():
        assert len(library.path.read_text().splitlines()) <= 60, library.name
        assert library.requirements, library.name
        assert library.declared["LINK"].startswith("https://"), library.name
        assert library.about, library.name


def test_every_fault_on_the_page_has_a_script_and_every_script_shows_a_row() -> None:
    folder = PAGE.with_suffix("")
    records = json.loads((folder / "results.json").read_text())
    assert set(records) == set(libraries())
    rows = {(name, case): verdict for name, record in records.items() for case, (verdict, _) in record["rows"].items()}
    shown = set(find_repros(folder))
    assert {row for row, verdict in rows.items() if verdict in FAULTS} <= shown
    assert {rows[row] for row in shown} <= {*FAULTS, Verdict.OPEN}
    assert PAGE.read_text() == markdown(records, libraries(), folder, "scoreboard")
    for path in folder.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 30, path.name
        assert "attnops" not in path.read_text(), path.name


def case_of(name: str, **size: Any) -> Case:
    return next(case for case in cases(Size(**size)) if case.name == name)


def test_dropout_is_right_if_each_weight_is_dropped_or_divided() -> None:
    case = case_of("dropout")
    weights = case.truth()[0]["out"][0]
    keep = np.random.default_rng(0).random(weights.shape) < 0.7
    done = {"ending": "done"}
    assert judge(case, done, {"out": np.where(keep, weights / 0.7, 0)}).verdict is Verdict.RIGHT
    assert "no weight is dropped" in judge(case, done, {"out": weights}).detail
    assert judge(case, done, {"out": np.where(keep, weights, 0)}).verdict is Verdict.WRONG
    left_out = np.where(keep, weights, 0)
    left_out /= left_out.sum(-1, keepdims=True)
    assert "dropped before the softmax" in judge(case, done, {"out": left_out}).detail
    few = np.random.default_rng(0).random(weights.shape) < 0.95
    assert "of the weights are dropped" in judge(case, done, {"out": np.where(few, weights / 0.7, 0)}).detail


def test_a_nan_is_told_from_other_numbers_and_rows_that_see_no_key_are_not_compared() -> None:
    case = case_of("rows that see no key")
    right = {name: exact.copy() for name, (exact, _) in case.truth()[0].items()}
    done = {"ending": "done"}
    assert judge(case, done, right).verdict is Verdict.RIGHT
    rows = right["out"].copy()
    rows[~case.seen] = np.nan
    assert judge(case, done, right | {"out": rows}).verdict is Verdict.OPEN
    assert judge(case, done, right | {"out": rows}, ["rows that see no key are NaN"]).verdict is Verdict.CONVENTION
    assert judge(case, done, right | {"gradient of key": right["gradient of key"] * np.nan}).verdict is Verdict.NAN
    assert judge(case, done, right | {"gradient of key": right["gradient of key"] + 1}).verdict is Verdict.WRONG
    raised = {"ending": "raised", "type": "KeyError", "message": "list index", "place": "x.py:1"}
    assert judge(case, raised, {}).verdict is Verdict.CRASH
    assert judge(case, raised | {"type": "ValueError"}, {}).verdict is Verdict.REFUSED
    assert judge(case, done | {"forward": raised}, right).verdict is Verdict.CRASH


def test_nan_is_a_convention_where_a_case_names_it_and_other_numbers_never_are() -> None:
    done = {"ending": "done"}
    for name in ("rows of −inf bias", "lengths, NaN in the padding", "q · k above 65,504, float16"):
        case = case_of(name)
        right = {x: exact for x, (exact, _) in case.truth()[0].items()}
        assert judge(case, done, right).verdict is Verdict.RIGHT
        assert judge(case, done, right | {"gradient of value": right["gradient of value"] * np.nan}) == Row(
            Verdict.OPEN, case.nan
        )
        assert judge(case, done, right | {"out": right["out"] + 9}).verdict is Verdict.WRONG


def test_a_bias_or_a_logsumexp_without_a_gradient_is_a_convention_and_a_wrong_one_is_wrong() -> None:
    case = case_of("bias [1, 1, 1, S]")
    exact = {x: exact for x, (exact, _) in case.truth()[0].items()}
    cut = exact | {"gradient of bias": 0 * exact["gradient of bias"]}
    assert judge(case, {"ending": "done"}, cut) == Row(Verdict.OPEN, "no gradient flows to the bias")
    assert judge(case, {"ending": "done"}, cut | {"out": cut["out"] + 1}).verdict is Verdict.WRONG
    case = case_of("logsumexp")
    truth, conventions = case.truth()
    name = "no gradient flows through the logsumexp"
    cut = {x: exact for x, (exact, _) in conventions[name].items()}
    assert judge(case, {"ending": "done"}, cut) == Row(Verdict.OPEN, name)
    assert judge(case, {"ending": "done"}, {x: y for x, (y, _) in truth.items()}).verdict is Verdict.RIGHT
    assert judge(case, {"ending": "done"}, cut | {"lse": cut["lse"] + 1}).verdict is Verdict.WRONG
