"""How the tokens of a sequence are laid out on devices.

``contiguous``: one chunk per device, in order; with a causal mask the last device computes most. ``zigzag``: two chunks
per device, one counted from the front and one from the back, so that all devices compute equally much. ``striped``:
device i of n has the tokens i, i + n, i + 2n, …
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attnops.partition import explicit_entry, resharded, unsharded

if TYPE_CHECKING:
    from attnops.typing import Array, Index, NumpyArray

Order = Literal["contiguous", "zigzag", "striped"]
ORDERS: Final = ("contiguous", "zigzag", "striped")


def check_order(order: str) -> None:
    """Raise a `ValueError` for an unknown order."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is unknown; use one of {list(ORDERS)}")


def chunks_per_device(order: str) -> int:
    """The number of contiguous chunks of tokens that a device has: 2 in zigzag order, else 1."""
    return 2 if order == "zigzag" else 1


def chunk_ids(device: Index, devices: int, chunks: int) -> list[Any]:
    """The indices of a device's chunks among the sequence's ``devices * chunks`` chunks.

    Args:
        device: the device's index, an int or an integer array [].
        devices: the number of devices along the axes that shard the sequence.
        chunks: chunks per device, 1 or 2.
    """
    return [device, 2 * devices - 1 - device][:chunks]


def positions(length: int, devices: int, order: Order = "contiguous") -> NumpyArray:
    """The position in the original sequence of each token of the reordered one, int32 [length].

    Args:
        length: tokens; a multiple of ``devices``, or of 2 · ``devices`` for "zigzag".
        devices: the number of devices along the axes that shard the sequence.
        order: "contiguous", "zigzag" or "striped", as described at the top of this module.

    Raises:
        ValueError: the length is not such a multiple, or the order is unknown.
    """
    check_order(order)
    n = chunks_per_device(order)
    if length % (devices * n):
        raise ValueError(
            f"length={length} must be a multiple of {devices * n} for order={order!r} on {devices} devices; pad it"
        )
    tokens = np.arange(length, dtype=np.int32)
    if order == "striped":
        return tokens.reshape(-1, devices).T.reshape(-1)
    chunks = tokens.reshape(devices * n, -1)
    return np.concatenate([chunks[chunk_ids(device, devices, n)].reshape(-1) for device in range(devices)])


def reorder(x: Array, devices: int, order: Order, axis: int = 1) -> jax.Array:
    """Reorder an array of tokens to the layout ``order``. Call it once, in the data pipeline, on tokens and labels.

    Args:
        x: an array with the sequence along ``axis``.
        devices: the number of devices along the axes that shard the sequence.
        order: "contiguous", "zigzag" or "striped", as described at the top of this module.
        axis: the axis of the sequence.

    Raises:
        ValueError: the length along ``axis`` is not a multiple as in `positions`, or the order is unknown.
    """
    return _take(x, positions(x.shape[axis], devices, order), axis)


def restore(x: Array, devices: int, order: Order, axis: int = 1) -> jax.Array:
    """The inverse of `reorder`, with the same arguments."""
    return _take(x, np.argsort(positions(x.shape[axis], devices, order)), axis)


def _take(x: Array, tokens: NumpyArray, axis: int) -> jax.Array:
    """`jax.numpy.take`, with a result sharded as ``x``."""
    array = jnp.asarray(x)
    taken = jnp.take(unsharded(array, axis), tokens, axis=axis)
    if not explicit_entry(array, axis):
        return taken
    sharding = jax.typeof(array).sharding
    return resharded(taken, sharding.spec, sharding.mesh)
