"""Several OS processes over `jax.distributed` on loopback."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fast_compile import XLA_FLAGS

SCRIPT = Path(__file__).parents[3] / "examples" / "several_processes" / "ring.py"
HEARTBEAT = 10  # seconds


def start(n: int, indices: list[int], devices: int = 1, runs: int = 1) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": XLA_FLAGS}
    command = [
        sys.executable,
        str(SCRIPT),
        "--coordinator",
        address,
        "--processes",
        str(n),
        "--heartbeat",
        str(HEARTBEAT),
        "--runs",
        str(runs),
    ]
    return [
        subprocess.Popen(
            [*command, "--index", str(i)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for i in indices
    ]


@pytest.mark.parametrize(
    ("processes", "devices"), [(2, 2), pytest.param(4, 1, marks=[pytest.mark.slow, pytest.mark.exhaustive])]
)
def test_processes_agree_with_one(processes: int, devices: int) -> None:
    started = start(processes, list(range(processes)), devices)
    for i, process in enumerate(started):
        printed, _ = process.communicate(timeout=240)
        assert process.returncode == 0, printed
        assert re.search(
            rf"process {i} of {processes}, {processes * devices} devices: error \S+ relative to one device", printed
        )


@pytest.mark.slow
def test_a_killed_peer_ends_the_others() -> None:
    """They end with an error within the runtime's timeout; they don't hang."""
    first, second = start(2, [0, 1], runs=1_000_000)
    assert second.stdout is not None
    patience = threading.Timer(240, second.kill)
    patience.start()
    try:
        while "relative to one device" not in (line := second.stdout.readline()):
            assert line, "it ended before it ran once"
        second.kill()
        printed, _ = first.communicate(timeout=100)
        assert "relative to one device" in printed
        assert first.returncode != 0, printed
    finally:
        patience.cancel()
        for process in (first, second):
            process.kill()
            process.communicate()
