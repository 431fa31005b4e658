"""Masks and biases cut for the devices of a mesh: how their arrays are sharded, and what a device makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from attnops.biases import Bias, ShiftedBias
from attnops.masks import Mask
from attnops.masks.shift import Shifted


class Place(NamedTuple):
    """Which part of a call a device has.

    Attributes:
        b: its first of the batch, an integer array [].
        h: its first query head, likewise.
        batches: how many of the batch it has.
        heads: how many query heads.
    """

    b: Any
    h: Any
    batches: int
    heads: int


# From an array's shape and the letters of its dimensions to its spec.
SpecOf = Callable[[tuple[int, ...], str], PartitionSpec]


def specs_of(value: Any, spec_of: SpecOf) -> Any:
    """The partition specs of a bound mask's or bias's arrays, as a pytree of its structure.

    Args:
        value: a mask, a bias, or an array of [B or 1, H or 1, T or 1, S or 1].
        spec_of: the spec of an array.
    """
    if not isinstance(value, (Mask, Bias)):
        return spec_of(value.shape, "bhts") if hasattr(value, "shape") else value
    if value.axes is None:
        # It is asked about the whole call, and so has all of its arrays, those of what it wraps too.
        return jax.tree.map(lambda x: PartitionSpec(), value)
    return _map(
        value, lambda name, x: spec_of(x.shape, (value.axes or {}).get(name, "")), lambda x: specs_of(x, spec_of)
    )


def part_of(value: Any, place: Place) -> Any:
    """A bound mask or bias whose arrays are cut, as the part of the call understands it."""
    if isinstance(value, Mask) and value.axes is None:
        return Shifted(value, *place)
    if isinstance(value, Bias) and value.axes is None:
        return ShiftedBias(value, place.b, place.h)
    if not isinstance(value, (Mask, Bias)):
        return value
    return _map(value, lambda name, x: x, lambda x: part_of(x, place))


def _map(value: Any, array: Callable[[str, Any], Any], inner: Callable[[Any], Any]) -> Any:
    """``value``, which states its axes, with its arrays and its masks replaced."""
    found = object.__new__(type(value))  # not through __init__, which checks arrays
    for field in dataclasses.fields(value):
        x = getattr(value, field.name)
        if isinstance(x, (Mask, Bias)):
            x = inner(x)
        elif hasattr(x, "shape"):
            x = array(field.name, x)
        object.__setattr__(found, field.name, x)
    return found
