"""The call of a compiled kernel in a JAX program, by jaxlib's launcher of Triton kernels.

The kernel is compiled when the program is lowered. jaxlib assembles it when it first runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import tempfile
import zlib
from typing import TYPE_CHECKING, Any, Final

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from attnops_triton import versions
from attnops_triton.language.build import CompiledKernel, Recipe, build
from attnops_triton.language.source import shape_of_map
from attnops_triton.targets import capability, is_amd

if TYPE_CHECKING:
    from attnops.typing import JaxprLike, PyTree

# Threads per warp, as jaxlib counts them.
_WARP: Final = {"cuda": 32, "rocm": 64}
# CUDA's numbers of dtypes (CUtensorMapDataType).
_TMA_TYPES: Final = {"float16": 6, "float32": 7, "bfloat16": 9}


def triton_call(
    recipe: Recipe, integers: tuple[int, ...], shapes: tuple[jax.ShapeDtypeStruct, ...], programs: int,
    *arrays: jax.Array, aliases: tuple[tuple[int, int], ...] = (),
) -> PyTree:  # fmt: skip
    """Run a kernel.

    Args:
        recipe: the recipe of the kernel; its ``arch`` may be empty, for this machine's GPU.
        integers: the integer arguments.
        shapes: the shapes of the results.
        programs: the size of the grid.
        arrays: the inputs.
        aliases: (index of the array, index of the result) for results that are written in place of an array.
    """
    given = {"recipe": recipe, "integers": integers, "shapes": shapes, "programs": programs, "aliases": aliases}
    return _call.bind(*arrays, **given)


_call = Primitive("attnops_triton_call")
_call.multiple_results = True


@_call.def_abstract_eval  # type: ignore[untyped-decorator]
def _abstract(*_: Any, shapes: tuple[jax.ShapeDtypeStruct, ...], **__: Any) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in shapes]


@_call.def_impl  # type: ignore[untyped-decorator]
def _run(*arrays: jax.Array, **params: Any) -> PyTree:
    return _jitted(*params.items())(*arrays)


@functools.lru_cache(maxsize=1024)
def _jitted(*params: tuple[str, Any]) -> Any:
    return jax.jit(functools.partial(_call.bind, **dict(params)))


def _lower(
    platform: str, context: JaxprLike, *operands: Any,
    recipe: Recipe, integers: tuple[int, ...], shapes: tuple[Any, ...], programs: int,
    aliases: tuple[tuple[int, int], ...],
) -> Any:  # fmt: skip
    from jaxlib import gpu_triton as launcher

    from attnops_triton.language.compat import device_arch

    exports = context.module_context.lowering_parameters.for_export
    arch = recipe.arch or device_arch()
    if not arch:
        raise ValueError(
            "kernels are compiled for one GPU, and this machine has none: "
            'use `with attnops_triton.targets.target("sm_90"):` for another machine\'s'
        )
    if is_amd(arch) and exports:
        raise NotImplementedError(
            "jax.export can't hold these kernels for AMD GPUs, since jaxlib reads their code from a file of this "
            'process; export OperationRegistry.create("attnops:flash")'
        )
    if not hasattr(launcher, "TritonKernel"):
        raise ModuleNotFoundError(
            "jaxlib's launcher of Triton kernels is missing: pip install --no-deps "
            f"{'jax-rocm7-plugin' if is_amd(arch) else 'jax-cuda13-plugin'}=={versions.version_of('jaxlib')}"
        )
    program = build(dataclasses.replace(recipe, arch=arch))
    parameters = _parameters(launcher, recipe, program, (*context.avals_in, *shapes), integers)
    kernel = launcher.TritonKernel(
        program.name, program.threads // _WARP[platform], 1, program.shared, _code(program, arch), "",
        0 if is_amd(arch) else capability(arch),
    )  # fmt: skip
    call = launcher.TritonKernelCall(kernel, programs, 1, 1, parameters)
    opaque = zlib.compress(call.to_proto(recipe.kernel.name, b""))
    if versions.release(versions.version_of("jaxlib") or "0") < (0, 11, 1):
        rule = jax.ffi.ffi_lowering(
            "triton_kernel_call", operand_output_aliases=dict(aliases), api_version=2, backend_config=opaque,  # type: ignore[arg-type]
        )  # fmt: skip
        return rule(context, *operands)
    rule = jax.ffi.ffi_lowering("triton_kernel_call_ffi", operand_output_aliases=dict(aliases), api_version=4)
    return rule(context, *operands, opaque=opaque)


def _parameters(
    launcher: Any, recipe: Recipe, program: CompiledKernel, arrays: tuple[Any, ...], integers: tuple[int, ...]
) -> list[Any]:
    """The parameters of a kernel in the order of its code: those of its arrays, inputs first, then its integers."""
    maps, blocks, parameters = iter(program.maps), dict(recipe.kernel.blocks), []
    for name, dtype, x in zip(recipe.kernel.pointers, recipe.dtypes, arrays, strict=True):
        if name in blocks:
            parameters += _map(launcher, shape_of_map(x.shape, blocks[name]), dtype, *next(maps))
        else:
            parameters.append(launcher.create_array_parameter(0, 16))
    return [*parameters, *(launcher.create_scalar_parameter(value, "i32") for value in integers)]


def _map(launcher: Any, shape: tuple[int, ...], dtype: str, swizzle: int, block: tuple[int, ...]) -> list[Any]:
    """The parameters that a tensor map is to a kernel: the map, which jaxlib encodes at each launch, its sizes, and its
    strides.
    """
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return [
        launcher.create_tma_descriptor_parameter(_TMA_TYPES[dtype], swizzle, list(shape), strides, list(block), 0),
        *(launcher.create_scalar_parameter(size, "i32") for size in shape),
        *(launcher.create_scalar_parameter(stride, "i64") for stride in strides),
    ]


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "a kernel for GPUs was compiled for the CPU: OperationMetadata(interpret=True) runs it in an interpreter, "
        "platform=None takes this machine's kernels, and jax.export compiles for a GPU that is elsewhere"
    )


mlir.register_lowering(_call, _refuse, platform="cpu")
for _platform in _WARP:
    mlir.register_lowering(_call, functools.partial(_lower, _platform), platform=_platform)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """The folder of files that jaxlib has not read yet; deleted when the process ends."""
    return tempfile.TemporaryDirectory()


def _code(program: CompiledKernel, arch: str) -> str:
    """The code in the form that jaxlib expects: PTX, or the name of a file with a code object, which jaxlib deletes
    after reading.
    """
    if not is_amd(arch):
        return program.code.decode()
    descriptor, path = tempfile.mkstemp(dir=_folder().name)
    with os.fdopen(descriptor, "wb") as file:
        file.write(program.code)
    return path
