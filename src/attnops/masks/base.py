"""Mask: what every mask can do."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp


class Mask(abc.ABC):
    """Which query sees which key, without a T × S array.

    Subclasses are frozen dataclasses. They are pytrees: a field that holds an array is a leaf, any other field is
    static, so that a mask passes through `jax.jit` and its siblings.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_node(cls, _flatten, lambda static, leaves: _unflatten(cls, static, leaves))

    @abc.abstractmethod
    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        """This mask for scores of shape [B, H, T, S]: defaults that depend on the lengths are filled in.

        Raises:
            ValueError: an array of the mask does not fit.
        """

    @abc.abstractmethod
    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        """Whether query ``q`` of head ``h`` in batch ``b`` sees key ``kv``: elementwise over indices that broadcast.

        The mask must be bound, see `bind`.
        """

    def dense(self, B: int, H: int, T: int, S: int) -> jax.Array:
        """The mask as booleans that broadcast to [B, H, T, S]. O(T · S) memory."""
        b, h, q, kv = (
            jnp.arange(size).reshape([-1 if axis == own else 1 for axis in range(4)])
            for own, size in enumerate((B, H, T, S))
        )
        return jnp.asarray(self.bind(B, H, T, S).allowed(b, h, q, kv))

    def describe(self) -> dict[str, Any]:
        """What a request says of this mask: fields of `attnops.request.AttentionRequest`."""
        return {"mask": str(self), "mask_kinds": frozenset({type(self).__name__}), "mask_shape": None}

    def __bool__(self) -> bool:
        raise TypeError(f"the truth of {self} is ambiguous; combine masks with &, | and ~, not with and, or and not")


def _is_static(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, str, tuple)) or callable(value)


def _flatten(mask: Mask) -> tuple[list[Any], tuple[tuple[str, Any], ...]]:
    leaves, static = [], []
    for field in dataclasses.fields(mask):  # type: ignore[arg-type]
        value = getattr(mask, field.name)
        if _is_static(value):
            static.append((field.name, value))
        else:
            leaves.append(value)
    return leaves, tuple(static)


def _unflatten(cls: type[Mask], static: tuple[tuple[str, Any], ...], leaves: Any) -> Mask:
    # Not through __init__: JAX unflattens with placeholders that no check would accept.
    mask = object.__new__(cls)
    fixed = dict(static)
    remaining = iter(leaves)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        object.__setattr__(mask, field.name, fixed[field.name] if field.name in fixed else next(remaining))
    return mask
