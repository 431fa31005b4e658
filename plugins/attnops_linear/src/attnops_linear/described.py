"""Calls of linear attention as `attnops explain` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from attnops import Request

if TYPE_CHECKING:
    from attnops_linear.operation import LinearAttention

_DECAYS = ("none", "constant", "head", "channel")
_FLAGS = ("beta", "initial_state", "return_state")


def described(
    operation: LinearAttention, sizes: Mapping[str, int], dtype: Any, mask: Any, options: Mapping[str, str]
) -> Request:
    """The request of a call. It is traced, so that no array is made.

    Args:
        operation: whose metadata says where the call runs.
        sizes: B, T, H (value heads), K (key heads), D and Dv.
        dtype: of query, key and value.
        mask: of `LinearAttention.__call__`.
        options: ``decay``, "none", "constant", "head" or "channel"; ``scale``, a number; ``beta``, ``initial_state``
            and ``return_state``, "yes" or "no".

    Raises:
        ValueError: an option has another name or value, or the arguments fit no implementation.
    """
    B, T, H, K, D, Dv = (sizes[name] for name in ("B", "T", "H", "K", "D", "Dv"))
    if unknown := sorted(options.keys() - {"decay", "scale", *_FLAGS}):
        raise ValueError(f"{unknown[0]} is no option of linear attention; it has {['decay', 'scale', *_FLAGS]}")
    for name in _FLAGS:
        if options.get(name, "no") not in ("yes", "no"):
            raise ValueError(f"{name}={options[name]!r} must be yes or no")
    decay = options.get("decay", "none")
    if decay not in _DECAYS:
        raise ValueError(f"decay={decay!r} must be one of {list(_DECAYS)}")
    shapes = {"constant": (H,), "head": (B, T, H), "channel": (B, T, H, D)}
    arrays = {"query": (B, T, K, D), "key": (B, T, K, D), "value": (B, T, H, Dv)}
    given: dict[str, Any] = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in arrays.items()}
    more = {"decay": shapes.get(decay), "beta": (B, T, H), "initial_state": (B, H, D, Dv)}
    for name, shape in more.items():
        if shape is not None and (name == "decay" or options.get(name) == "yes"):
            given[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
    if "scale" in options:
        try:
            given["scale"] = float(options["scale"])
        except ValueError:
            raise ValueError(f"scale={options['scale']!r} must be a number") from None
    asked = {"return_state": True} if options.get("return_state") == "yes" else {}
    return operation.request(**given, **asked, **({} if mask is None else {"mask": mask}))
