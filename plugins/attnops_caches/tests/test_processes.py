"""Caches on meshes that span two processes, over `jax.distributed` on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cache_over_processes import CASES
from fast_compile import XLA_FLAGS

SCRIPT = Path(__file__).parents[3] / "tests" / "support" / "cache_over_processes.py"


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] * (i > 0)) for i, x in enumerate(CASES)])
@pytest.mark.tier(every=2)
def test_steps_over_two_processes_are_those_of_one_device(case: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": XLA_FLAGS}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), address, str(i), case], env=env, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        for i, process in enumerate(started):
            printed, _ = process.communicate(timeout=240)
            assert process.returncode == 0, printed
            assert f"process {i} of 2, 4 devices: {case}" in printed
    finally:
        for process in started:
            process.kill()
