"""Kernels in Triton's interpreter, on a host without a GPU: on numpy arrays, inside a callback."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from attnops_triton.language.compat import function
from attnops_triton.language.source import KernelFunction

if TYPE_CHECKING:
    from attnops.typing import Function, NumpyArray, PyTree

# The interpreter patches Triton's functions while it runs.
_LOCK = threading.Lock()


def interpreted(
    kernel: KernelFunction, integers: tuple[int, ...], shapes: tuple[jax.ShapeDtypeStruct, ...], programs: int,
    dtypes: tuple[str, ...], *arrays: jax.Array, aliases: tuple[tuple[int, int], ...] = (),
) -> PyTree:  # fmt: skip
    """A kernel's results. They are NaN before it runs, so that missing stores are noticed.

    Args:
        kernel: the kernel.
        integers: its integer arguments.
        shapes: the shapes of the results.
        programs: the size of the grid.
        dtypes: the dtypes of arrays and results, which may be bits of them.
        arrays: the inputs.
        aliases: (index of the array, index of the result) for results that are written in place of an array.
    """

    def run(*given: PyTree) -> tuple[NumpyArray, ...]:
        inputs = [np.ascontiguousarray(x) for x in given]
        results = [_unwritten(shape) for shape in shapes]
        for source, target in aliases:
            results[target] = inputs[source].copy()
            inputs[source] = results[target]
        every = [x.view(dtype) for x, dtype in zip((*inputs, *results), dtypes, strict=True)]
        run_on_host(kernel, integers, programs, every[: len(inputs)], every[len(inputs) :])
        return tuple(results)

    return jax.pure_callback(run, shapes, *arrays, vmap_method="sequential")


def run_on_host(
    kernel: KernelFunction,
    integers: tuple[int, ...],
    programs: int,
    arrays: list[NumpyArray],
    results: list[NumpyArray],
) -> None:
    """Interpret a kernel, which writes to ``results``."""
    if kernel.gluon:
        from attnops_triton.language.simulator import simulate

        simulate(kernel, integers, programs, arrays, results)
        return
    from triton.runtime import interpreter

    with contextlib.suppress(ImportError):
        # Its import copies Triton's functions, which must not be those that the interpreter patches.
        import triton.experimental.gluon.language  # noqa: F401

    with _LOCK, np.errstate(all="ignore"), contextlib.ExitStack() as stack:
        if _listed is not None:
            functions = interpreter._interpreter
            stack.callback(setattr, interpreter, "_interpreter", functions)
            interpreter._interpreter = _Listing(functions, kernel.name, [*arrays, *results], _listed)
        called, helpers = function(kernel)
        values: dict[str, Any] = dict(zip(kernel.pointers, map(Buffer, (*arrays, *results)), strict=True))
        values |= dict(zip(kernel.integers, integers, strict=True))
        given = [undecorated(x, helpers) for x in kernel.arguments(values)]
        interpreter.InterpretedFunction(called).run(*given, grid=(programs,), warmup=False)


def undecorated(options: Any, helpers: dict[str, Function]) -> Any:
    """Options, with undecorated functions in place of those for the compiler."""
    if not dataclasses.is_dataclass(options) or isinstance(options, type):
        return options
    changed = {name: helpers[x.fn.__name__] for name, x in vars(options).items() if hasattr(x, "fn")}
    return dataclasses.replace(options, **changed)


class Buffer:
    """An array with the interface of a torch tensor on the host, which the interpreter expects."""

    def __init__(self, array: NumpyArray) -> None:
        self.array = array

    @property
    def dtype(self) -> str:
        """Triton's name of the dtype."""
        return {
            "float32": "fp32", "float16": "fp16", "int8": "i8", "int32": "i32", "uint32": "u32", "uint8": "u8",
        }[self.array.dtype.name]  # fmt: skip

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> Buffer:
        return self

    def cpu(self) -> Buffer:
        return self

    def new_empty(self, *_: object, **__: Any) -> Buffer:
        return Buffer(self.array)

    def set_(self, storage: Buffer, *_: object) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def copy_(self, _: Buffer) -> None:
        """Nothing: the kernel wrote in place."""


def _unwritten(shape: jax.ShapeDtypeStruct) -> NumpyArray:
    is_float = np.issubdtype(shape.dtype, np.floating)
    return np.full(shape.shape, np.nan if is_float else np.iinfo(shape.dtype).max, shape.dtype)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Elements that a program loaded together."""

    array: int  # the index of the array among the kernel's pointers
    first: NumpyArray  # the offset in bytes of each element in the array
    size: int  # bytes per element


@contextlib.contextmanager
def loads() -> Iterator[list[tuple[str, Loaded]]]:
    """A context that lists the loads of interpreted kernels, each with the kernel's name.

    Masked elements are not listed. Not thread-safe.
    """
    global _listed
    found: list[tuple[str, Loaded]] = []
    _listed = found
    try:
        yield found
    finally:
        _listed = None


_listed: list[tuple[str, Loaded]] | None = None


@dataclasses.dataclass(frozen=True)
class _Listing:
    """The interpreter's functions on memory, which list loads."""

    functions: Any  # those that it calls
    name: str  # the kernel's
    arrays: list[NumpyArray]  # the kernel's
    found: list[tuple[str, Loaded]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.functions, name)

    def load(self, pointers: NumpyArray, mask: NumpyArray, *rest: Any) -> Any:
        at = np.asarray(pointers)[np.broadcast_to(mask, np.shape(pointers)).astype(bool)].astype(np.int64)
        for i, array in enumerate(self.arrays):
            if at.size and array.ctypes.data <= at.flat[0] < array.ctypes.data + array.nbytes:
                self.found.append((self.name, Loaded(i, at - array.ctypes.data, array.itemsize)))
        return self.functions.load(pointers, mask, *rest)
