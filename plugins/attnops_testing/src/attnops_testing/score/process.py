"""Runs a library's cases in a process of its environment, and another one after a crash or a hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnops_testing.score.cases import Array, Case

_WORKER: Final = Path(__file__).parent / "worker.py"
# Seconds to import a library, in addition to the limit of the first case of a process.
_START: Final = 300.0

Outcome = tuple[dict[str, Any], dict[str, Array]]


def run(
    adapter: Path, python: Path, cases: Sequence[Case], seconds: float, report: Callable[[str], None] = lambda _: None
) -> dict[str, Outcome]:
    """How each case ended, and its results, by name.

    Args:
        adapter: the adapter's file.
        python: the Python of its environment.
        cases: the cases.
        seconds: the time limit of a case.
        report: is told each case's name as it ends.
    """
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i, case in enumerate(cases):
            np.savez(folder / f"{i}.npz", allow_pickle=False, **case.arrays)
            fields = {x: getattr(case, x) for x in ("name", "options", "dtype", "bias_dtype", "kind", "gradients")}
            (folder / f"{i}.json").write_text(json.dumps(fields))
        left = list(range(len(cases)))
        while left:
            ended, message = _attempt([str(python), str(_WORKER), str(adapter), name], folder, left, seconds)
            for i in [*ended, *([] if len(ended) == len(left) else [left[len(ended)]])]:
                outcomes[cases[i].name] = (
                    _read(folder, i) if i in ended else ({"ending": "crash", "message": message}, {})
                )
                report(cases[i].name)
            if message and not ended and len(left) == len(cases):  # it never started
                rest = {"ending": "not run", "message": message}
                return {case.name: (rest, {}) for case in cases}
            left = left[len(ended) + 1 :] if message else []
    return outcomes


def _attempt(command: list[str], folder: Path, left: Sequence[int], seconds: float) -> tuple[list[int], str]:
    """The cases that a process ended, and how it died at the next; empty if it did not."""
    output = folder / "output"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
    for name in ("PYTHONPATH", "XLA_FLAGS"):
        environment.pop(name, None)
    with output.open("w") as file:
        process = subprocess.Popen(
            [*command, *map(str, left)], stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=folder
        )
        done, deadline, hung = 0, time.monotonic() + seconds + _START, False
        try:
            while process.poll() is None and not (hung := time.monotonic() > deadline):
                time.sleep(0.05)
                if done < len(left) and (folder / f"{left[done]}.out.json").exists():
                    done, deadline = done + 1, time.monotonic() + seconds
        finally:
            process.kill()
            process.wait()
    ended = [i for i in left if (folder / f"{i}.out.json").exists()]
    if len(ended) == len(left):
        return ended, ""
    last = " ".join(output.read_text(errors="replace").split("\n")[-3:]).strip()[-300:]
    if hung:
        return ended, f"it did not end in {seconds:g} s and was killed"
    code = process.returncode
    return ended, f"the process died of {signal.Signals(-code).name}" if code < 0 else f"status {code}: {last}"


def _read(folder: Path, i: int) -> Outcome:
    with np.load(folder / f"{i}.out.npz") as arrays:
        return json.loads((folder / f"{i}.out.json").read_text()), dict(arrays)
