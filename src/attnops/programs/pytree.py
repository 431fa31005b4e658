"""Masks and biases as pytrees: a field that holds an int, a text or a function is static, any other is a subtree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from attnops.programs.program import Program
from attnops.typing import Leaf

Node = TypeVar("Node")


def register(cls: type) -> None:
    """Register a class with JAX, which becomes a dataclass before it has instances."""
    jax.tree_util.register_pytree_with_keys(cls, _flatten, lambda static, leaves: _unflatten(cls, static, leaves))


def replaced(node: Node, changes: Mapping[str, Leaf]) -> Node:
    """A copy with other fields; ``__init__``, which may require a number, is not called."""
    copy: Node = object.__new__(type(node))
    for field in dataclasses.fields(node):  # type: ignore[arg-type]
        object.__setattr__(copy, field.name, changes.get(field.name, getattr(node, field.name)))
    return copy


def equal_leaves(a: Leaf, b: Leaf) -> bool:
    """Whether two leaves are equal; a tracer equals only itself."""
    if a is b or any(isinstance(x, jax.core.Tracer) for x in (a, b)):
        return a is b
    return np.array_equal(a, b)


def _is_static(value: Leaf) -> bool:
    return isinstance(value, (int, str, Program)) or callable(value)


def _flatten(node: Any) -> tuple[list[tuple[Any, Leaf]], tuple[tuple[str, Leaf], ...]]:
    fields = [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    subtrees = [(jax.tree_util.GetAttrKey(name), value) for name, value in fields if not _is_static(value)]
    return subtrees, tuple((name, value) for name, value in fields if _is_static(value))


def _unflatten(cls: type, static: tuple[tuple[str, Leaf], ...], subtrees: Leaf) -> Any:
    # __init__ is not called: JAX unflattens with placeholders that no check would accept.
    node: Any = object.__new__(cls)
    fixed, remaining = dict(static), iter(subtrees)
    for field in dataclasses.fields(cls):
        object.__setattr__(node, field.name, fixed[field.name] if field.name in fixed else next(remaining))
    return node
