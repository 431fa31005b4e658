"""Runs a contender in a separate process, so that if it fails, or keeps memory, the others are not affected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def run(script: str, task: dict[str, Any], on_cpu: bool, minutes: int) -> tuple[Any, str]:
    """Returns (the JSON that a script writes, ""), or (None, the reason why it failed).

    Args:
        script: run as ``script --worker TASK.json --json RESULT.json``.
        task: the contents of TASK.json.
        on_cpu: whether JAX must not use the GPU.
        minutes: the time after which the process is stopped.
    """
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if on_cpu:
        environment["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        task_file, result = Path(folder) / "task.json", Path(folder) / "result.json"
        task_file.write_text(json.dumps(task))
        command = [sys.executable, script, "--worker", str(task_file), "--json", str(result)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60 * minutes)
        except subprocess.TimeoutExpired:
            return None, f"it ran longer than {minutes} minutes"
        if done.returncode:
            return None, (done.stderr.strip().splitlines() or ["no message"])[-1]
        return json.loads(result.read_text()), ""
