"""Each fault of `planted_faults` is found by `attnops check` and by plain pytest, with its type and traceback."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fast_compile import XLA_FLAGS
from planted_faults import FAULTS, HANGS, Planted
from typer.testing import CliRunner

import attnops_cli
from attnops import OperationRegistry
from attnops_testing import OperationConformance
from attnops_testing.behaviours import BEHAVIOURS, WITH_PROGRAM
from attnops_testing.runner import Status, attempt, judged
from attnops_testing.suite import SUITE
from attnops_testing.tolerance import assert_close

SUPPORT = Path(__file__).parents[3] / "tests" / "support"
# Seconds: many times what a case that ends takes, on a machine that does much else too.
LIMIT = 15
# A module of pytest with a suite for each class, as `attnops new` writes one.
MODULE = """
import planted_faults
from attnops_testing import OperationConformance
"""
CLASS = """
class Test{0}(OperationConformance):
    operation, mode, limit = planted_faults.{0}, "prefill", {1}
"""


@pytest.fixture
def registered():
    before = OperationRegistry._registered[:]
    for cls in (*FAULTS, *HANGS):
        OperationRegistry.register(cls)
    yield
    OperationRegistry._registered[:] = before
    OperationRegistry.refresh()


def check(cls, *options):
    command = ["check", cls.__name__, "--mode", "prefill", "--shrink", "0", *options]
    return CliRunner(env={"COLUMNS": "200"}).invoke(attnops_cli.make_app(), command)


def run(*arguments, cwd):
    env = os.environ | {"PYTHONPATH": str(SUPPORT), "JAX_PLATFORMS": "cpu", "COLUMNS": "150", "XLA_FLAGS": XLA_FLAGS}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, cwd=cwd, check=False)


def run_pytest(folder, names, *options, limit=300):
    (folder / "test_it.py").write_text(MODULE + "".join(CLASS.format(name, limit) for name in names))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  exhaustive\n")
    default = ("-q", "-p", "no:cacheprovider", "-m", "not slow and not exhaustive")
    return run("-m", "pytest", *default, *options, cwd=folder)


@pytest.mark.parametrize("cls", FAULTS, ids=lambda cls: cls.__name__)
@pytest.mark.tier(quick=["NoVmap"])
def test_check_and_the_suite_find_a_fault(cls, registered):
    name, said, source = FAULTS[cls]
    result = check(cls, "--feature", name)
    assert result.exit_code == 1, result.output
    assert re.search(rf"^{name} +wrong +{re.escape(said)}", result.stdout, re.M), result.stdout
    assert (source in result.stdout, "Traceback" in result.stdout) == (True, False)
    suite = type("Suite", (OperationConformance,), {"operation": cls, "mode": "prefill"})()
    test, case = (suite.test_behaviour, name) if name in BEHAVIOURS else (suite.test_each_feature, (name, "Causal"))
    with pytest.raises(AssertionError) as raised:
        test(case)
    assert f"{name}: {said}" in str(raised.value)
    assert source in str(raised.value)
    assert ("Traceback (most recent call last):" in str(raised.value)) == bool(source)


@pytest.mark.parametrize("interpret", [False, True])
def test_what_check_runs_by_default_is_what_plain_pytest_runs(interpret):
    part = SUITE["behaviour"]
    assert {name for name in part.cases if part.quick(name, interpret)} > WITH_PROGRAM & {"vmap", "shard_map", "export"}
    kept = {}
    for name in (f"test_{part}" for part in SUITE):
        cls = type("Suite", (OperationConformance,), {"interpret": interpret})
        metafunc = type("Metafunc", (), {
            "function": getattr(cls, name), "fixturenames": ["case"],
            "parametrize": lambda self, argument, cases, ids, name=name: kept.update(
                {name: [case.values[0] for case in cases if not case.marks]}
            ),
        })()  # fmt: skip
        cls().pytest_generate_tests(metafunc)
    assert kept == {
        f"test_{name}": [case for case in part.cases if part.quick(case, interpret)] for name, part in SUITE.items()
    }


def test_an_assertion_is_told_from_a_comparison_of_the_suite():
    def asserts():
        assert not SUPPORT, "never mind"

    found = attempt("it", asserts)
    assert found.detail.startswith("AssertionError: never mind")
    assert (found.raised, 'assert not SUPPORT, "never mind"' in found.traceback) == ("AssertionError", True)
    found = attempt("it", lambda: assert_close("out", np.ones(1), np.zeros(1), 0.0))
    assert (found.detail[:6], found.raised, found.traceback) == ("out[0]", "", "")


def test_what_is_declared_as_refused_says_nothing_of_others():
    def raises():
        raise RuntimeError("no")

    wrong, right = attempt("export", raises), attempt("export", lambda: None)
    assert judged(wrong, {"vmap"}, behaviour=True) is wrong
    assert judged(wrong, {"export"}, behaviour=True).status is Status.REFUSED
    assert judged(wrong, {"export"}).status is Status.WRONG  # of a feature a reason is needed
    assert judged(right, {"export"}).detail == "is in `refuses`, but is right: take it out"
    assert judged(right, {"vmap"}) is right


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"refuses": {"exprot"}}, "Suite.refuses 'exprot' is unknown; did you mean 'export'?"),
        ({"refuses": {"GQA + Casual"}}, "Suite.refuses 'Casual' is unknown; did you mean 'Causal'?"),
        ({"refuses": "export"}, "Suite.refuses='export' must be a set of names"),
        ({"exhaustive": {"all_pairs"}}, "Suite.exhaustive names ['all_pairs'], but there are ['test_all_pairs', "),
        ({"every": {"test_pairs": 2}}, "Suite.every names ['test_pairs'], but there are ['test_all_pairs', "),
    ],
)
def test_a_declaration_that_would_have_no_effect_is_refused(fields, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        type("Suite", (OperationConformance,), fields)
    type("Suite", (OperationConformance,), {"refuses": {"caches", "GQA + Causal", "memory, Causal", "export", "paged"}})


@pytest.mark.slow
def test_refuses_is_the_same_for_check(registered):
    (cls,) = (cls for cls in FAULTS if cls.__name__ == "NoExport")
    options = ("--feature", "export", "--feature", "GQA", "--refuses", "export")
    result = check(cls, *options)
    assert result.exit_code == 0, result.output
    assert re.search(r"^export +refused +as declared: NotImplementedError", result.stdout, re.M)
    result = check(cls, *options, "--refuses", "GQA")
    assert result.exit_code == 1
    assert re.search(r"^GQA +wrong +is in `refuses`, but is right", result.stdout, re.M)


@pytest.mark.slow
def test_plain_pytest_finds_every_fault(tmp_path):
    # Features are every class's, and a fault of one of them is in each row of `Asserts` that has grouped heads.
    done = run_pytest(tmp_path, [cls.__name__ for cls in FAULTS], "-k", "behaviour or Asserts and each_feature")
    failed = set(re.findall(r"^FAILED test_it.py::Test(\w+)::test_\w+\[(.*?)\]", done.stdout, re.M))
    for cls, (name, said, _) in FAULTS.items():
        assert any(named == cls.__name__ and name in case for named, case in failed), done.stdout
        assert f"{name}: {said}" in done.stdout
    assert {case for named, case in failed if named != "Asserts"} == {"vmap", "shard_map", "export"}
    assert f"class {Planted.__name__}" not in done.stderr


@pytest.mark.slow
@pytest.mark.tier(every=2)
@pytest.mark.parametrize("cls", HANGS, ids=lambda cls: cls.__name__)
def test_a_hang_ends_the_run_with_its_stack_and_the_results_so_far(cls, tmp_path):
    name = cls.__name__
    code = (
        "import sys, attnops_cli, planted_faults; from attnops import OperationRegistry; "
        f"OperationRegistry.register(planted_faults.{name}); sys.argv[0] = 'attnops'; attnops_cli.main()"
    )
    features = ("--feature", "Causal", "--feature", "GQA", "--feature", "softmax_scale")
    options = ("--mode", "prefill", "--limit", str(LIMIT), *features)
    with ThreadPoolExecutor() as both:  # at once: each takes the seconds of the limit
        checked = both.submit(run, "-c", code, "check", name, *options, cwd=tmp_path)
        tested = both.submit(run_pytest, tmp_path, [name], "-k", "each_feature and GQA or unknown", limit=LIMIT)
    done = checked.result()
    assert done.returncode == 1, done.stderr
    assert re.search(r"^Causal +right", done.stdout, re.M)
    assert re.search(rf"^GQA +wrong +did not end in {LIMIT} s", done.stdout, re.M), done.stdout
    assert "problem.check(" in done.stdout  # its stack
    assert "\n1 right, 0 refused, 1 wrong, 0 not run\nwrong: GQA\n" in done.stdout

    done = tested.result()
    assert done.returncode == 1, done.stdout
    assert f"did not end in {LIMIT} s" in done.stdout
    assert "problem.check(" in done.stdout
    assert re.search(r"^FAILED test_it.py::Test\w+::test_each_feature\[.*GQA", done.stdout, re.M), done.stdout
