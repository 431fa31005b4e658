"""Seconds that a launch of attnops-triton's kernels costs on the host, without a GPU::

    python benchmarks/triton_dispatch.py          # needs cc, jax-cuda13-plugin before 0.11.1, and a ptxas

Two paths: a call inside `jax.jit`, which XLA makes by jaxlib's launcher for each run of a program, here with a stand-in
for the driver (a libcuda.so.1 that this script compiles, whose functions do nothing); and a call outside of it, which
looks its compiled program up in Python, here with a stand-in for the kernel on the CPU. The launcher of jaxlib 0.11.1
and later has another interface, which needs a device: it is not measured.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
FUNCTIONS = (
    "cuInit", "cuStreamIsCapturing", "cuStreamGetCtx", "cuStreamGetCtx_v2", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
    "cuCtxGetCurrent", "cuCtxGetDevice", "cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunction",
    "cuDeviceGetAttribute", "cuFuncSetCacheConfig", "cuFuncGetAttribute", "cuFuncSetAttribute", "cuLaunchKernel",
    "cuLaunchKernelEx", "cuGetErrorName", "cuGetErrorString",
)  # fmt: skip
# Shared memory of a program, and of a multiprocessor.
ATTRIBUTE = "int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 233472; return 0; }"
CONTEXT = "int {name}(void *stream, void **context) {{ *context = (void *)1; return 0; }}"
REPEATED = 2000


def driver(folder: Path) -> None:
    """Compile the stand-in for the driver."""
    special = {"cuDeviceGetAttribute": ATTRIBUTE}
    special |= {x: CONTEXT.format(name=x) for x in FUNCTIONS if x.startswith("cuStreamGetCtx")}
    special["cuStreamIsCapturing"] = "int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }"
    special["cuFuncGetAttribute"] = "int cuFuncGetAttribute(int *value, int x, void *f) { *value = 0; return 0; }"
    source = "\n".join(special.get(name, f"int {name}(void) {{ return 0; }}") for name in FUNCTIONS)
    (folder / "driver.c").write_text(source)
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", folder / "libcuda.so.1", folder / "driver.c"]
    subprocess.run(command, check=True)


def seconds(function: Callable[[], object]) -> float:
    """The seconds of a call, the least of five means."""
    means = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(REPEATED):
            function()
        means.append((time.perf_counter() - start) / REPEATED)
    return min(means)


def kernels() -> dict[str, Any]:
    """Kernels that are launched: those of a decoding step and the plain forward one, for sm_90."""
    import jax
    import jax.numpy as jnp

    from attnops import OperationMetadata, OperationRegistry
    from attnops.masks import Causal
    from attnops_caches import PagedCache
    from attnops_triton import aot
    from attnops_triton.flash import tile_sizes

    tile_sizes.SPECIALISED.clear()
    flash: Any = OperationRegistry.create("attnops-triton:flash", OperationMetadata(platform="cuda"))
    cache = jax.eval_shape(
        lambda: PagedCache.create(batch=8, pages=16384, page_size=16, max_pages=2048, kv_heads=8, head_dim=128)
    )
    q, x = (jax.ShapeDtypeStruct((8, T, 64, 128), jnp.bfloat16) for T in (1, 1024))
    step = aot.kernels(lambda q, c: flash(q, c, mask=Causal()).attention_outputs, (q, cache), "sm_90")
    forward = aot.kernels(lambda x: flash(x, x, x, mask=Causal()).attention_outputs, (x,), "sm_90")
    return {"attention over a cache": step[0], "merge of splits": step[1], "forward": forward[0]}


def by_launcher(launched: Any) -> tuple[int, float]:
    """The bytes that identify a launch, and the seconds of one by jaxlib's launcher."""
    from jaxlib import gpu_triton

    from attnops_triton.language.build import build

    program = build(launched.recipe)
    code = program.code.decode()
    kernel = gpu_triton.TritonKernel(program.name, program.threads // 32, 1, program.shared, code, "", 90)
    pointers, integers = len(launched.recipe.kernel.pointers), launched.integers
    parameters = [gpu_triton.create_array_parameter(0, 16)] * pointers
    parameters += [gpu_triton.create_scalar_parameter(value, "i32") for value in integers]
    call = gpu_triton.TritonKernelCall(kernel, launched.programs, 1, 1, parameters)
    opaque = zlib.compress(call.to_proto(launched.recipe.kernel.name, b""))
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    signature = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p)
    launch = signature(address(gpu_triton.get_custom_call(), b"xla._CUSTOM_CALL_TARGET"))
    buffers, status = (ctypes.c_void_p * pointers)(*[1 << 20] * pointers), ctypes.create_string_buffer(64)

    def run() -> None:
        launch(1, buffers, opaque, len(opaque), status)

    run()
    if any(status.raw):
        raise RuntimeError("the launch failed")
    return len(opaque), seconds(run)


def by_python(launched: Any) -> float:
    """The seconds of a call outside of `jax.jit`, where the kernel is a stand-in that returns a number."""
    import jax
    import jax.numpy as jnp
    from jax.interpreters import mlir

    from attnops_triton.language import call

    def number(*_: Any, **__: Any) -> list[jax.Array]:
        return [jnp.zeros((1,), jnp.float32)]

    mlir.register_lowering(call._call, mlir.lower_fun(number, multiple_results=True), platform="cpu")
    x, shape = jnp.zeros((1,)), (jax.ShapeDtypeStruct((1,), jnp.float32),)
    return seconds(lambda: call.triton_call(launched.recipe, launched.integers, shape, launched.programs, x))


def any_call() -> float:
    """The seconds of a call of a small program under `jax.jit`, for comparison."""
    import jax
    import jax.numpy as jnp

    program, x = jax.jit(lambda x: x + 1), jnp.zeros((1,))
    return seconds(lambda: program(x))


def main() -> None:
    """Print a line for each kernel."""
    if "ATTNOPS_STAND_IN" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            driver(Path(folder))
            environment = os.environ | {"LD_LIBRARY_PATH": folder, "ATTNOPS_STAND_IN": folder}
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)
    print(f"{'dispatch, microseconds':28}{'KB hashed':>12}{'in jax.jit':>12}{'outside':>12}")
    for name, launched in kernels().items():
        size, inside = by_launcher(launched)
        print(f"{name:28}{size / 1024:12.1f}{1e6 * inside:12.2f}{1e6 * by_python(launched):12.2f}")
    print(f"{'any small program':52}{1e6 * any_call():12.2f}")


if __name__ == "__main__":
    main()
