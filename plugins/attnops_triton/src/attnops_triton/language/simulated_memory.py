"""What kernels in Gluon compute with on a host without a GPU: numbers in registers, and memory, as numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from attnops_triton.language.source import shape_of_map

if TYPE_CHECKING:
    from attnops.typing import NumpyArray

_DTYPES: Final = {
    "fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32, "fp64": np.float64, "int1": np.bool_,
    **{name: getattr(np, name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
}  # fmt: skip


class Tensor(np.ndarray[Any, Any]):
    """A tensor or a number in registers."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        """The values in another dtype, or the bits."""
        return self.view(_numpy(dtype)) if bitcast else self.astype(_numpy(dtype))

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return np.asarray(array).view(Tensor)

    def __floordiv__(self, other: Any) -> Any:
        return tensor(np.trunc(np.divide(self, other)).astype(self.dtype))


def tensor(x: Any) -> Tensor:
    """An array as a tensor."""
    return np.asarray(x).view(Tensor)


def _numpy(dtype: Any) -> Any:
    """NumPy's dtype for Triton's."""
    return _DTYPES[str(dtype)]


def full(shape: list[int], value: float, dtype: Any) -> NumpyArray:
    """An array of Triton's dtype."""
    return np.full(shape, value, _numpy(dtype))


class Pointer:
    """Pointers to elements of an array."""

    def __init__(self, array: NumpyArray, at: Any = 0) -> None:
        self.array, self.at = array, tensor(np.asarray(at, np.int64))

    def __add__(self, offsets: Any) -> Pointer:
        return Pointer(self.array, self.at + offsets)


class Shared:
    """A buffer in shared memory, or a part of it."""

    def __init__(self, array: NumpyArray) -> None:
        self.array = array

    def index(self, i: Any) -> Shared:
        """A buffer of several."""
        return Shared(self.array[int(i)])

    def permute(self, axes: list[int]) -> Shared:
        """The same memory with its axes in another order."""
        return Shared(self.array.transpose(axes))

    def slice(self, start: Any, length: int, dim: int) -> Shared:
        """A part of it."""
        return Shared(self.array[(slice(None),) * dim + (slice(int(start), int(start) + length),)])

    def load(self, layout: Any) -> Tensor:
        """Its values."""
        return tensor(self.array.copy())

    def store(self, values: Tensor) -> None:
        """Write it."""
        self.array[...] = values


class TensorMemory(Shared):
    """Tensor memory, or a part of it."""

    def index(self, i: Any) -> TensorMemory:
        """See `Shared.index`."""
        return TensorMemory(self.array[int(i)])

    def slice(self, start: Any, length: int, dim: int = 1) -> TensorMemory:
        """See `Shared.slice`."""
        return TensorMemory(super().slice(start, length, dim).array)

    def reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> TensorMemory:
        """The same memory as elements of another dtype."""
        return TensorMemory(self.array.view(_numpy(dtype)).reshape(shape))


class TensorMap:
    """A tensor map, of which a kernel copies blocks."""

    def __init__(self, array: NumpyArray, block: tuple[int, ...]) -> None:
        self.array, self.block = array.reshape(shape_of_map(array.shape, block)), block

    def rows(self, corner: list[Any]) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """The index of each row of a block that lies in the array, and where its elements are."""
        *outer, row, column = (int(x) for x in corner)
        height, width = self.block[-2:]
        if column + width > self.array.shape[-1] or any(i < 0 for i in outer):
            raise IndexError(f"a block of {self.block} at {corner} of {self.array.shape}")
        for i in range(height):
            if 0 <= row + i < self.array.shape[-2]:
                yield i, (*outer, row + i, slice(column, column + width))


def copy(target: TensorMap, corner: list[Any], source: Shared, add: bool) -> None:
    """Copy a buffer to a block of an array, or add it."""
    for i, elements in target.rows(corner):
        target.array[elements] = source.array[i] + (target.array[elements] if add else 0)


def load(at: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    """See Triton's ``load``."""
    if mask is None:
        if at.at.size and (at.at.min() < 0 or at.at.max() >= at.array.size):
            raise IndexError("a load beyond its array")
        return tensor(at.array[at.at])
    mask, index = np.broadcast_arrays(mask, at.at)
    found = np.full(index.shape, other, at.array.dtype)
    found[mask] = at.array[index[mask]]
    return tensor(found)


def store(at: Pointer, values: Any, mask: Any = None) -> None:
    """See Triton's ``store``."""
    mask, index, values = np.broadcast_arrays(True if mask is None else mask, at.at, values)
    at.array[index[mask]] = values[mask]


def move(asm: str, constraints: str, values: list[Any], *_: Any) -> Any:
    """The one instruction of assembly language that kernels have."""
    if asm != "mov.b32 $0, $1;":
        raise NotImplementedError(asm)
    return values[0]


def maximum(a: Any, b: Any, propagate_nan: Any = None) -> Tensor:
    """The greater one; of a number and NaN the number, unless ``propagate_nan`` is given."""
    return tensor(np.fmax(a, b) if propagate_nan is None else np.maximum(a, b))


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """See Triton's ``where``."""
    return tensor(np.where(condition, a, b))


def elementwise(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function of NumPy on tensors."""
    return lambda x: tensor(function(x))
