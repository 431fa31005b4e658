"""`attnops bench` and the library behind it: nothing wrong is timed, and what is measured is what is said."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner, Result

import attnops_cli
from attnops import OperationRegistry
from attnops.masks import Causal, KeyPadding, Mask, PrefixLM, Segments, SlidingWindow
from attnops.operations.vanilla import VanillaAttention
from attnops_testing import attention, attention_gradients, bench
from attnops_testing.bench import PEERS, Case, Contender, Ready, find, measure, packed_documents, truth
from attnops_testing.commands.bench_tables import print_measurements

SMALL = ("-T", "16,32", "-H", "2", "-K", "1", "-D", "8", "--repeats", "2")
pytestmark = pytest.mark.usefixtures("core_alone")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(attnops_cli.make_app(), ["bench", *arguments])


def register(change: Any) -> None:
    """Register an operation "zeta": vanilla, with its query, key, value and output changed."""

    @functools.wraps(VanillaAttention.forward_native)
    def forward_native(self: Any, query: Any, key: Any, value: Any, **options: Any) -> Any:
        inputs, finish = change(query, key, value)
        result = VanillaAttention.forward_native(self, *inputs, **options)
        return dataclasses.replace(result, attention_outputs=finish(result.attention_outputs))

    body = {
        "get_impl_name": classmethod(lambda cls: "zeta"),
        "__module__": "acme.zeta",
        "forward_native": forward_native,
    }
    OperationRegistry.register(type("Zeta", (VanillaAttention,), body))


def right(q: Any, k: Any, v: Any) -> Any:
    return (q, k, v), lambda out: out


def slightly_off(q: Any, k: Any, v: Any) -> Any:
    return (q, k, v), lambda out: out * 1.001


def off_in_the_last_row(q: Any, k: Any, v: Any) -> Any:
    return (q, k, v), lambda out: out.at[:, -1].multiply(1.1)


def without_gradient_of_keys(q: Any, k: Any, v: Any) -> Any:
    return (q, jax.lax.stop_gradient(k), v), lambda out: out


# The command


@pytest.mark.slow
def test_bench_writes_a_table_json_and_a_plot(tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ("--dtype", "float32,bfloat16", "--backward", "--json", str(figures), "--plot", str(picture))
    result = run("vanilla", "flash", "jax.nn", *SMALL, *arguments)
    assert result.exit_code == 0, result.output
    written = json.loads(figures.read_text())
    assert written["machine"]["versions"]["jax"] == jax.__version__
    found = written["measurements"]
    assert [(m["dtype"], m["length"], m["name"]) for m in found] == [
        (dtype, T, name)
        for dtype in ("float32", "bfloat16")
        for T in (16, 32)
        for name in ("vanilla", "flash", "jax.nn")
    ]
    for m in found:
        assert m["status"] == "ok", m
        assert len(m["seconds"]) == 2
        assert 0 < m["best_seconds"] == min(m["seconds"]) <= m["median_seconds"]
        assert m["temp_bytes"] > 0
        assert m["checked_rows"] == m["length"]
        assert (m["kv_heads"], m["mask"], m["backward"]) == (1, "Causal()", True)
    assert found[1]["what"] == "attnops:flash (forward_native)"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["dtype", "T", "operation", "best", "median", "×", "fastest", "memory"] in rows
    assert sum("flash" in row for row in rows) == 4


def test_by_default_everything_installed_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "tokamax", dataclasses.replace(PEERS["tokamax"], package="not_there"))
    register(right)
    assert {"vanilla", "flash", "sdpa", "zeta", "jax.nn"} <= {c.name for c in find()}
    assert not {"auto", "tokamax"} & {c.name for c in find()}


def test_by_default_nothing_that_declares_no_attention_takes_part() -> None:
    register(right)
    OperationRegistry.get("zeta").computes = None
    assert "zeta" not in {c.name for c in find()}
    assert [c.name for c in find(["zeta"])] == ["zeta"]


@pytest.mark.parametrize(
    ("change", "backward", "where"),
    [
        (slightly_off, "--forward", "output["),
        (off_in_the_last_row, "--forward", "output[0, 31"),
        (without_gradient_of_keys, "--backward", "gradient of key["),
    ],
)
@pytest.mark.tier(quick=["slightly_off---forward-output["])
def test_what_is_wrong_is_said_and_not_timed(tmp_path: Path, change: Any, backward: str, where: str) -> None:
    register(change)
    figures = tmp_path / "figures.json"
    result = run("zeta", "vanilla", *SMALL, backward, "--json", str(figures))
    assert result.exit_code == 1
    assert "wrong" in result.stdout
    assert f"zeta wrong (float32 T=32): {where}" in result.stdout
    zeta, vanilla = json.loads(figures.read_text())["measurements"][-2:]
    assert (zeta["status"], zeta["seconds"], zeta["best_seconds"]) == ("wrong", [], None)
    assert vanilla["status"] == "ok"
    assert len(vanilla["seconds"]) == 2


def test_what_is_right_forward_is_timed_forward() -> None:
    register(without_gradient_of_keys)
    assert run("zeta", *SMALL, "--forward").exit_code == 0


def test_an_error_is_one_row_of_many() -> None:
    def broken(q: Any, k: Any, v: Any) -> Any:
        raise RuntimeError("no such kernel\nand much more")

    register(broken)
    result = run("zeta", "vanilla", *SMALL)
    assert result.exit_code == 1
    assert "zeta failed (float32 T=16, float32 T=32): RuntimeError: no such kernel\n" in result.stdout
    assert "vanilla failed" not in result.stdout


@pytest.mark.slow
def test_what_does_not_fit_is_refused() -> None:
    result = run("vanilla", "torch", *SMALL, "--memory-limit", "0.000001")
    assert result.exit_code == 0
    assert "vanilla refused (float32 T=16, float32 T=32): it needs 0.0 GB, more than the limit of 0.0" in result.stdout


def test_a_peer_that_is_not_installed_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "tokamax", dataclasses.replace(PEERS["tokamax"], package="not_there"))
    result = run("tokamax", *SMALL)
    assert result.exit_code == 0
    assert "not_there is not installed: pip install not_there" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--lengths", "1024,many"), "lengths='1024,many' must be positive numbers separated by commas"),
        (("--lengths", "0"), "lengths='0' must be positive numbers"),
        (("--lengths", ","), "lengths=',' is empty"),
        (("--dtype", "float8"), "dtype='float8' is unknown; use float32, bfloat16 or float16"),
        (("--kv-heads", "3"), "kv_heads=3 must be a divisor of heads=8"),
        (("--mask", "Causal() &"), "mask='Causal() &' can't be read"),
        (("--mask", "Casual()"), "mask='Casual' is unknown"),
        (("--mask", "Segments((16,))"), "needs its values; list them"),
        (("--mask", "Segments([0, 1])", "--lengths", "16"), "Segments' q_ids has shape (2,)"),
        (("--documents", "17", "--lengths", "16"), "documents=17 must be at least 1 and at most length=16"),
        (("flesh",), "impl_name='flesh' is not an installed operation"),
        (("--memory-limit", "inf"), "memory_limit=inf must be positive and finite"),
        (("--memory-limit", "-1"), "memory_limit=-1.0 must be positive and finite"),
    ],
)
def test_mistakes_are_sentences(arguments: tuple[str, ...], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("attnops: ")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("vanilla", *SMALL, "--plot", "x.png")
    assert result.exit_code == 2
    assert "the plot needs matplotlib" in result.stderr
    assert "pip install matplotlib" in result.stderr


@pytest.mark.slow
def test_nothing_of_it_is_imported_unasked() -> None:
    code = (
        "import sys, attnops; assert not any(m.startswith('attnops_testing.bench') for m in sys.modules); "
        "import attnops_testing.bench; "
        "assert not [m for m in sys.modules if m in ('torch', 'tokamax', 'ejkernel', 'matplotlib', 'rich', 'typer')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The library


MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": SlidingWindow(5, 2),
    "causal window": Causal() & SlidingWindow(5, None),
    "documents": packed_documents(3, 32),
    "causal documents": Causal() & packed_documents(3, 32),
    "known documents": Segments([0] * 10 + [1] * 22),
    "an array's worth": PrefixLM(4) & packed_documents(2, 32),
    "padding, traced": KeyPadding(jnp.arange(32) < 30),
    "two windows": SlidingWindow(9, 9) & SlidingWindow(3, 12),
    "either": Causal() | SlidingWindow(0, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla", *(name for name, peer in PEERS.items() if not peer.platforms)])
@pytest.mark.tier(every=2)
def test_everybody_is_given_the_same_problem(name: str) -> None:
    if name in PEERS and not PEERS[name].installed:
        pytest.skip(f"{name} is not installed")
    cases = [
        Case(length=32, batch=2, heads=4, kv_heads=2, head_dim=8, mask=mask, backward=True) for mask in MASKS.values()
    ]
    found = measure([(case, find([name])[0]) for case in cases], rounds=1)
    assert {mask: m.reason for mask, m in zip(MASKS, found, strict=True) if m.status != "ok"} == {}


@pytest.mark.parametrize("mask", ["causal window", "causal documents"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.tier(quick=["float32-causal window"])
def test_of_a_long_case_some_queries_are_checked(monkeypatch: pytest.MonkeyPatch, mask: str, dtype: str) -> None:
    monkeypatch.setattr(truth, "_SCORES", 5 * 32)
    register(off_in_the_last_row)
    case = Case(length=32, heads=1, head_dim=8, dtype=dtype, mask=MASKS[mask], backward=True)
    found = measure([(case, c) for c in find(["flash", "vanilla", "zeta"])], rounds=1)
    assert [m.checked_rows for m in found] == [5, 5, 0]
    assert found[-1].reason.startswith("output[0, 4")  # the last of those that are checked
    rows = truth.Truth(case).rows
    assert (rows[0], rows[-1], len(set(rows))) == (0, 31, 5)
    register(without_gradient_of_keys)
    assert measure([(case, find(["zeta"])[0])], rounds=1)[0].reason.startswith("gradient of key[")


@pytest.mark.parametrize("large", [False, True])
def test_of_a_large_case_the_first_and_last_heads_are_checked(
    large: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    masked = np.tril(np.ones((1, 1, 12, 12), bool))
    case = Case(length=12, batch=3, heads=6, kv_heads=3, head_dim=4, mask=Causal(), backward=True)
    monkeypatch.setattr(truth, "_KEYS", 3 * 12 * 3 * 4 - large)
    checked = truth.Truth(case)
    assert (list(checked.batches), list(checked.heads)) == (
        ([0, 2], [0, 1, 4, 5]) if large else ([0, 1, 2], [*range(6)])
    )
    arrays = [np.float64(x) for x in case.inputs]
    gradients = attention_gradients(*arrays, d_out=np.float64(checked.d_out), mask=masked).values
    right = {"output": attention(*arrays, mask=masked).out}
    right |= {f"gradient of {name}": gradients[name] for name in ("query", "key", "value")}
    checked.check(right)

    def is_noticed(name: str, *at: int) -> bool:
        wrong = {key: x.copy() for key, x in right.items()}
        wrong[name][at] += 1.0
        try:
            checked.check(wrong)
        except AssertionError:
            return True
        return False

    for name in right:
        assert all(is_noticed(name, b, 5, h, 1) for b in (0, -1) for h in (0, -1))
        # Gradients of the heads that are not compared must be 0.
        assert is_noticed(name, 1, 5, 1, 1) == (not large or name != "output")
    print_measurements(measure([(case, find(["vanilla"])[0])], rounds=1), "")
    said = " ".join(capsys.readouterr().out.split())
    assert ("with 12 tokens only in the first and last batch and kv head" in said) == large


def test_contenders_take_turns_and_the_slow_stop_early() -> None:
    turns: list[str] = []

    def contender(name: str) -> Contender:
        def prepare(case: Case) -> Ready:
            real = find(["vanilla"])[0].prepare(case)
            return dataclasses.replace(real, run=lambda: turns.append(name) or real.run())  # type: ignore[func-returns-value]

        return Contender(name, prepare)

    case = Case(length=16, heads=1, head_dim=8)
    entries = [(case, contender("a")), (case, contender("b"))]
    found = measure(entries, rounds=4)
    shown = "".join(name for name, before in zip(turns, [None, *turns[:-1]], strict=True) if name != before)
    assert shown == "abababab" + "ab"  # once each to warm up, then four rounds
    assert [len(m.seconds) for m in found] == [4, 4]
    steps: list[int] = []
    found = measure(entries, rounds=4, most_seconds=0.0, progress=lambda what, n: steps.append(n))
    assert [len(m.seconds) for m in found] == [2, 2]
    assert sum(steps) == 2 * (4 + 1)


def test_what_the_oracle_cannot_judge_is_one_row_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(*arguments: Any) -> float:
        raise ValueError("the computation in float16 overflows; draw smaller inputs")

    monkeypatch.setattr(truth, "tolerance", overflow)
    (found,) = measure([(Case(length=16, heads=1, head_dim=8), find(["vanilla"])[0])])
    assert (found.status, found.reason) == ("failed", "the computation in float16 overflows; draw smaller inputs")


def test_documents_are_traced_and_as_many_as_asked() -> None:
    ids = packed_documents(5, 64).q_ids
    assert isinstance(ids, jax.Array)
    assert len(set(np.asarray(ids).ravel().tolist())) == 5
    assert (np.diff(np.asarray(ids)[0]) >= 0).all()
    assert Case(length=64, mask=packed_documents(5, 64)).traced_mask
    assert not Case(length=64, mask=Causal()).traced_mask


@pytest.mark.slow
def test_peak_memory_grows_with_what_is_held() -> None:
    before = bench.peak_rss()
    held = np.ones(1 << 26, np.uint8)
    assert bench.peak_rss() >= before
    assert bench.peak_rss() > held.size


@pytest.mark.slow
def test_the_benchmark_of_the_readme_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).resolve().parents[4] / "benchmarks" / "cpu.py"
    spec = importlib.util.spec_from_file_location("cpu_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cpu_benchmark", module)
    spec.loader.exec_module(module)
    tiny = module.Sizes(
        lengths=(64,),
        head_dims=(8,),
        reference_lengths=(16,),
        sparse_length=64,
        sparse_passes=(False,),
        long=256,
        rounds=1,
    )
    figures = {
        "machine": bench.describe_machine(),
        "memory": module.memory(tiny),
        "reference": list(module.reference(tiny)),
        "sparse": list(module.sparse(tiny)),
        "causal": list(module.causal(tiny)),
    }
    assert figures["memory"]["peak_rss"] < 2e9
    assert figures["sparse"][0]["share"] == 1.0
    assert all(x["seconds"]["flash"] and x["seconds"]["jax.nn"] for x in figures["causal"])
    assert all(x["ratio"] > 0 for x in figures["reference"])
    module.report_memory(figures["memory"])
    module.report_reference(figures["reference"])
    module.report_sparse(figures["sparse"])
    module.report_causal(figures["causal"])
    assert "16 documents, causal" in capsys.readouterr().out
    assert json.loads(json.dumps(figures)) == figures
