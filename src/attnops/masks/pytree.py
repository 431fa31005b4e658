"""Masks as pytrees: a field that holds an array or a mask is a leaf or subtree, any other field is static."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from attnops.programs.program import Program

if TYPE_CHECKING:
    from attnops.masks.base import Mask
    from attnops.typing import Leaf


def register(cls: type[Mask]) -> None:
    """Register a class of masks with JAX."""
    jax.tree_util.register_pytree_node(cls, _flatten, lambda static, leaves: _unflatten(cls, static, leaves))


def replaced(mask: Mask, changes: Mapping[str, Leaf]) -> Mask:
    """A copy with other fields; ``__init__``, which may require a number, is not called."""
    copy: Mask = object.__new__(type(mask))
    for field in dataclasses.fields(mask):  # type: ignore[arg-type]
        object.__setattr__(copy, field.name, changes.get(field.name, getattr(mask, field.name)))
    return copy


def equal_leaves(a: Leaf, b: Leaf) -> bool:
    """Whether two leaves are equal; a tracer equals only itself."""
    if a is b or any(isinstance(x, jax.core.Tracer) for x in (a, b)):
        return a is b
    return np.array_equal(a, b)


def _is_static(value: Leaf) -> bool:
    return value is None or isinstance(value, (int, float, str, Program)) or callable(value)


def _flatten(mask: Mask) -> tuple[list[Leaf], tuple[tuple[str, Leaf], ...]]:
    leaves, static = [], []
    for field in dataclasses.fields(mask):  # type: ignore[arg-type]
        value = getattr(mask, field.name)
        if _is_static(value):
            static.append((field.name, value))
        else:
            leaves.append(value)
    return leaves, tuple(static)


def _unflatten(cls: type[Mask], static: tuple[tuple[str, Leaf], ...], leaves: Leaf) -> Mask:
    # __init__ is not called: JAX unflattens with placeholders that no check would accept.
    mask = object.__new__(cls)
    fixed = dict(static)
    remaining = iter(leaves)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        object.__setattr__(mask, field.name, fixed[field.name] if field.name in fixed else next(remaining))
    return mask
