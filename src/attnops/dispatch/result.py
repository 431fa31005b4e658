"""Checks of the result of a forward of attention against the contract, by shapes and dtypes only."""

from __future__ import annotations

from collections.abc import Container

import jax
import jax.numpy as jnp
import numpy as np

from attnops.output import OPTIONAL_FIELDS, OperationOutput
from attnops.typing import Aval


def check_output(name: str, args: tuple[Aval, ...], options: Container[str], result: object) -> OperationOutput:
    """``result`` unchanged, if it has the shapes and dtypes of the contract.

    Args:
        name: the implementation's name, for error messages.
        args: query [B, T, H, D], key [B, S, K, D], value [B, S, K, Dv], the forward's arguments.
        options: the names of the forward's options.
        result: what the forward returned.

    Raises:
        TypeError: it is not an `OperationOutput`, lacks a field that was asked for, or has another shape or dtype.
    """
    if not isinstance(result, OperationOutput):
        raise TypeError(f"{name} returned a {type(result).__name__}, but must return OperationOutput")
    query, key, value = args
    (B, T, H, _), S, Dv = query.shape, key.shape[1], value.shape[3]
    out_shape = B, T, H, Dv
    _check(name, "attention_outputs", result.attention_outputs, "[B, T, H, Dv]", out_shape, query.dtype,
           "the query's dtype")  # fmt: skip
    by_query = "[B, H, T]", (B, H, T), jnp.dtype(jnp.float32), "always float32"
    for option, field in OPTIONAL_FIELDS.items():
        if option not in options:
            continue
        if (array := getattr(result, field)) is None:
            raise TypeError(f"{name} was asked for {field} with {option}=True, but returned None")
        by_score = "[B, H, T, S]", (B, H, T, S), query.dtype, "the query's dtype"
        _check(name, field, array, *(by_score if field == "attention_weights" else by_query))
    return result


def _check(
    name: str, field: str, array: object, letters: str, shape: tuple[int, ...], dtype: np.dtype[np.generic], rule: str
) -> None:  # fmt: skip
    if not isinstance(array, (jax.Array, np.ndarray)):
        given = "None" if array is None else f"a {type(array).__name__}"
        raise TypeError(f"{name} returned {given} as {field}, but must return an array {letters}={shape}")
    if array.shape != shape:
        raise TypeError(f"{name} returned {field} of shape {array.shape}, but must return {letters}={shape}")
    if array.dtype != dtype:
        raise TypeError(f"{name} returned {field} of dtype {array.dtype}, but must return {dtype}: {rule}")
