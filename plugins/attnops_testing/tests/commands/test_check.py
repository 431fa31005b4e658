"""`attnops check`: what it prints, and its exit status."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import attnops_cli
from attnops import OperationRegistry
from attnops.operations.vanilla import VanillaAttention
from attnops_testing.behaviours import BEHAVIOURS
from attnops_testing.features import FEATURES, combine
from attnops_testing.pairs import ALWAYS, all_pairs, covering_rows, proven_pairs, sampled_pairs

FEW = ("GQA", "T < S", "Causal", "sinks")
CASES = {
    "each_feature": [("GQA", "Causal"), ("T < S", "sinks")],
    "feature": FEW,
    "behaviour": ["unknown option"],
    "memory_growth": ["Causal"],
    "caches": [("Causal", "paged")],
    "long": [],
}


@pytest.fixture(autouse=True)
def _few(few):
    """A few of everything, and operations registered here alone."""
    few(**CASES)
    registered = OperationRegistry._registered[:]
    yield
    OperationRegistry._registered[:] = registered
    OperationRegistry.refresh()


def run(*arguments):
    return CliRunner().invoke(attnops_cli.make_app(), ["check", *arguments])


def register(cls):
    cls.__module__ = "acme.zeta"
    OperationRegistry.register(cls)


@pytest.mark.slow
def test_right_and_refused_features_succeed():
    result = run("sdpa")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    where = "attnops.operations.sdpa.ScaledDotProductAttention.forward_cpu"
    assert lines[0] == ["attnops:sdpa:", where, "on", "cpu"]
    assert re.search(r"sdpa\.py:\d+$", " ".join(lines[1]))
    assert ["GQA", "right"] in lines
    assert ["sinks", "refused", "sinks=True:", "forward_cpu", "has", "no", "such", "option"] in lines  # at the end
    assert ["Causal", "+", "paged", "right"] in lines
    assert ["memory,", "Causal", "not", "run", "not", "linear,", "by", "declaration"] in lines
    assert result.stdout.endswith("\n5 right, 1 refused, 0 wrong, 1 not run\n")


@pytest.mark.slow
def test_a_wrong_operation_is_reported_and_fails(few):
    class Zeta(VanillaAttention):
        @classmethod
        def get_impl_name(cls):
            return "zeta"

        def forward_cpu(self, query, key, value, *, mask=None, sinks=None, bias=None):
            out = self.forward_native(query, key, value, mask=mask, bias=bias)
            return out if sinks is None else out.replace(attention_outputs=out.attention_outputs + sinks.mean())

    register(Zeta)
    few(sampled_pair=[("GQA", "Causal"), ("GQA", "sinks")])
    result = run("zeta", "--all", "--json", "--shrink", "0")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["forward"] == "cpu"
    by_name = {x["name"]: x for x in found["features"]}
    assert [by_name[name]["status"] for name in FEW] == ["right", "right", "right", "wrong"]
    assert by_name["sinks"]["detail"].startswith("attention_outputs[")
    assert [(x["name"], x["status"]) for x in found["pairs"]] == [("GQA + Causal", "right"), ("GQA + sinks", "wrong")]


def test_what_raises_is_wrong_and_the_rest_goes_on():
    class Zeta(VanillaAttention):
        @classmethod
        def get_impl_name(cls):
            return "zeta"

        def forward_cpu(self, query, key, value, *, mask=None, sinks=None, bias=None):
            raise RuntimeError("no such kernel\nand more")

    register(Zeta)
    result = run("zeta", "--shrink", "0")
    assert result.exit_code == 1
    assert result.stdout.count("wrong    RuntimeError: no such kernel\n") == len(FEW) + 2  # and its memory
    assert result.stdout.count('raise RuntimeError("no such kernel') == len(FEW) + 2  # the last frames of each
    assert "Traceback" not in result.stdout
    assert run("zeta", "--shrink", "0", "--feature", "GQA", "--verbose").stdout.count("Traceback") == 1


@pytest.mark.slow
def test_a_named_feature_is_checked_in_long_problems_too():
    class Zeta(VanillaAttention):
        @classmethod
        def get_impl_name(cls):
            return "zeta"

        def forward_cpu(self, query, key, value, *, mask=None):
            return self.forward_native(query, key, value, mask=mask if query.shape[1] < 128 else None)

    register(Zeta)
    result = run("zeta", "--feature", "SlidingWindow", "--shrink", "0")
    assert result.exit_code == 1
    assert re.findall(r"^SlidingWindow +(\w+)", result.stdout, re.MULTILINE) == ["right", "wrong"]
    assert result.stdout.endswith('wrong: SlidingWindow\ncheck one again with --feature "SlidingWindow"\n')


def test_features_of_caches_are_checked_by_name():
    result = run("sdpa", "--feature", "paged + Causal", "--feature", "latent", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert [(x["name"], x["status"]) for x in found["caches"]] == [("paged + Causal", "right"), ("latent", "refused")]
    assert not found["features"]
    assert not found["behaviours"]


def test_features_of_caches_that_exclude_each_other_are_an_error():
    result = run("sdpa", "--feature", "ring + Segments")
    assert result.exit_code == 2
    assert "'Segments' and 'ring' exclude each other" in result.stderr


def test_a_behaviour_is_checked_by_name():
    result = run("sdpa", "--feature", "unknown option", "--feature", "memory, Causal", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert [x["name"] for x in found["behaviours"]] == ["unknown option", "memory, Causal"]
    assert not found["features"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("vanila",), "vanilla"),
        (("vanilla", "--platform", "abacus"), "abacus"),
        (("vanilla", "--mode", "dream"), "dream"),
        (("vanilla", "--refuses", "export + GQQA"), "--refuses 'export' is unknown; "),  # here it is no behaviour
        (("attnops:flash", "--feature", "nonsense"), "there are float32, bfloat16, "),
        (("attnops:flash", "--feature", "nonsense"), ", paged, "),
        (("attnops:flash", "--feature", "nonsense"), ", unknown option, "),
    ],
)
def test_unknown_names_are_refused_in_a_sentence(arguments, text):
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr


def test_features_of_one_group_do_not_combine():
    with pytest.raises(ValueError, match="'GQA' and 'MQA' exclude each other: both set the heads"):
        combine(["GQA", "MQA"])
    with pytest.raises(ValueError, match="feature 'GQQA' is unknown"):
        combine(["GQQA"])


def test_every_pair_is_proven_by_a_row():
    assert set(all_pairs()) <= {pair for row in covering_rows() for pair in proven_pairs(row)}
    assert set(ALWAYS) <= set(sampled_pairs())
    assert {name for pair in sampled_pairs() for name in pair} | {"float32"} == set(FEATURES)


@pytest.mark.slow
def test_needs_neither_pytest_nor_hypothesis():
    block = "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None"
    subprocess.run(
        [sys.executable, "-c", f"{block}; import attnops_testing, attnops_testing.commands.check"], check=True
    )


def test_a_kernel_of_another_platform_is_refused_at_once():
    class Zeta(VanillaAttention):
        @classmethod
        def get_impl_name(cls):
            return "zeta"

        def forward_tpu(self, query, key, value):
            raise RuntimeError("it runs")

    register(Zeta)
    result = run("zeta", "--platform", "tpu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "attnops: acme:zeta is for tpu, but JAX has only cpu here: add --interpret, which runs the kernel in its "
        "interpreter\n"
    )


def test_what_was_found_before_ctrl_c_is_kept(few, monkeypatch):
    def stop(subject):
        raise KeyboardInterrupt

    monkeypatch.setitem(BEHAVIOURS, "unknown option", stop)
    few(behaviour=["unknown option"])
    result = run("sdpa")
    assert result.exit_code == 130
    assert re.search(r"^GQA +right", result.stdout, re.M)
    assert result.stdout.endswith("\n3 right, 1 refused, 0 wrong, 0 not run; stopped before the end\n")
    found = json.loads(run("sdpa", "--json").stdout)
    assert (found["stopped"], found["behaviours"], len(found["features"])) == (True, [], 4)


def test_rows_are_printed_as_they_come(few, monkeypatch, capsys):
    printed = []

    def look(subject):
        printed.append(capsys.readouterr().out)

    monkeypatch.setitem(BEHAVIOURS, "unknown option", look)
    monkeypatch.setitem(BEHAVIOURS, "float8", look)
    few(each_feature=[], behaviour=["unknown option", "float8"], memory_growth=[], caches=[])
    with pytest.raises(SystemExit):
        attnops_cli.make_app()(["check", "sdpa"])
    assert "behaviour       result   why" in printed[0]
    assert re.search(r"^unknown option +right", printed[1], re.M)
    assert re.search(r"^float8 +right", capsys.readouterr().out, re.M)


def test_refusals_that_say_one_thing_are_one_row_as_wide_as_columns(few, monkeypatch):
    few(each_feature=[("ALiBi",), ("ScoreFn",), ("sinks",)], behaviour=[], memory_growth=[], caches=[])
    rule = "must be one of ['array']"
    rows = [line for line in run("sdpa").stdout.splitlines() if "  refused  " in line]
    assert len(rows) == 2
    assert rows[0].startswith("ALiBi; ScoreFn")
    assert rule in rows[0], rows
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, run("sdpa").stdout.partition("features")[2].splitlines())) <= 60
