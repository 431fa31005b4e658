"""The state of a core's transfers, and what a step does."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp

from attnops_tpu.caches.tile_sizes import Starts

if TYPE_CHECKING:
    from attnops.typing import Ref


class _Number:
    """A number of a `StreamState`, in scalar memory."""

    def __set_name__(self, owner: type[StreamState], name: str) -> None:
        self.place, owner.size = owner.size, owner.size + 1

    def __get__(self, state: StreamState, owner: type[StreamState]) -> jax.Array:
        return state.ref[self.place]

    def __set__(self, state: StreamState, value: jax.Array | int) -> None:
        state.ref[self.place] = value


class _Flag(_Number):
    """A boolean of a `StreamState`."""

    def __get__(self, state: StreamState, owner: type[StreamState]) -> jax.Array:
        return state.ref[self.place] != 0

    def __set__(self, state: StreamState, value: jax.Array) -> None:  # type: ignore[override]
        state.ref[self.place] = value.astype(jnp.int32)


class StreamState:
    """The state of a core's transfers, by name; ``ref``: int32 [size] in scalar memory."""

    size: ClassVar[int] = 0

    next_item = _Number()  # the item of the tile to transfer next; the number of items if there is none
    next_tile = _Number()  # the index of that tile in its row
    next_is_whole = _Flag()  # whether all its units are transferred; false if there is none
    next_enters = _Flag()  # whether it begins another piece of the table; false if there is none
    next_buffer = _Number()  # the buffer that it is transferred to
    buffer = _Number()  # the buffer of the tile to compute with next
    zero = _Number()  # 0, which the compiler doesn't know
    piece = _Number()  # the index of the piece of the table in use, among all pieces of the core

    def __init__(self, ref: Ref) -> None:
        self.ref = ref


class StepCase(enum.Enum):
    """What a step computes with, and what it starts."""

    WHOLE = enum.auto()  # nothing of its tile is masked, and the next tile is whole
    # nothing of its tile is masked, and the next is not whole, or there is none; of `Starts.BRANCHED`, it may be any
    LAST = enum.auto()
    MASKED = enum.auto()  # all others: the tile is computed as masked, and the next may be of any kind


def step_cases(starts: Starts, is_full: jax.Array, next_is_whole: jax.Array) -> dict[StepCase, jax.Array]:
    """The cases that a kernel has code for, and whether each is the step's: exactly one is.

    Args:
        starts: when transfers start. `StepCase.LAST` has code of its own where a tile has much to compute: computed as
            masked, it would need up to twice the time.
        is_full: whether nothing of the tile is masked, and it has no new tokens.
        next_is_whole: see `StreamState.next_is_whole`.
    """
    if starts is Starts.BRANCHED:
        return {StepCase.LAST: is_full, StepCase.MASKED: ~is_full}
    if starts is Starts.AFTER:
        return {
            StepCase.LAST: is_full & ~next_is_whole,
            StepCase.WHOLE: is_full & next_is_whole,
            StepCase.MASKED: ~is_full,
        }  # fmt: skip
    return {StepCase.WHOLE: is_full & next_is_whole, StepCase.MASKED: ~(is_full & next_is_whole)}
