"""Names for types that Python's type system can't express exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.typing import DTypeLike

__all__ = [
    "Array", "Aval", "BackendPlan", "BoolArray", "DType", "Function", "Index", "JaxprLike", "Leaf", "NumpyArray",
    "Options", "PyTree", "Ref",
]  # fmt: skip

NumpyArray: TypeAlias = np.ndarray[Any, Any]
"""A NumPy array of any shape and dtype: its values are known when JAX traces."""

Array: TypeAlias = NumpyArray | jax.Array
"""An array whose values are known (NumPy) or may be traced (JAX)."""

Index: TypeAlias = int | np.integer[Any] | NumpyArray | jax.Array
"""Indices of scores along one dimension: one integer, or an integer array that broadcasts with the others."""

BoolArray: TypeAlias = bool | np.bool_ | NumpyArray | jax.Array
"""One boolean or an array of booleans, known or traced."""

DType: TypeAlias = DTypeLike
"""Whatever `jax.numpy.dtype` accepts."""

Leaf: TypeAlias = Any
"""A leaf of a pytree: a number, an array, or None. JAX also puts its own objects there (tracers, shapes, specs)."""

PyTree: TypeAlias = Any
"""A pytree whose structure its caller chooses, or the arguments and results of a function that JAX calls."""

Aval: TypeAlias = Any
"""What JAX knows of an array without its values: an object with `shape` and `dtype`."""

JaxprLike: TypeAlias = Any
"""A jaxpr or a part of one (equation, variable, literal, parameters): JAX has no public types for all of them."""

Ref: TypeAlias = Any
"""A reference to a block of memory in a Pallas kernel: read and written by indexing."""

BackendPlan: TypeAlias = Any
"""The static, hashable description of a call that a backend's `plan` returns: each backend has its own class."""

Function: TypeAlias = Callable[..., Any]
"""A function whose arguments and results are its caller's."""

Options: TypeAlias = Mapping[str, Any]
"""Options of an attention call by name."""
