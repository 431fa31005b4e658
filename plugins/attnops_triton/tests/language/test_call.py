"""What a kernel's call becomes in a JAX program, for GPUs of both makers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxlib import gpu_triton
from triton_copy import copy_recipe

from attnops import OperationMetadata, OperationRegistry
from attnops_triton.aot import kernels as launched
from attnops_triton.language import call, compat
from attnops_triton.language.build import build

X = jax.ShapeDtypeStruct((1,), jnp.int32)


def lowered(arch: str) -> str:
    """The program of a call, for the platform of an architecture."""
    copy = jax.jit(lambda x: call.triton_call(copy_recipe(arch), (3,), (X,), 1, x))
    platform = "rocm" if arch.startswith("gfx") else "cuda"
    return copy.trace(X).lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What jaxlib's launcher was given."""
    given: list[tuple[Any, ...]] = []
    real = gpu_triton.TritonKernel

    def record(*arguments: Any) -> Any:
        given.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(gpu_triton, "TritonKernel", record)
    return given


def test_a_call_on_nvidia_has_the_ptx(kernels: list[tuple[Any, ...]]) -> None:
    assert "@triton_kernel_call" in lowered("sm_80")
    assert kernels == [("copy", 4, 1, 0, build(copy_recipe("sm_80")).code.decode(), "", 80)]
    assert ".version 8.0\n.target sm_80\n" in kernels[0][4]


@pytest.mark.slow
def test_tensor_maps_are_given_in_the_order_of_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []

    def encode(*arguments: Any) -> Any:
        given.append(arguments)
        return gpu_triton.create_scalar_parameter(0, "i64")

    # jaxlib has it from 0.11.1 on.
    monkeypatch.setattr(gpu_triton, "create_tma_descriptor_parameter", encode, raising=False)
    flash: Any = OperationRegistry.create("attnops-triton:flash", OperationMetadata(platform="cuda"))
    q, k = (jax.ShapeDtypeStruct((2, n, heads, 64), jnp.bfloat16) for n, heads in ((1000, 4), (700, 2)))
    (forward,) = launched(lambda *qkv: flash(*qkv).attention_outputs, (q, k, k), "sm_90")
    assert forward.recipe.kernel.pointers == ("q", "k", "v", "out", "m_out", "log2_sum_out")
    statistic = jax.ShapeDtypeStruct((2, 4, 1000), jnp.float32)
    shapes = (q, statistic, statistic)
    program = jax.jit(lambda *qkv: call.triton_call(forward.recipe, forward.integers, shapes, forward.programs, *qkv))
    program.trace(q, k, k).lower(lowering_platforms=("cuda",))
    bfloat16, swizzle = 9, 3  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B
    of_queries = (bfloat16, swizzle, [2, 1000, 256], [256000, 256, 1], [1, 64, 64], 0)
    of_keys = (bfloat16, swizzle, [2, 700, 128], [89600, 128, 1], [1, 128, 64], 0)
    assert given == [of_queries, of_keys, of_keys, of_queries]


def test_a_call_on_amd_names_a_file_with_the_code_that_no_other_program_reads(kernels: list[tuple[Any, ...]]) -> None:
    jax.clear_caches()
    for _ in range(2):
        assert "@triton_kernel_call" in lowered("gfx942")
    files = [Path(arguments[4]) for arguments in kernels]
    assert len({*files}) == 2, "jaxlib deletes a file that it has read"
    assert [file.read_bytes() for file in files] == [build(copy_recipe("gfx942")).code] * 2
    assert kernels[0][1] == 4


@pytest.mark.parametrize(
    ("arch", "wave"), [("gfx90a", 64), ("gfx942", 64), ("gfx950", 64), ("gfx1100", 32), ("sm_90", 32)]
)
def test_the_size_of_a_wave_is_the_targets(arch: str, wave: int) -> None:
    assert build(copy_recipe(arch)).threads == 4 * wave


def test_export_for_amd_is_refused_with_what_to_export_instead() -> None:
    copy = jax.jit(lambda x: call.triton_call(copy_recipe("gfx942"), (3,), (X,), 1, x))
    with pytest.raises(NotImplementedError, match=r"from a file of this process; export OperationRegistry"):
        jax.export.export(copy, platforms=["rocm"])(X)


def test_on_a_cpu_the_error_says_how_to_run_it_there() -> None:
    copy = jax.jit(lambda x: call.triton_call(copy_recipe("sm_90"), (3,), (X,), 1, x))
    with pytest.raises(NotImplementedError, match=r"compiled for the CPU: OperationMetadata\(interpret=True\)"):
        copy.lower(X)


@pytest.mark.parametrize(("arch", "plugin"), [("sm_90", "jax-cuda13-plugin"), ("gfx942", "jax-rocm7-plugin")])
def test_without_a_launcher_the_error_names_the_plugin_that_has_it(
    arch: str, plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(gpu_triton, "TritonKernel")
    with pytest.raises(ModuleNotFoundError, match=f"pip install --no-deps {plugin}==0"):
        lowered(arch)


def test_without_a_gpu_or_a_target_the_error_names_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "device_arch", lambda: "")
    with pytest.raises(ValueError, match=r"this machine has none: use `with attnops_triton.targets.target"):
        lowered("")
