"""Runs contenders in separate processes, so that if one fails, or keeps memory, the others are not affected.

Their processes start together: each compiles and checks its programs, and then waits for its turn to time them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


class Worker:
    """A contender in a process of its own, which runs ``script --worker TASK.json --json RESULT.json``.

    Args:
        script: the script.
        task: the contents of TASK.json.
        on_cpu: whether JAX must not use the GPU.
    """

    def __init__(self, script: str, task: dict[str, Any], on_cpu: bool) -> None:
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if on_cpu:
            environment["JAX_PLATFORMS"] = "cpu"
        self._folder = tempfile.TemporaryDirectory()
        self._task = Path(self._folder.name, "task.json")
        self._result, self._errors = self._task.with_name("result.json"), self._task.with_name("errors")
        self._task.write_text(json.dumps(task))
        command = [sys.executable, script, "--worker", str(self._task), "--json", str(self._result)]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)

    def wait_until_ready(self, minutes: float) -> None:
        """Wait until it calls `wait_for_turn`, or ended, at most this long."""
        end = time.monotonic() + 60 * minutes
        while not _ready(self._task).exists() and self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)

    def finish(self, minutes: float) -> tuple[Any, str]:
        """Let it time its programs; returns (the JSON that it writes, ""), or (None, the reason why it failed)."""
        _turn(self._task).touch()
        with self._folder:
            try:
                code = self._process.wait(60 * minutes)
            except subprocess.TimeoutExpired:
                return None, f"it ran longer than {minutes} minutes"
            finally:
                self._process.kill()
                self._process.wait()
            if code:
                lines = self._errors.read_text(errors="replace").strip().splitlines()
                return None, (lines or ["no message"])[-1]
            return json.loads(self._result.read_text()), ""


def run(script: str, task: dict[str, Any], on_cpu: bool, minutes: int) -> tuple[Any, str]:
    """Run one alone; returns (the JSON that it writes, ""), or (None, the reason why it failed)."""
    return Worker(script, task, on_cpu).finish(minutes)


def wait_for_turn(task: Path) -> None:
    """In a worker: say that all is compiled and checked, and wait until the GPU is free."""
    parent = os.getppid()
    _ready(task).touch()
    while not _turn(task).exists():
        if os.getppid() != parent:
            sys.exit("the process that started it ended")
        time.sleep(0.05)


def _ready(task: Path) -> Path:
    return task.with_name("ready")


def _turn(task: Path) -> Path:
    return task.with_name("turn")
