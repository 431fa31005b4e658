"""How the tokens of a sequence lie on devices.

``contiguous``: one stretch each, in order; of a causal mask the last device has most. ``zigzag``: two stretches each,
one from the front and its mirror from the back, so that all have the same. ``striped``: every n-th token.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attnops.partition import own_entry, resharded, uncut

Order = Literal["contiguous", "zigzag", "striped"]
ORDERS: Final = ("contiguous", "zigzag", "striped")


def check_order(order: str) -> None:
    """Raise a `ValueError` for an order that there is not."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is unknown; use one of {list(ORDERS)}")


def stretches(order: str) -> int:
    """How many stretches of tokens a device has."""
    return 2 if order == "zigzag" else 1


def positions(length: int, devices: int, order: Order = "contiguous") -> np.ndarray[Any, Any]:
    """Which token of the sequence stands where once it is reordered, int32 [length].

    Args:
        length: tokens; a multiple of ``devices``, and of twice that for ``zigzag``.
        devices: along the axes that cut the sequence.
        order: see `attnops_ring.orders`.

    Raises:
        ValueError: the length does not divide, or the order is unknown.
    """
    check_order(order)
    parts = devices * stretches(order)
    if length % parts:
        raise ValueError(
            f"length={length} must be a multiple of {parts} for order={order!r} on {devices} devices; pad it"
        )
    tokens = np.arange(length, dtype=np.int32)
    if order == "striped":
        return tokens.reshape(-1, devices).T.reshape(-1)
    if order == "zigzag":
        halves = tokens.reshape(2 * devices, -1)
        return np.concatenate([halves[[i, 2 * devices - 1 - i]].reshape(-1) for i in range(devices)])
    return tokens


def reorder(x: Any, devices: int, order: Order, axis: int = 1) -> jax.Array:
    """An array of tokens as ``order`` lays them on devices: once, in the data pipeline, for tokens and labels.

    Args:
        x: an array with the sequence along ``axis``.
        devices: along the axes that cut the sequence.
        order: see `attnops_ring.orders`.
        axis: of the sequence.

    Raises:
        ValueError: see `positions`.
    """
    return _taken(x, positions(x.shape[axis], devices, order), axis)


def restore(x: Any, devices: int, order: Order, axis: int = 1) -> jax.Array:
    """The inverse of `reorder`."""
    return _taken(x, np.argsort(positions(x.shape[axis], devices, order)), axis)


def _taken(x: Any, tokens: np.ndarray[Any, Any], axis: int) -> jax.Array:
    """Tokens of an array; its type stays what it is."""
    array = jnp.asarray(x)
    found = jnp.take(uncut(array, axis), tokens, axis=axis)
    if not own_entry(array, axis):
        return found
    where = jax.typeof(array).sharding
    return resharded(found, where.spec, where.mesh)
