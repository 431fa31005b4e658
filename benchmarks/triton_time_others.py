"""Predicted times of others' kernels, by the model of `triton_time.py`, compared with published ones; no GPU::

    python benchmarks/triton_time_others.py --tutorial 06-fused-attention.py    # of Triton 3.6
    python benchmarks/triton_time_others.py --ops triton/ops/flash_attention.py    # of the wheel of Triton 3.0
    python benchmarks/triton_time_others.py --vllm VLLM    # a folder with vLLM 0.33's sources
    python benchmarks/triton_time_others.py --flashinfer fi    # a folder with FlashInfer 0.7.2, and CUDA's compiler

Triton 3.6 compiles its kernels: ``pip install --target t36 triton==3.6.0``, with t36 first in PYTHONPATH. nvcc compiles
FlashInfer's: ``pip install --no-deps --target fi flashinfer-python==0.7.2 nvidia-cuda-nvcc==13.5.* nvidia-nvvm==13.5.*
nvidia-cuda-crt==13.5.* nvidia-cuda-runtime==13.5.* nvidia-cuda-cccl==13.3.* nvidia-curand==10.4.*``.

A kernel needs ``max(tensor, special, bytes) + WAITS · issue`` cycles of each multiprocessor, and each program START
besides. Both constants are fitted to attnops-triton's forward kernels on an H200; nothing is fitted here. An error is
the predicted time over the published one, less 1.
"""

from __future__ import annotations

import ast
import collections
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import triton_decode
import typer
from triton_static import ISSUED, MULTIPLICATIONS, SPECIAL, WAITS

from attnops_triton import aot

START = 6028
# TFLOP/s of the tutorial's forward kernel on an H100 by tokens: D 128, float16, nothing masked, 16 heads, 16k tokens a
# call. By PyTorch's benchmarks (pull request 2391 of pytorch/benchmark), and by the labels of figure 5 of
# FlashAttention-3's paper (arXiv:2407.08608). Neither states its clock: an H100's boost.
TUTORIAL = {512: (329, 323), 1024: (390, 372), 2048: (434, 389), 4096: (458, 389), 8192: (471, 392), 16384: (477, 395)}
H100 = (1.755e9, 132)
# The share of the tensor cores' rate at the clock that was read in the test, on an A100, of `triton.ops.attention`: 4
# batches, 48 heads, 4,096 tokens, D 64, float16. A test of Triton 3.0 has them (python/test/regression/
# test_performance.py): by pass, causal, and whether dq is added by programs of their own. They count half of the
# products with and without a mask.
OPS = {
    ("forward", False, False): 0.306, ("forward", True, False): 0.541, ("backward", False, True): 0.157,
    ("backward", True, True): 0.232, ("backward", False, False): 0.159, ("backward", True, False): 0.291,
}  # fmt: skip
# Milliseconds of vLLM 0.33's step of decoding on an H200, by stored dtype: benchmarks/README.md. torch had Triton 3.6.
VLLM = {"": 0.452, "float8_e4m3fn": 0.506}
H200 = (1.8e9, 132, 4.8e12)
# Milliseconds of FlashInfer's step of decoding by tensor cores, G 8 and D 128 in 16 bits, by GPU, rows, tokens and K.
# On an H20: issue 1572 of flash-attention, with a FlashInfer of early 2025 and pages of 128. Its clock is not stated:
# the highest of an H100 stands for it. On an H200: benchmarks/README.md; nvidia-smi said 1.98 GHz.
FLASHINFER = {("H20", 128, 16384, 16): 5.10, ("H200", 8, 32768, 8): 0.253, ("H200", 64, 32768, 8): 1.937}
# Clock, multiprocessors, and bytes and operations of products per second by the data sheet.
DECODING = {"H20": (1.98e9, 78, 4.0e12, 148e12), "H200": (1.98e9, 132, 4.8e12, 989e12)}
# The kernel that is chosen for one query of each row and 8 query heads per kv head, with the shared memory of sm_90:
# 16 rows of scores, 4 warps, and tiles of 128 keys (BatchPrefillWithPagedKVCacheDispatched).
FLASHINFER_KERNEL = """
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/variants.cuh>
using namespace flashinfer;
using Params = BatchPrefillPagedParams<half, half, half, int32_t>;
using Traits = KernelTraits<MaskMode::kNone, 16, 1, 2, 8, 8, 1, 4, PosEncodingMode::kNone, half, half, half, float,
                            int32_t, DefaultAttention<false, false, false, false>>;
template __global__ void flashinfer::BatchPrefillWithPagedKVCacheKernel<true, Traits, Params>(
    const __grid_constant__ Params);
"""


def loop_of(path: Path, functions: tuple[str, ...], fixed: dict[str, Any], pointers: dict[str, str], warps: int,
            stages: int, capability: int) -> collections.Counter[str]:  # fmt: skip
    """The instructions of the loop with most products of the last of ``functions``, which a file has."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    text = path.read_text()
    found = {x.name: ast.get_source_segment(text, x) for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)}
    parts = ["import triton\nimport triton.language as tl", *(found[name] or "" for name in functions)]
    with tempfile.TemporaryDirectory() as folder:
        file, binary = Path(folder) / "others.py", Path(folder) / "others.cubin"
        file.write_text("\n\n\n@triton.jit\n".join(parts) + "\n")
        spec: Any = importlib.util.spec_from_file_location("others", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, functions[-1])
        names = kernel.arg_names
        signature = {x: "constexpr" if x in fixed else pointers.get(x, "i32") for x in names}
        divisible = [i for i, x in enumerate(names) if signature[x] in ("*fp16", "*fp32", "i32") and x not in "ZH"]
        source = ASTSource(
            kernel, signature, {(names.index(x),): value for x, value in fixed.items() if x in names},
            {(i,): [["tt.divisibility", 16]] for i in divisible},
        )  # fmt: skip
        options = {"num_warps": warps, "num_stages": stages}
        compiled: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        binary.write_bytes(compiled.asm["cubin"])
        return largest_loop(binary)


def largest_loop(binary: Path) -> collections.Counter[str]:
    """The instructions of the loop with most products."""
    code = aot._run("nvdisasm", "-c", str(binary))
    loops = [collections.Counter(aot._names(loop)) for loop in aot.innermost_loops(code)]
    return max(loops, key=lambda x: x["HGMMA"] + x["HMMA"])


def tile_cycles(loop: collections.Counter[str], warps: int, tensor: float) -> float:
    """The cycles of a tile, whose products need ``tensor``."""
    return max(tensor, loop["MUFU"] * 32 * warps / SPECIAL) + WAITS * sum(loop.values()) * warps / ISSUED


def tutorial(path: Path) -> None:
    """The forward kernel of Triton's tutorial, of tiles of 128 × 64, 3 stages and 4 warps."""
    fixed = dict.fromkeys(("stride_qk", "stride_kk", "stride_vn", "stride_on"), 1)
    fixed |= {"HEAD_DIM": 128, "BLOCK_M": 128, "BLOCK_N": 64, "STAGE": 1, "CAUSAL": False}
    pointers = dict.fromkeys(("Q", "K", "V", "Out"), "*fp16") | {"M": "*fp32", "sm_scale": "fp32"}
    loop = loop_of(path, ("_attn_fwd_inner", "_attn_fwd"), fixed, pointers, 4, 3, 90)
    tile = tile_cycles(loop, 4, 128 * 64 * 256 / MULTIPLICATIONS["sm_90"])
    clock, multiprocessors = H100
    for T, published in TUTORIAL.items():
        programs = 16384 // 128 * 16
        seconds = programs * (START + T // 64 * tile) / multiprocessors / clock
        speed = 4 * 16384 * T * 2048 / seconds / 1e12
        print(f"tutorial, T {T}: {speed:.0f} TFLOP/s", *(f"{x} {x / speed - 1:+.0%}" for x in published))


def ops(path: Path) -> None:
    """`triton.ops.attention` on an A100, of tiles of 128 × 64 and 4 warps forward, 128 × 128 and 8 backward."""
    rows, D, rate = 4096 // 128, 64, MULTIPLICATIONS["sm_80"]
    for (name, causal, apart), share in OPS.items():
        backward = name == "backward"
        bk, warps, stages, products = (128, 8, 1, 5) if backward else (64, 4, 4, 2)
        fixed: dict[str, Any] = {"stride_qk": 1, "stride_kk": 1, "stride_vk": 1, "stride_on": 1, "BLOCK_DMODEL": D,
                                 "BLOCK_M": 128, "BLOCK_N": bk, "IS_CAUSAL": causal, "CAUSAL": causal,
                                 "SEQUENCE_PARALLEL": apart, "MMA_V3": False}  # fmt: skip
        pointers = dict.fromkeys(("Q", "K", "V", "Out", "DO", "DQ", "DK", "DV"), "*fp16")
        pointers |= {"L": "*fp32", "D": "*fp32", "sm_scale": "fp32"}
        functions = ("_bwd_kernel_one_col_block", "_bwd_kernel") if backward else ("_fwd_kernel",)
        loop = loop_of(path, functions, fixed, pointers, warps, stages, 80)
        tensor = 128 * bk * products * D / rate
        squares = (rows + 1) / 2 if causal else rows  # of 128 × 128 scores, for each 128 rows
        found = START + squares * 128 / bk * tile_cycles(loop, warps, tensor)
        published = rows / 2 * tensor * 128 / bk / share
        print(f"{name}, {'causal' if causal else 'full'}{', dq apart' * apart}: {sum(loop.values())} instructions a "
              f"tile, {found / published - 1:+.0%}")  # fmt: skip


def vllm(checkout: Path) -> None:
    """The step of decoding by vLLM: 8 rows of 32,768 tokens, K 8, G 8, D 128, pages and tiles of 16."""
    clock, multiprocessors, bandwidth = H200
    for codec, published in VLLM.items():
        case = triton_decode.Case("sm_90", 128, 8, 16, codec)
        loop = triton_decode._loop(triton_decode._kernel(checkout), case, 16)
        tokens = 8 * 8 * 32768
        memory = tokens * (case.token_bytes + 8 * bool(codec)) / bandwidth
        issue = tokens / 16 * sum(loop.values()) * 4 / ISSUED / multiprocessors / clock
        found = (memory + WAITS * issue) * 1e3
        print(f"vLLM, {codec or 'bfloat16'}: {sum(loop.values())} instructions a tile, {found:.3f} ms, "
              f"{published} {found / published - 1:+.0%}")  # fmt: skip


def flashinfer(folder: Path) -> None:
    """The step of decoding by FlashInfer."""
    cuda = folder / "nvidia" / "cu13"
    with tempfile.TemporaryDirectory() as temporary:
        source, binary = Path(temporary) / "kernel.cu", Path(temporary) / "kernel.cubin"
        source.write_text(FLASHINFER_KERNEL)
        includes = (folder / "flashinfer" / "data" / "include", cuda / "include" / "cccl")
        options = ("-cubin", "-arch=sm_90a", "-std=c++17", "--expt-relaxed-constexpr", *(f"-I{x}" for x in includes))
        subprocess.run([str(cuda / "bin" / "nvcc"), *options, str(source), "-o", str(binary)], check=True)
        loop = largest_loop(binary)
    for (gpu, rows, length, K), published in FLASHINFER.items():
        clock, multiprocessors, bandwidth, rate = DECODING[gpu]
        tokens = rows * K * length
        memory, tensor = tokens * 512 / bandwidth, 4 * 16 * 128 * tokens / rate
        issue = tokens / 128 * sum(loop.values()) * 4 / ISSUED / multiprocessors / clock
        found = (max(memory, tensor) + WAITS * issue) * 1e3
        parts = f"bytes {memory * 1e3:.3f}, issue {issue * 1e3:.3f}, tensor cores {tensor * 1e3:.3f}"
        print(f"FlashInfer, {gpu}, {rows} rows: {sum(loop.values())} instructions a tile, {found:.3f} ms ({parts}), "
              f"{published} {found / published - 1:+.0%}")  # fmt: skip


def main(
    tutorial_file: Annotated[Path | None, typer.Option("--tutorial", help="Triton's 06-fused-attention.py.")] = None,
    ops_file: Annotated[Path | None, typer.Option("--ops", help="Triton 3.0's ops/flash_attention.py.")] = None,
    vllm_checkout: Annotated[Path | None, typer.Option("--vllm", help="A folder with vLLM's sources.")] = None,
    flashinfer_folder: Annotated[Path | None, typer.Option("--flashinfer", help="FlashInfer and nvcc.")] = None,
) -> None:
    """Compile the kernels, and print predicted and published times."""
    given = ((tutorial, tutorial_file), (ops, ops_file), (vllm, vllm_checkout), (flashinfer, flashinfer_folder))
    for predict, path in given:
        if path:
            predict(path)


if __name__ == "__main__":
    typer.run(main)
