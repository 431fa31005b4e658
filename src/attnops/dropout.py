"""Portable dropout: whether a weight is dropped depends only on the PRNG key and (b, h, i, j).

Every implementation, tiling and sharding therefore draws the same mask, forward and backward, and none stores it.
Indices count from the start of the call: under `jax.vmap`, or in the caller's `jax.shard_map`, each slice starts at 0
and draws the same mask, unless it has a separate key (`jax.random.split`, or `fold_in` of the axis index).
The hash is a chain of MurmurHash3's 32-bit finaliser (A. Appleby, public domain), whose every step is a bijection
with full avalanche; it needs only 32-bit multiplications, shifts and exclusive ors, which Pallas and Triton have.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from attnops.typing import Array, Index

__all__ = [
    "ShiftedKey", "dropout_keep", "dropout_mask", "dropout_rows", "dropout_seed", "dropout_step",
    "dropout_threshold", "spread_of_keys",
]  # fmt: skip

# Odd constants that spread the counters 0, 1, 2, … over 32 bits: from the golden ratio and from xxHash32.
_SPREAD_B, _SPREAD_H, _SPREAD_I, _SPREAD_J = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F
_THRESHOLD_BITS = 24


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["key", "b", "h", "i", "j"], meta_fields=["i_step", "j_step"]
)
@dataclasses.dataclass(frozen=True)
class ShiftedKey:
    """A dropout key for a shard of a call: the shard's indices (0, 0, 0, 0) are (b, h, i, j) in the call. A pytree.

    The ``dropout_key`` of a forward under a mesh; `dropout_seed` accepts it as any other key.

    Attributes:
        key: the key of the whole call.
        b: the shard's first batch index, an int or an integer array [].
        h: the shard's first query head, an int or an integer array [].
        i: the shard's first query, an int or an integer array [].
        j: the shard's first key, an int or an integer array [].
        i_step: the difference, in the call, of the indices of consecutive queries.
        j_step: the difference, in the call, of the indices of consecutive keys; `dropout_keep` needs it as ``step``.
    """

    key: jax.Array
    b: Index = 0
    h: Index = 0
    i: Index = 0
    j: Index = 0
    i_step: int = 1
    j_step: int = 1


def dropout_step(key: jax.Array | ShiftedKey | None) -> int:
    """The argument ``step`` of `dropout_keep`: the factor by which the index of a key is multiplied."""
    return key.j_step if isinstance(key, ShiftedKey) else 1


def dropout_seed(key: jax.Array | ShiftedKey) -> jax.Array:
    """The seed of `dropout_rows`, uint32 [7]: two words of the PRNG key, and five of a shard's place in the call.

    Args:
        key: a PRNG key of any implementation, typed or raw uint32 data; or a `ShiftedKey`.
    """
    shifted = key if isinstance(key, ShiftedKey) else ShiftedKey(key)
    key = shifted.key
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    words = data.reshape(-1)
    first = words[0]
    for k in range(1, words.shape[0]):
        first = _mix(first ^ words[k])
    spread = (_SPREAD_B, _SPREAD_H, _SPREAD_I, _SPREAD_J)
    offsets = (
        _u32(x) * jnp.uint32(by) for x, by in zip((shifted.b, shifted.h, shifted.i, shifted.j), spread, strict=True)
    )
    return jnp.stack([first, words[-1], *offsets, jnp.uint32(_SPREAD_I * shifted.i_step % 2**32)])


def dropout_threshold(prob: float) -> int:
    """A weight is dropped where the upper 24 bits of its hash are below this number."""
    return round(prob * (1 << _THRESHOLD_BITS))


def dropout_rows(seed: Array, b: Index, h: Index, i: Index) -> jax.Array:
    """The hash of (PRNG key, b, h, i), uint32, from which `dropout_keep` computes the hash of each key.

    Args:
        seed: [7] uint32, from `dropout_seed`.
        b: index in the batch, any integer shape that broadcasts with the others.
        h: index of the query head.
        i: index of the query.
    """
    x = _mix(seed[0] + (_u32(b) * jnp.uint32(_SPREAD_B) + seed[2]))
    x = _mix((x ^ seed[1]) + (_u32(h) * jnp.uint32(_SPREAD_H) + seed[3]))
    # The first key's offset is added here, once per row, so that kernels count keys from 0.
    return _mix(x + (_u32(i) * seed[6] + seed[4])) + seed[5]


def dropout_keep(rows: jax.Array, j: Index, prob: float, step: int = 1) -> jax.Array:
    """Whether each weight is kept, boolean.

    Args:
        rows: uint32 hashes of (key, b, h, i), from `dropout_rows`.
        j: index of the key; broadcasts with ``rows``.
        prob: the probability that a weight is dropped, in [0, 1).
        step: the factor by which the index of a key is multiplied; 1 unless keys are strided.
    """
    x = _mix(rows + _u32(j) * jnp.uint32(spread_of_keys(step)))
    # Compared as int32: unsigned comparisons are missing on some accelerators, and 24 bits fit.
    upper = (x >> jnp.uint32(32 - _THRESHOLD_BITS)).astype(jnp.int32)
    return upper >= jnp.int32(dropout_threshold(prob))


def spread_of_keys(step: int) -> int:
    """The 32-bit factor by which the index of a key is multiplied before it is hashed."""
    return _SPREAD_J * step % 2**32


def dropout_mask(key: jax.Array | ShiftedKey, prob: float, shape: tuple[int, int, int, int]) -> jax.Array:
    """The mask, boolean [B, H, T, S], True where a weight is kept. O(B·H·T·S) memory: for reference use."""
    b, h, i, j = (
        jnp.arange(size).reshape([-1 if axis == dim else 1 for axis in range(4)]) for dim, size in enumerate(shape)
    )
    return dropout_keep(dropout_rows(dropout_seed(key), b, h, i), j, prob, dropout_step(key))


def _u32(x: Index) -> jax.Array:
    return jnp.asarray(x).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """MurmurHash3's fmix32."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
