"""Masks and biases under a mesh: how their arrays are sharded, and the mask or bias of one device's shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from attnops.biases import Bias, ShiftedBias
from attnops.masks import Mask
from attnops.masks.shift import Shifted
from attnops.typing import Index, Leaf


class Shard(NamedTuple):
    """The batches and heads of a call that a device has.

    Attributes:
        b: its first batch index, an integer array [].
        h: its first query head, an integer array [].
        batches: its number of batch indices.
        heads: its number of query heads.
    """

    b: Index
    h: Index
    batches: int
    heads: int


# From an array's shape and the letters of its dimensions to its spec.
SpecOf = Callable[[tuple[int, ...], str], PartitionSpec]


def specs_of(value: Leaf, spec_of: SpecOf) -> Leaf:
    """The partition specs of a bound mask's or bias's arrays, as a pytree of its structure.

    Args:
        value: a mask, a bias, or an array of [B or 1, H or 1, T or 1, S or 1].
        spec_of: the spec of an array.
    """
    if not isinstance(value, (Mask, Bias)):
        return spec_of(value.shape, "bhts") if hasattr(value, "shape") else value
    if value.axes is None:
        # It is evaluated at indices of the whole call, so all its arrays, nested ones too, are replicated.
        return jax.tree.map(lambda x: PartitionSpec(), value)

    def inner(name: str, x: Leaf) -> Leaf:
        shared = getattr(value, "inner_axes", {}).get(name)
        if shared is None:
            return specs_of(x, spec_of)
        return specs_of(x, lambda shape, letters: spec_of(shape, "".join(i if i in shared else "." for i in letters)))

    return _map(value, lambda name, x: spec_of(x.shape, (value.axes or {}).get(name, "")), inner)


def shard_of(value: Leaf, shard: Shard) -> Leaf:
    """A bound mask or bias, with sharded arrays, for indices of a device's shard."""
    if isinstance(value, Mask) and value.axes is None:
        return Shifted(value, *shard)
    if isinstance(value, Bias) and value.axes is None:
        return ShiftedBias(value, shard.b, shard.h)
    if not isinstance(value, (Mask, Bias)):
        return value
    return _map(value, lambda name, x: x, lambda name, x: shard_of(x, shard))


def _map(value: Leaf, array: Callable[[str, Leaf], Leaf], inner: Callable[[str, Leaf], Leaf]) -> Leaf:
    """A mask or bias that declares axes, with its arrays and its inner masks replaced."""
    copy = object.__new__(type(value))  # without __init__, which checks arrays
    for field in dataclasses.fields(value):
        x = getattr(value, field.name)
        if isinstance(x, (Mask, Bias)):
            x = inner(field.name, x)
        elif hasattr(x, "shape"):
            x = array(field.name, x)
        object.__setattr__(copy, field.name, x)
    return copy
