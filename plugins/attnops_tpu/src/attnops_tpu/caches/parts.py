"""Large items in parts, so that small items come between them: the keys of those are transferred meanwhile.

A part is some consecutive tiles of keys of an item. The parts of an item follow one another, with small items between
them, and share the state of its online softmax.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.schedule import ItemSchedule

# The most parts of an item.
MAX_PARTS: Final = 16


class Part(NamedTuple):
    """Which part of its item a grid step computes, booleans."""

    is_first: Any
    is_last: Any


class Parts(NamedTuple):
    """The parts of items, in order: as many for each as the most, of which the first ones exist."""

    schedule: ItemSchedule  # of parts, but for ``following``, which is of no use
    exists: jax.Array  # bool [parts]
    is_first: jax.Array  # whether it is the first of its item, bool [parts]
    is_last: jax.Array  # the same for the last


def split(plan: CachePlan, schedule: ItemSchedule, exists: jax.Array, others: jax.Array, most: int) -> Parts:
    """Divide items into parts: each into as many as it has tiles, or as there are small items for it, or ``most``.

    Without small items to come between, a part more has only the cost of a grid step.

    Args:
        plan: the plan of the items.
        schedule: theirs.
        exists: which items exist, bool [B].
        others: how many small items exist.
        most: the most parts of an item.
    """
    units, B = plan.units, plan.B
    first, stop = schedule.first[:B, None], schedule.stop[:B, None]
    tile = first // units
    tiles = jnp.where(stop > first, -(-stop // units) - tile, 0)
    each = -(-others // jnp.maximum(exists.sum(dtype=jnp.int32), 1))
    count = jnp.clip(jnp.minimum(tiles, each), 1, most)
    # The tiles between parts, counted from the item's first.
    number = np.arange(most + 1, dtype=np.int32)
    at = (tile + tiles * jnp.minimum(number, count) // count) * units
    number = number[:-1]
    repeated = jax.tree.map(lambda x: jnp.repeat(x[:B], most), schedule)
    at = jnp.clip(at, first, stop)
    repeated = repeated._replace(first=at[:, :-1].reshape(-1), stop=at[:, 1:].reshape(-1))
    of_parts = exists[:, None] & (number < count), number == 0, number == count - 1
    return Parts(repeated, *(jnp.broadcast_to(x, (B, most)).reshape(-1) for x in of_parts))
