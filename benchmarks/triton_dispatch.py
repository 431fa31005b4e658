"""Seconds that a launch of attnops-triton's kernels costs on the host, without a GPU::

    python benchmarks/triton_dispatch.py          # needs cc, jax-cuda13-plugin, and a ptxas

jaxlib's launcher makes a call inside `jax.jit` for each run of a program. Before 0.11.1 it is a function that is
given the compressed kernel each time; from 0.11.1 on XLA's FFI gives it what it made when the program was loaded.
This measures the installed jaxlib's, with a stand-in for the driver: a libcuda.so.1 that this script compiles, whose
functions do nothing. XLA's FFI runs on the CPU, with a stand-in for the GPU and its stream, whose places in XLA's
internal interface are those of jaxlib 0.12.0.1. A call outside of `jax.jit` looks its compiled program up in Python;
there the kernel is a stand-in on the CPU.
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
# Handlers of XLA's FFI for the CPU, which call those of the launcher. What XLA passes on has no GPU, so that functions
# that ask for its compute capability and its stream are replaced; a stream is an object whose methods all return 1.
HANDLERS = """
#include <string.h>
#include <time.h>
#include "xla/ffi/api/c_api.h"
enum { STREAM = 10, CAPABILITY = 19, FUNCTIONS = 24 };
double least;
static int repeated, capability[16] = {9, 0};
static XLA_FFI_Handler *launcher[2];
static XLA_FFI_Api api;
static void *internal[FUNCTIONS], *methods[64], *stream = methods;
static void *one(void *self) { return (void *)1; }
static void *get_stream(void *context, void **out) { *out = &stream; return 0; }
static void *get_capability(void *context, void **out) { *out = capability; return 0; }
static XLA_FFI_CallFrame on_gpu(XLA_FFI_CallFrame *frame) {
  XLA_FFI_CallFrame changed = *frame;
  for (int i = 0; i < 64; ++i) methods[i] = one;
  memcpy(&api, frame->api, sizeof api);
  memcpy(internal, api.internal_api, sizeof internal);
  internal[STREAM] = get_stream;
  internal[CAPABILITY] = get_capability;
  api.internal_api = (void *)internal;
  changed.api = &api;
  return changed;
}
void use(void *instantiate, void *execute, int times) {
  launcher[0] = instantiate, launcher[1] = execute, repeated = times;
}
XLA_FFI_Error *instantiate(XLA_FFI_CallFrame *frame) {
  if (frame->extension_start) return launcher[0](frame);
  XLA_FFI_CallFrame changed = on_gpu(frame);
  return launcher[0](&changed);
}
XLA_FFI_Error *execute(XLA_FFI_CallFrame *frame) {
  if (frame->extension_start) return launcher[1](frame);
  XLA_FFI_CallFrame changed = on_gpu(frame);
  XLA_FFI_Error *error = launcher[1](&changed);
  least = 1;
  for (int turn = 0; turn < 5 && !error; ++turn) {
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (int i = 0; i < repeated; ++i) launcher[1](&changed);
    clock_gettime(CLOCK_MONOTONIC, &to);
    double seconds = (to.tv_sec - from.tv_sec + 1e-9 * (to.tv_nsec - from.tv_nsec)) / repeated;
    if (seconds < least) least = seconds;
  }
  return error;
}
"""


def driver(folder: Path) -> None:
    """Compile the stand-in for the driver."""
    special = {"cuDeviceGetAttribute": ATTRIBUTE}
    special |= {x: CONTEXT.format(name=x) for x in FUNCTIONS if x.startswith("cuStreamGetCtx")}
    special["cuStreamIsCapturing"] = "int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }"
    special["cuFuncGetAttribute"] = "int cuFuncGetAttribute(int *value, int x, void *f) { *value = 0; return 0; }"
    source = "\n".join(special.get(name, f"int {name}(void) {{ return 0; }}") for name in FUNCTIONS)
    compiled(source, folder / "libcuda.so.1")


def compiled(source: str, target: Path, *options: str) -> None:
    """Compile a shared library from C."""
    command = ["cc", "-x", "c", "-shared", "-fPIC", "-O2", *options, "-o", target, "-"]
    subprocess.run(command, input=source.encode(), check=True)


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
    """The bytes by which jaxlib looks a launch up, and the seconds of one."""
    from jaxlib import gpu_triton

    from attnops_triton import versions
    from attnops_triton.language.build import build

    program = build(launched.recipe)
    code = program.code.decode()
    kernel = gpu_triton.TritonKernel(program.name, program.threads // 32, 1, program.shared, code, "", 90)
    pointers, integers = len(launched.recipe.kernel.pointers), launched.integers
    parameters = [gpu_triton.create_array_parameter(0, 16)] * pointers
    parameters += [gpu_triton.create_scalar_parameter(value, "i32") for value in integers]
    call = gpu_triton.TritonKernelCall(kernel, launched.programs, 1, 1, parameters)
    opaque = zlib.compress(call.to_proto(launched.recipe.kernel.name, b""))
    if versions.release(versions.version_of("jaxlib") or "0") >= (0, 11, 1):
        return 0, by_ffi(opaque, pointers)
    signature = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p)
    launch = signature(address(gpu_triton.get_custom_call(), b"xla._CUSTOM_CALL_TARGET"))  # type: ignore[arg-type]
    buffers, status = (ctypes.c_void_p * pointers)(*[1 << 20] * pointers), ctypes.create_string_buffer(64)

    def run() -> None:
        launch(1, buffers, opaque, len(opaque), status)

    run()
    if any(status.raw):
        raise RuntimeError("the launch failed")
    return len(opaque), seconds(run)


def by_ffi(opaque: bytes, pointers: int) -> float:
    """The seconds of a launch by XLA's FFI."""
    import jax
    import jax.numpy as jnp
    from jaxlib import gpu_triton

    path = Path(os.environ["ATTNOPS_STAND_IN"]) / "handlers.so"
    if not path.exists():
        compiled(HANDLERS, path, f"-I{jax.ffi.include_dir()}")
    handlers = ctypes.CDLL(path)
    stages = ("instantiate", "execute")
    named = gpu_triton._cuda_triton.registrations()["triton_kernel_call_ffi"]
    handlers.use(*(ctypes.c_void_p(address(named[stage], None)) for stage in stages), REPEATED)
    given = {stage: jax.ffi.pycapsule(getattr(handlers, stage)) for stage in stages}
    jax.ffi.register_ffi_target("attnops_stand_in", given, platform="cpu")
    call = jax.ffi.ffi_call("attnops_stand_in", jax.ShapeDtypeStruct((16,), jnp.float32))
    arrays = [jnp.zeros((16,)) for _ in range(pointers - 1)]
    jax.block_until_ready(jax.jit(lambda *x: call(*x, opaque=opaque))(*arrays))
    return ctypes.c_double.in_dll(handlers, "least").value


def address(capsule: Any, name: bytes | None) -> int | None:
    """The pointer in a capsule of this name."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, name)  # type: ignore[no-any-return]


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
