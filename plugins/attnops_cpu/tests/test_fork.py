"""A process that forks after, or while, it calls the kernels. JAX does not serve calls in the child."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

pytestmark = pytest.mark.slow

# Eight threads call, and meanwhile children are forked that compute without JAX and end as usual.
PROGRAM: Final = """
import multiprocessing, os, threading, warnings
import jax, jax.numpy as jnp, numpy as np
from attnops import OperationRegistry
from attnops_cpu import CpuFlashAttention
warnings.simplefilter("ignore")
OperationRegistry.register(CpuFlashAttention)
op = OperationRegistry.create("flash")
x = jnp.ones((1, 200, 2, 16))
call = jax.jit(lambda x: jax.grad(lambda x: op(x, x, x).attention_outputs.sum())(x))
assert "attnops_cpu_backward" in call.lower(x).as_text()
expected = np.asarray(call(x))
stop, wrong, calls = threading.Event(), [], [0] * 8
def work(i):
    while not stop.is_set():
        if not np.array_equal(call(x), expected): wrong.append(i)
        calls[i] += 1
def child():
    assert np.dot(expected.ravel(), expected.ravel()) >= 0
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for calling in (False, True):
    if calling:
        for thread in threads: thread.start()
    for _ in range(20):
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(20)
        assert process.exitcode == 0, f"a child has ended with {process.exitcode}"
    np.testing.assert_array_equal(call(x), expected)
stop.set()
for thread in threads: thread.join(60)
assert not any(thread.is_alive() for thread in threads) and not wrong and min(calls) > 0
print("ended")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_fork_before_and_while_threads_call_ends() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240)
    assert found.stdout == "ended\n", found.stderr
