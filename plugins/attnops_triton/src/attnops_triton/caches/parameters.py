"""The first two parameters of the kernels; the third is `plan.KernelOptions`."""

from __future__ import annotations

from typing import Any, NamedTuple


class Tokens(NamedTuple):
    """Keys and values, and their scales."""

    key: Any = None
    value: Any = None
    key_scale: Any = None
    value_scale: Any = None


class Arrays(NamedTuple):
    """The first parameter: pointers of `operands` and `schedule.ItemSchedule`, then outputs; None for absent arrays."""

    q: Any = None
    stored: Tokens = Tokens()
    base: Any = None
    layer: Any = None  # by row, the layer; None unless there are scales by head or tensor of all layers
    table: Any = None
    mask: tuple[Any, ...] = ()
    dense: tuple[Any, ...] = ()
    bias: tuple[Any, ...] = ()
    array: Any = None
    sinks: Any = None
    ranges: tuple[Any, ...] = ()
    row: Any = None
    tile: Any = None
    new: Tokens = Tokens()  # without scales
    new_stop: Any = None
    new_size: Any = None
    # Initial values of outputs, which are written in their place.
    out_before: Any = None
    lse_before: Any = None
    # Partial softmaxes, outputs of one kernel and inputs of the other.
    part: Any = None
    part_m: Any = None
    part_l: Any = None
    out: Any = None
    lse: Any = None
    # The arrays of the cache that are written, in place.
    written: Tokens = Tokens()


class Sizes(NamedTuple):
    """The second parameter: integers, of which those without a comment are `CachePlan`'s."""

    T: Any
    S: Any
    key_axis: Any
    nq: Any
    items: Any
    splits: Any
    pages: Any
    blocks: Any
    # Strides of arrays [B or 1, H or 1, T, S]: by batch and by head, counted in rows of S keys.
    dense: tuple[Any, ...] = ()
    array: Any = None
