"""What the tests of kernels whose warps have different tasks share: Hopper's and Blackwell's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_assemblers import ASSEMBLERS
from triton_mistakes import with_mistakes

from attnops import OperationMetadata, OperationRegistry, explain
from attnops.masks import Causal, Mask, Segments, SlidingWindow
from attnops_testing import attention
from attnops_triton.aot import Binary, compile_for, kernels
from attnops_triton.flash.order import unordered
from attnops_triton.flash.tile_sizes import SPECIALISED
from attnops_triton.language import interpreter, simulator
from attnops_triton.language.launch import Launched, recording
from attnops_triton.language.source import KernelFunction
from attnops_triton.targets import SHARED_MEMORY, target

NAME = "attnops-triton:flash"
SLOW = pytest.mark.slow


def documents(n: int) -> Mask:
    return Causal() & Segments(np.arange(n) // 90)


def names_of_simulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the names of kernels that are simulated from now on."""
    names: list[str] = []
    real = simulator.simulate

    def recorded(kernel: KernelFunction, *given: Any) -> None:
        names.append(kernel.name)
        real(kernel, *given)

    monkeypatch.setattr(simulator, "simulate", recorded)
    return names


def both(options: dict[str, Any], **metadata: Any) -> Callable[..., Any]:
    """The output and the gradients of query, key and value."""
    fields = OperationMetadata(platform="cuda", on_unsupported="error", **metadata)
    operation: Any = OperationRegistry.create(NAME, fields)

    def run(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pull_back = jax.vjp(lambda *qkv: operation(*qkv, **options).attention_outputs, q, k, v)
        return out, *pull_back(d_out)

    return run


def launched(
    D: int, mask: Mask | None, T: int = 256, dtype: str = "bfloat16", K: int = 2, arch: str = "sm_90", **options: Any
) -> Any:
    """The kernels of forward and backward."""
    q, k = (jax.ShapeDtypeStruct((1, T, heads, D), jnp.dtype(dtype)) for heads in (4, K))
    return kernels(both({"mask": mask, **options}, dropout_prob=0.1 * ("dropout_key" in options)), (q, k, k, q), arch)


def specialised(found: list[Launched]) -> list[bool]:
    return [each.tiles.specialised for each in found]


def told(D: int, mask: Mask | None, T: int = 256, dtype: str = "bfloat16", arch: str = "sm_90", **options: Any) -> Any:
    """What `explain` says of forward, dq, and dk and dv that are compiled, but not run by this machine's jaxlib."""
    q = jax.ShapeDtypeStruct((1, T, 4, D), jnp.dtype(dtype))
    metadata = OperationMetadata(platform="cuda", dropout_prob=0.1 * ("dropout_key" in options))
    operation: Any = OperationRegistry.create(NAME, metadata)
    with target(arch), recording():
        line, _ = explain(operation.request(q, q, q, mask=mask, **options), NAME, metadata).chosen.details
    assert line.startswith(f"kernels on {arch}: ")
    by = {name: how for part in line.split(": ", 1)[1].split("; ") for names, how in [part.split(" by ", 1)]
          for name in names.split(", ")}  # fmt: skip
    return [by[name] for name in ("forward", "dq", "dk and dv")]


def is_noticed(arch: str, T: int, *pairs: str) -> bool:
    """Whether the simulator finds the output of a forward kernel wrong whose text has these parts replaced."""
    q = jax.ShapeDtypeStruct((1, T, 1, 64), jnp.float32)
    operation: Any = OperationRegistry.create(NAME, OperationMetadata(platform="cuda", interpret=True))
    with target(arch):
        (found,) = kernels(lambda *qkv: operation(*qkv).attention_outputs, (q, q, q), arch)
    kernel = with_mistakes(found.recipe.kernel, *pairs)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, T, 1, 64)).astype(np.float32) for _ in range(3)]
    out = np.full((1, T, 1, 64), np.nan, np.float32)
    results = [out, np.zeros((1, 1, T), np.float32), np.zeros((1, 1, T), np.float32)]
    try:
        interpreter.run_on_host(kernel, found.integers, 1, arrays, results)
    except (TimeoutError, RuntimeError, AttributeError, TypeError, ValueError):
        return True
    rows = slice(T - found.tiles.bq, T)  # of the first program
    expected = attention(*arrays).out
    return not np.allclose(out[:, rows], expected[:, rows], atol=1e-5)


def assert_spills_little(binary: Binary, what: str) -> None:
    """Assert that at most 16 bytes are spilled, outside of loops, and that at most one in a hundred instructions of a
    loop reads them: a thread's index, say, which ptxas keeps for all partitions. The loader, which has 24 registers,
    may spill addresses before its loop.
    """
    assert binary.spilled <= 16, f"{what} spills {binary.spilled} bytes"
    for loop in binary.loops:
        size = sum(loop.values())
        assert not loop["STL"], f"{what} spills in a loop of {size} instructions"
        assert loop["LDL"] * 100 <= size, f"{what} reads {loop['LDL']} spilled numbers in a loop of {size} instructions"


def compile_cases(arch: str) -> list[Any]:
    """Parameters of `check_figures`: each pair of values that the kernels of an architecture serve."""
    every = [
        pytest.param(
            D, dtype, T, K, mask, cap, id=f"{arch} {D} {dtype} {T} {K} {name}{' cap' if cap else ''}",
            marks=[pytest.mark.slow, pytest.mark.exhaustive],
        )
        for D in SPECIALISED[arch]
        for dtype in ("bfloat16", "float16")
        for T in (4096, 1000)
        for K in (4, 2)
        for name, mask in (("none", None), ("causal", Causal()), ("window", Causal() & SlidingWindow(500, 0)),
                           ("documents", documents(T)))
        for cap in (None, 30.0)
    ]  # fmt: skip
    return every[::5]  # five divides no dimension of the product


def check_figures(arch: str, D: int, dtype: str, T: int, K: int, mask: Mask | None, cap: float | None) -> None:
    """Assert that kernels fit shared memory, and that specialised ones spill nothing, with each assembler."""
    with unordered():
        adds_dq = arch == "sm_90" and K == 4 and cap is None
        added = launched(D, mask, T, dtype, 4, logits_soft_cap=cap)[1:] if adds_dq else []
    for each in [*launched(D, mask, T, dtype, K, arch, logits_soft_cap=cap), *added]:
        if arch != "sm_90" and not each.tiles.specialised:
            continue
        for ptxas in ASSEMBLERS:
            binary = compile_for(each, arch, ptxas)
            what = f"{each.recipe.kernel.name} with {each.tiles}"
            assert binary.shared <= SHARED_MEMORY[arch], f"{what} needs {binary.shared} bytes of shared memory"
            if each.tiles.specialised:
                assert_spills_little(binary, what)
