"""What `gpu.py`, `gpu_decode.py` and `gpu_linear.py` in benchmarks do without a GPU: times by a clock, processes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnops_testing import attention
from attnops_testing.bench import find
from attnops_testing.bench.case import Refused
from attnops_testing.bench.program import Contender, Ready

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that imports a module of benchmarks."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.startswith("gpu"):
            del sys.modules[name]


class Machine:
    """A host and a GPU that takes what the host starts, one after another; both by one clock."""

    def __init__(self, start: float, kernel: float) -> None:
        self.now, self.busy_until, self.start, self.kernel = 0.0, 0.0, start, kernel

    def run(self) -> None:
        self.now += self.start
        self.busy_until = max(self.busy_until, self.now) + self.kernel

    def wait(self, _: object) -> None:
        self.now = max(self.now, self.busy_until)


@pytest.mark.parametrize(("start", "kernel", "bound"), [(1e-4, 1e-3, False), (1e-4, 2e-5, True)])
def test_the_gpus_time_is_apart_from_the_hosts(
    start: float, kernel: float, bound: bool, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = script("gpu_timing")
    machine = Machine(start, kernel)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: machine.now)
    found = timing.measure(Ready(run=machine.run, wait=machine.wait, results=None, what=""), rounds=2)
    assert found.kernel_seconds == pytest.approx(max(start, kernel))
    assert found.dispatch_seconds == pytest.approx(start)
    assert found.latency_seconds == pytest.approx(start + kernel)
    assert found.is_bound_by_dispatch == bound


def test_a_delayed_queue_does_not_shorten_the_time(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five rounds one has a short queue that the host delays, and one a long queue."""
    timing = script("gpu_timing")
    machine = Machine(1e-4, 1e-3)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: machine.now)
    calls = []

    def run() -> None:
        machine.run()
        calls.append(machine.now)

    def wait(outputs: object) -> None:
        machine.wait(outputs)
        lengths.append(len(calls))
        calls.clear()
        machine.now += 5e-3 * (len(lengths) in delayed)

    lengths: list[int] = []
    delayed = (1 + 5 + 3, 1 + 5 + 6)  # after one queue of 2 calls and five of one
    found = timing.measure(Ready(run=run, wait=wait, results=None, what=""), rounds=5)
    short = lengths[-2]
    assert lengths[-10:] == [short, 3 * short] * 5
    assert found.kernel_seconds == pytest.approx(1e-3)


@pytest.mark.slow
def test_nothing_is_timed_while_programs_are_compiled(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, timing = script("gpu"), script("gpu_timing")
    events, real = [], find(["vanilla"])[0]

    def prepare(case: Any) -> Any:
        program = real.prepare(case)
        events.append("compiled")
        return program

    def measure(program: Any, rounds: int) -> Any:
        events.append("timed")
        return timing.Timing(1e-3, 1e-4, 1e-3)

    monkeypatch.setitem(script("gpu_contenders").CONTENDERS, "other", lambda dry: Contender("other", prepare))
    monkeypatch.setattr(timing, "measure", measure)
    cases = gpu.all_cases((16,), (32,), ["causal", "full"], dry=True)
    rows = gpu.measure_one(lambda: events.append("turn"), "other", cases, 1, dry=False)["rows"]
    assert events == ["compiled"] * 4 + ["turn"] + ["timed"] * 4
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert rows[0]["teraflops"] == pytest.approx(2 * 2 * 2 * 32**2 * 16 * 0.5 / 1e-3 / 1e12)


def test_groups_divide_the_query_heads(script: Any) -> None:
    gpu = script("gpu")
    (case, _) = gpu.all_cases((128,), (1024,), ["full"], dry=False, groups=4)
    assert (case["heads"], case["kv_heads"]) == (16, 4)
    (case, _) = gpu.all_cases((16,), (48,), ["full"], dry=True, groups=2)
    assert (case["heads"], case["kv_heads"]) == (2, 1)
    with pytest.raises(ValueError, match="groups=16 must be a divisor of 8, the query heads at head_dim=256"):
        gpu.all_cases((128, 256), (1024,), ["full"], dry=False, groups=16)


@pytest.mark.slow
def test_each_contender_has_a_process_and_one_that_fails_spoils_no_other(script: Any) -> None:
    pytest.importorskip("attnops_triton")
    gpu = script("gpu")
    cases = gpu.all_cases((16,), (32,), ["causal"], dry=True)
    own, unknown = gpu.in_own_processes(["attnops-triton", "unknown"], cases, 0, True, 5)
    assert [(row["status"], row["backward"], row["checked_rows"]) for row in own["rows"]] == [
        ("ok", False, 32), ("ok", True, 32)
    ]  # fmt: skip
    assert [(row["status"], row["reason"]) for row in unknown["rows"]] == [("failed", "KeyError: 'unknown'")] * 2
    gpu.table_of("", {"attnops-triton": own["rows"], "unknown": unknown["rows"]})


WORKER = """
import pathlib, sys, time
import gpu_process

task, result = map(pathlib.Path, sys.argv[2::2])
gpu_process.wait_for_turn(task)
start = time.monotonic()
time.sleep(0.2)
result.write_text(f"[{start}, {time.monotonic()}]")
"""


@pytest.mark.slow
def test_workers_start_together_and_time_their_programs_in_turn(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = script("gpu_process")
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    workers = [process.Worker(str(path), {}, on_cpu=True) for _ in range(2)]
    for worker in workers:
        worker.wait_until_ready(1)
    (one, _), (other, error) = (worker.finish(1) for worker in workers)
    assert not error
    assert one[1] < other[0]


def test_a_worker_ends_if_the_process_that_started_it_ended(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = iter((7, 7, 1))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    with pytest.raises(SystemExit, match="the process that started it ended"):
        script("gpu_process").wait_for_turn(tmp_path / "task.json")


def decode_case(gpu: Any) -> Any:
    return gpu.DecodeCase(70, 2, "", "", 16, 1, 2, 16, "float16")


@pytest.mark.slow
def test_decoding_is_checked_in_a_process_of_each_contender(script: Any) -> None:
    pytest.importorskip("attnops_triton")
    gpu = script("gpu_decode")
    given = {"bandwidth": 0, "rounds": 1, "dry": True}
    found = {name: gpu.in_its_own_process(name, [decode_case(gpu)], given, 5) for name in ("attnops-triton", "unknown")}
    assert [(row["status"], row["reason"]) for row in found["attnops-triton"]] == [("ok", "")]
    assert [(row["status"], row["reason"]) for row in found["unknown"]] == [("failed", "KeyError: 'unknown'")]


@pytest.mark.parametrize(
    ("change", "status"), [(0.0, "ok"), (0.1, "wrong"), (float("nan"), "wrong"), (Refused("no"), "refused")], ids=str
)
def test_only_right_results_of_decoding_are_timed(
    change: float | Exception, status: str, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = script("gpu_decode")
    rng = np.random.default_rng(0)
    query, keys, values = (rng.normal(size=(n, 16)) for n in (2, 69, 69))
    right = attention(query[None, None], keys[None, :, None], values[None, :, None]).out[0, 0]

    def step(case: Any, interpret: bool) -> Any:
        if isinstance(change, Exception):
            raise change
        part = lambda out, b, k: (query, keys, values, right + out * (b > 0))  # noqa: E731
        return gpu.Step(lambda: change, lambda out: out, part, "")

    monkeypatch.setitem(gpu.CONTENDERS, "other", step)
    assert gpu.figures("other", decode_case(gpu), 0, 1, dry=True)["status"] == status


@pytest.mark.slow
def test_linear_attention_is_checked_in_a_process(script: Any) -> None:
    pytest.importorskip("attnops_triton")
    gpu = script("gpu_linear")
    (prompt, gradients, token), (channel, _) = (gpu.all_cases([rule], dry=True) for rule in ("gdn", "kda"))
    assert (prompt.tokens, gradients.gradients, token.tokens, channel.tokens) == (40, True, 1, 40)
    cases = [prompt, token, channel]
    (rows,) = gpu.in_own_processes(["attnops-triton"], cases, {"rounds": 1, "dry": True}, 5)
    assert [row["status"] for row in rows] == ["ok", "ok", "refused"], rows
    assert rows[2]["reason"].startswith("decay=channel")


@pytest.mark.slow
def test_only_right_results_of_linear_attention_are_timed(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, timing = script("gpu_linear"), script("gpu_timing")
    changed = [""]

    def program(case: Any, given: Any, interpret: bool) -> Any:
        found = gpu.truth(given)
        found |= {name: x + np.abs(x).max() / 10 for name, x in found.items() if name in changed}
        return script("gpu_linear_contenders").Program(lambda: found, lambda _: None, np.asarray, "a GPU", "")

    monkeypatch.setitem(gpu.CONTENDERS, "other", program)
    monkeypatch.setattr(timing, "measure", lambda program, rounds: timing.Timing(1e-9, 1e-10, 1e-9))
    case = gpu.LinearCase("gdn", 2, 6, True, 2, 4, 8, "bfloat16")
    row = gpu.figures(gpu.checked("other", case, dry=False), 1)
    assert (row["status"], row["error"]) == ("ok", 0.0)
    tokens = 2 * 6  # four arrays of each size: queries, keys, their gradients; values, outputs ...; decays, betas ...
    assert row["GB/s"] == 4 * tokens * (2 * 8 * 2 + 4 * 8 * 2 + 4 * 4)
    for changed[0] in ("out", "key", "decay"):
        assert gpu.checked("other", case, dry=False).row["status"] == "wrong"
    token = case._replace(tokens=1, gradients=False)
    assert gpu.checked("other", token, dry=False).row["status"] == "ok"
    changed[0] = "state"
    assert gpu.checked("other", token, dry=False).row["status"] == "wrong"
