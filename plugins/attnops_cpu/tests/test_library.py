"""The library: found or a reason, instruction sets by name, and the pool."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnops_cpu.library as module
from attnops import OperationMetadata, OperationRegistry, Reason, UnsupportedError
from attnops.dispatch.plugins import Plugin, State
from attnops.masks import Causal
from attnops_cli import doctor
from attnops_cpu import CpuFlashAttention
from attnops_cpu.library import Library, library


def twice(x: jax.Array) -> jax.Array:
    return jax.ffi.ffi_call("attnops_cpu_twice", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_an_instruction_set_serves_and_the_portable_one_is_the_last() -> None:
    found = library()
    assert found.problem is None
    assert found.available[-1] in ("baseline", "neon")
    assert found.isa in found.available
    x = jnp.arange(100_003, dtype=jnp.float32)
    np.testing.assert_array_equal(jax.jit(twice)(x), 2 * x)


def test_instruction_sets_are_those_that_the_system_names() -> None:
    avx2 = {"avx2", "fma", "f16c", "bmi2"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    needed = {
        "avx512_bf16": avx512 | {"avx512_bf16", "avx512_vnni"},
        "avx512": avx512,
        "avx2": avx2,
        "neon_bf16": {"asimd", "bf16"},
    }
    path = Path("/proc/cpuinfo")
    if not path.exists():  # macOS
        assert library().available[-1] == "neon"
        return
    flags = set(path.read_text().split())
    assert list(library().available[:-1]) == [name for name, each in needed.items() if each <= flags]


def test_without_the_library_native_flash_runs_and_a_reason_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "library.py"))
    missing = module.library.__wrapped__()
    assert missing.problem is not None
    assert "C++ compiler" in str(missing.problem)
    (tmp_path / module._NAME).write_bytes(b"not a library")
    broken = module.library.__wrapped__()
    assert broken.problem is not None
    assert "must load" in str(broken.problem)
    monkeypatch.setattr("attnops_cpu.flash.operation.library", lambda: missing)
    x = jnp.ones((1, 3, 1, 4))
    with pytest.warns(UserWarning, match="C\\+\\+ compiler"):
        found = OperationRegistry.create("flash", OperationMetadata(on_unsupported="native"))(x, x, x, mask=Causal())
    np.testing.assert_allclose(found.attention_outputs, 1.0, rtol=1e-6)
    with pytest.raises(UnsupportedError, match="C\\+\\+ compiler"):
        OperationRegistry.create("flash", OperationMetadata(on_unsupported="error"))(x, x, x)


def test_explain_says_which_instruction_set_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    operation: Any = OperationRegistry.create("flash")
    x = jnp.ones((1, 3, 1, 4))
    request = operation.prepare(x, x, x).request
    assert f"kernels in C++ for {library().isa}" in list(operation.details(request))
    monkeypatch.setattr("attnops_cpu.flash.operation.library", lambda: Library("", (), None))
    assert operation.environment_key() == ""


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, sys
from attnops_cpu.library import library
print(library().isa, library().problem)
"""


@pytest.mark.slow
def test_an_unknown_instruction_set_is_a_reason_that_names_those_there_are() -> None:
    environment = os.environ | {"ATTNOPS_CPU_ISA": "avx1024"}
    found = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert "avx1024" in found.stdout, found.stderr
    assert library().available[-1] in found.stdout


def branches(x: jax.Array) -> jax.Array:
    """32 calls that depend on nothing but ``x``, which XLA may run at once."""
    return sum((twice(x * i) for i in range(32)), jnp.zeros_like(x))


def test_independent_branches_of_one_program_do_not_wait_for_each_other() -> None:
    x = jnp.ones(8192, jnp.float32)
    run = jax.jit(branches)
    for _ in range(30):
        np.testing.assert_array_equal(run(x), x * 2 * sum(range(32)))


@pytest.mark.slow
def test_many_calls_end_in_time_in_branches_on_devices_and_in_threads() -> None:
    x = jnp.ones((8, 8192), jnp.float32)
    expected = np.asarray(x) * 2 * sum(range(32))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:8]), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    sharded = jax.jit(jax.shard_map(branches, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    alone = jax.jit(branches)
    wrong: list[str] = []

    def calls(run: Callable[[jax.Array], jax.Array], n: int) -> None:
        try:
            for _ in range(n):
                np.testing.assert_array_equal(run(x), expected)
        except Exception as error:
            wrong.append(str(error))

    # 10,000 calls of the handler in each: 32 branches, times 8 devices or threads.
    runs = [(alone, 320)], [(sharded, 40)], [(alone, 40)] * 8
    start = time.monotonic()
    for each in runs:
        threads = [threading.Thread(target=calls, args=given, daemon=True) for given in each]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, start + 300 - time.monotonic()))
            assert not thread.is_alive(), "a call did not end"
    assert not wrong


def test_doctor_says_that_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = (Plugin("attnops-cpu", "1", "flash", "", State.LOADED, operation_class=CpuFlashAttention),)
    missing = Library("", (), Reason("attnops-cpu's library", "missing", "must be there", "install g++"))
    monkeypatch.setattr("attnops_cpu.flash.operation.library", lambda: missing)
    (problem,) = doctor._machine_problems(["cpu"], plugins)
    assert problem.what == "attnops-cpu:flash can't run on cpu: attnops-cpu's library=missing: must be there"
    assert problem.install == "install g++"
    monkeypatch.setattr("attnops_cpu.flash.operation.library", lambda: Library("avx2", ("avx2",), None))
    assert doctor._machine_problems(["cpu"], plugins) == []
    assert "attnops-cpu:flash: kernels in C++ for avx2" in doctor._kernels(["cpu"], plugins)
