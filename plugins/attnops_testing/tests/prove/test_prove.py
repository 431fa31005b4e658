"""`attnops prove` reports a wrong kernel, a hang and a crash as rows, goes on after each, and resumes."""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from attnops_cli.show import mask_with_values
from attnops_linear import LinearAttention
from attnops_linear.testing import PROBLEMS
from attnops_testing.commands.prove import _default_jobs
from attnops_testing.prove.cases import timed_cases
from attnops_testing.prove.plan import alone, plan
from attnops_testing.prove.predicted import _rows, predicted
from attnops_testing.prove.process import _kill
from attnops_testing.prove.process import run as run_step
from attnops_testing.prove.record import Record
from attnops_testing.prove.report import compare, markdown
from attnops_testing.prove.step import Ending, Result, Step
from attnops_testing.prove.work import check_problem

# A kernel that is right but for soft caps, which it ignores; that aborts for calls with sinks; and that never returns
# for calls with a logsumexp, while a process that it started writes a file.
PLANTED = """
import os, subprocess, time
from attnops.operations.vanilla import VanillaAttention

class Planted(VanillaAttention):
    @classmethod
    def get_impl_name(cls):
        return "planted"

    def forward_cpu(self, query, key, value, *, logits_soft_cap=None, sinks=None, return_lse=False):
        if sinks is not None:
            os.abort()
        if return_lse:
            subprocess.Popen(["sh", "-c", 'while :; do date > "$PLANTED_FILE"; sleep 0.2; done'])
            time.sleep(1000)
        return self.forward_native(query, key, value)
"""
# How each row ends that has the feature.
PLANTS = {"soft cap": ["wrong"], "sinks": ["crash"], "logsumexp": ["hang"]}
MAIN = "import attnops_cli; attnops_cli.main()"


@pytest.fixture
def planted(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which a distribution has the planted kernel, and the command exists."""
    info = tmp_path / "site" / "acme_planted-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "acme_planted.py").write_text(PLANTED)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[attnops.operations]\nplanted = acme_planted:Planted\n")
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu", "COLUMNS": "200",
                         "PLANTED_FILE": str(tmp_path / "alive")}  # fmt: skip


def prove(folder: Path, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, "prove", *arguments], env=env, cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def endings(folder: Path) -> dict[str, str]:
    fields = json.loads((folder / "attnops-prove.json").read_text())
    return {row["name"]: row["result"]["ending"] for row in fields["results"]}


@pytest.mark.slow
def test_a_wrong_kernel_a_hang_and_a_crash_are_rows_and_not_the_end(tmp_path: Path, planted: dict[str, str]) -> None:
    arguments = "planted", "--section", "First calls", "--section", "Features", "--limit", "15"
    done = prove(tmp_path, planted, *arguments)
    assert done.returncode == 1, done.stderr
    found = endings(tmp_path)
    assert found["acme-planted:planted: forward and backward"] == "right"
    # Rows have several features each, of which the kernel serves these three.
    by_feature = {name: [x for row, x in found.items() if f"{name} " in f"{row} "] for name in PLANTS}
    assert by_feature == PLANTS
    assert list(found.values())[-1] not in ("crash", "hang")  # others follow
    # What the hung process started ended with it.
    written = (tmp_path / "alive").stat().st_mtime_ns
    time.sleep(1)
    assert (tmp_path / "alive").stat().st_mtime_ns == written
    report = (tmp_path / "attnops-prove.md").read_text()
    for text in ("**wrong**", "the process died of SIGABRT", "did not end in 15 s", "acme_planted.py", "What is wrong"):
        assert text in report, text
    # Nothing is run again, and the crash of a run that ended in the middle of a step is that step's.
    path = tmp_path / "attnops-prove.json"
    record = Record.read(path)
    last = next(reversed(record.results))
    record.results.pop(last)
    record.running = [last]
    record.write(path)
    again = prove(tmp_path, planted, *arguments)
    assert f"{len(found)} of {len(found)} steps" in again.stdout
    assert endings(tmp_path)[last[1]] == "crash"


@pytest.mark.slow
def test_the_cpus_kernels_are_proven_with_times(tmp_path: Path) -> None:
    done = prove(tmp_path, {**os.environ, "JAX_PLATFORMS": "cpu"}, "attnops:flash", "--jobs", "2")
    report = (tmp_path / "attnops-prove.md").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + report
    assert set(endings(tmp_path).values()) <= {"right", "refused", "not run"}
    for text in ("## First calls", "## Features", "## Caches", "## Behaviours", "## Times", "jax.nn", "one read"):
        assert text in report, text


def step(work: str, seconds: float = 60, **arguments: Any) -> Step:
    return Step("Planted", work, work, arguments, seconds)


def test_an_unknown_operation_is_named() -> None:
    found = run_step(step("find_machine", operations=["nonesuch"], every=False, limit=None))
    assert found.ending is Ending.WRONG
    assert "nonesuch" in found.detail
    found = run_step(step("find_machine", operations=["causal_conv1d"], every=False, limit=None))
    assert "computes 'causal_conv1d', which has no suite here" in found.detail


def test_the_first_steps_are_the_smallest_calls() -> None:
    found = run_step(step("find_machine", operations=["attnops:flash"], every=False, limit=7))
    assert found.ending is Ending.RIGHT, found
    steps = [Step(**fields) for fields in found.value["steps"]]
    assert [x.name for x in steps[:2]] == ["attnops:flash: forward", "attnops:flash: forward and backward"]
    assert list(dict.fromkeys(x.section for x in steps)) == ["First calls", "Features", "Caches", "Behaviours", "Times"]
    assert steps[0].seconds == 7
    assert len({(x.section, x.name) for x in steps}) == len(steps)
    assert found.value["peers"]["jax.nn"] == ""
    assert found.value["peers"]["rpa"] == "not on this platform: it runs on tpu, and this is cpu"


def test_accelerators_check_each_feature_in_bfloat16_at_head_dims_of_models() -> None:
    found: dict[str, set[int]] = {}
    for each in plan("cuda", ["attnops:flash"], every=True, limit=None):
        if each.arguments.get("dtype") == "bfloat16":
            found.setdefault(each.section, set()).add(each.arguments["head_dim"])
    assert found == {"Features in bfloat16": {64, 128, 256}, "Caches in bfloat16": {128}}
    assert all("bfloat16" not in x.section for x in plan("cpu", ["attnops:flash"], every=True, limit=None))
    kinds = {"NVIDIA H200": min(8, max(1, (os.cpu_count() or 1) // 2)), "TPU v6 lite": 1}
    for kind, jobs in kinds.items():
        assert _default_jobs(Record({"devices": [kind]}, [], [])) == jobs


def test_linear_attention_is_proven_by_its_own_suite() -> None:
    steps = plan("tpu", ["attnops-linear:linear_attention"], every=False, limit=None)
    assert [x.arguments["problem"] for x in steps] == list(PROBLEMS)
    found = [x for x in plan("cpu", [], every=False, limit=None) if x.section == "Linear attention"]
    assert 8 < len(found) < len(steps) / 2
    assert {"T = 2", "documents and padding"} & {x.arguments["problem"] for x in found}


@pytest.mark.slow
def test_a_wrong_kernel_of_linear_attention_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, problem = "attnops_linear.testing", "attnops-linear:linear_attention", "T = 2"
    assert check_problem(module, name, problem, every=False)[:2] == (Ending.RIGHT, "")
    right = LinearAttention.forward_native
    changed = functools.wraps(right)(lambda self, query, *others, **options: right(self, 2 * query, *others, **options))
    monkeypatch.setattr(LinearAttention, "forward_native", changed)
    ending, detail, _ = check_problem(module, name, problem, every=False)
    assert ending is Ending.WRONG
    assert "T = 2 float32 jit: output 0" in detail


class Stuck:
    """A process in a driver's call that never returns."""

    pid = None
    killed = False

    def kill(self) -> None:
        self.killed = True

    def join(self, timeout: float | None = None) -> None:
        assert timeout is not None, "it never ends"

    def is_alive(self) -> bool:
        return True


def test_a_process_that_can_not_be_killed_is_left_behind() -> None:
    stuck = Stuck()
    multiprocessing.process._children.add(stuck)
    assert not _kill(stuck)
    assert stuck.killed
    assert stuck not in multiprocessing.process._children  # for which Python would wait at its end


def test_a_process_that_raises_is_a_crash_with_its_output() -> None:
    stopped = threading.Event()
    wrong = step("check", operation="attnops:flash", part="nonesuch", case=[], mode="train")
    result = run_step(wrong, stopped)
    assert result.ending is Ending.CRASH
    assert "KeyError: 'nonesuch'" in result.output
    stopped.set()  # a thread that was about to start it
    assert run_step(wrong, stopped).seconds == 0


def record(*results: tuple[str, Result], versions: str = "1") -> Record:
    machine = {"processor": "acme", "cores": 2, "devices": ["cpu"], "versions": {"jax": versions}}
    steps = [Step("Times", name, "measure_times", {"contenders": ["a", "b"]}, 1) for name, _ in results]
    absent = {"rpa": "not on this platform: it runs on tpu", "jax.nn": ""}
    return Record(machine, [], steps, {("Times", name): result for name, result in results}, peers=absent)


def timed(seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "name": "flash", "is_peer": False, "best_seconds": seconds, "median_seconds": seconds, "temp_bytes": 10**6,
        "status": "ok", "reason": "", "bytes_seen": None, "mask": "Causal()", "batch": 1, "heads": 8, "length": 1024,
        "head_dim": 64, "backward": False,
    } | more  # fmt: skip


def test_a_report_has_times_beside_the_best_peer_and_a_comparison_has_ratios() -> None:
    peers = [timed(4e-3, name="jax.nn", is_peer=True), timed(6e-3, name="torch", is_peer=True)]
    one = record(("causal", Result(Ending.RIGHT, value=[timed(2e-3), *peers])), ("cut", Result(Ending.HANG, "slow")))
    other = record(("causal", Result(Ending.RIGHT, value=[timed(3e-3)])), ("cut", Result(Ending.RIGHT)))
    text = markdown(one)
    # 2 × 8 × 1,024² × 64 products of a causal mask in 2 ms.
    assert "| causal | flash | 2.000 | 2.000 | 0.54 | 2.00 × |  | 1 |  |" in text
    assert "**hang**: slow" in text
    assert "| every call | rpa | | | | | | | not on this platform: it runs on tpu |" in text
    assert "| every call | jax.nn |" not in text
    compared = compare(one, other)
    assert "1 of 2 steps ended alike" in compared
    assert "| Times: cut | hang | right |" in compared
    assert "| causal | flash | 2.000 | 3.000 | 1.50 |" in compared


def test_results_of_other_versions_are_refused_and_of_other_sections_kept(tmp_path: Path) -> None:
    earlier = record(("causal", Result(Ending.RIGHT)))
    earlier.write(tmp_path / "record.json")
    read = Record.read(tmp_path / "record.json")
    assert read == earlier
    with pytest.raises(ValueError, match="give another --report, or --fresh"):
        record(("causal", Result(Ending.RIGHT)), versions="2").resume(read)
    fresh = record(("causal", Result(Ending.RIGHT)))
    fresh.results.clear()
    assert fresh.resume(read) == 1
    other = record(("full", Result(Ending.WRONG)))
    assert other.resume(read) == 2
    assert [x.name for x in other.steps] == ["full", "causal"]
    # A step of another limit is run again.
    changed = record(("causal", Result(Ending.RIGHT)))
    changed.steps[0] = dataclasses.replace(changed.steps[0], seconds=2)
    changed.results.clear()
    assert (changed.resume(read), len(changed.steps)) == (0, 1)
    # What ran when the machine went down is a crash, whose contenders are tried alone.
    earlier.results.clear()
    earlier.running = [("Times", "causal")]
    down = record(("causal", Result(Ending.RIGHT)))
    down.results.clear()
    down.resume(earlier)
    assert down.results["Times", "causal"].ending is Ending.CRASH
    assert [x.name for x in alone(down.steps[0])] == ["causal: a alone", "causal: b alone"]
    # A record of the version before has one step, or null.
    for before, now in ((None, []), (["Times", "causal"], [("Times", "causal")])):
        earlier.running = before  # type: ignore[assignment]
        earlier.write(tmp_path / "record.json")
        assert Record.read(tmp_path / "record.json").running == now
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a record of attnops prove"):
        Record.read(tmp_path / "record.json")


def test_each_prediction_is_for_a_call_that_is_timed() -> None:
    timed = [
        {"length": x.length, "head_dim": x.head_dim, "dtype": x.dtype, "backward": x.backward,
         "mask": "" if x.mask == "Full()" else repr(mask_with_values(x.mask))}
        for x in timed_cases("tpu") if not x.cache
    ]  # fmt: skip
    rows = _rows()
    assert len(rows) > 8
    assert [row for row in rows if row["call"] not in timed] == []
    found = {**rows[0]["call"], "name": rows[0]["operations"][0], "batch": 2, "heads": 3}
    low, middle, high = (6 * x for x in rows[0]["ms_per_head"])
    assert predicted(rows[0]["devices"][0], found) == f"{middle:.3f} ({low:.3f} to {high:.3f})"
    assert predicted("cpu", found) == ""


def test_a_signal_without_a_name_is_a_number() -> None:
    from attnops_testing.prove.process import _exit

    assert _exit(-signal.SIGSEGV) == "the process died of SIGSEGV"
    assert _exit(-250) == "the process died of signal 250"
    assert _exit(3) == "the process ended with status 3"
