"""The new tokens of a step in the layout in which the kernel writes them: whole groups of slots.

A transfer moves whole *groups* of slots, which fill a register's sublanes: of 8 sublanes 8 slots of 32 bits, 16 of 16,
32 of 8; or 128 slots of scales, which are in the lanes. New tokens are given in groups aligned as the row's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops_caches import NewTokens
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.tile_sizes import LANES


class Written(NamedTuple):
    """What a call writes: arrays, or the kernel's references to them, of which ``tokens`` are those of an item."""

    first: Any  # the slot of the first new token of each row, counted from the row's first, int32 [B]
    # the slot after the last, int32 [B]; ``first`` for none. In a ring it may be beyond the last slot, which slot 0
    # follows.
    stop: Any
    blocks: Any  # the blocks with new tokens of each row, int32 [B · blocks per row]
    # bits of tokens as they are stored, int32 words [rows, K, n, d] of 1, 2 or 4 slots each: whole groups, or, for one
    # token per row, one word that repeats it. Scales float32 [rows, K, n], whole groups. There are as many rows
    # as items.
    tokens: tuple[Any, ...]


def group_of(is_scale: bool, itemsize: int, unit: int, sublanes: int) -> int:
    """Slots per group of an array.

    Args:
        is_scale: whether the array has scales by token.
        itemsize: bytes per element.
        unit: slots per unit, see `attnops_tpu.caches.plan.CachePlan`.
        sublanes: rows of a vector register.
    """
    return math.gcd(LANES if is_scale else sublanes * 4 // itemsize, unit)


def groups_of(T: int, group: int) -> int:
    """The most groups that T consecutive slots lie in."""
    return (T + group - 2) // group + 1


def written(plan: CachePlan, new: NewTokens, base: jax.Array | int, blocks: Mapping[str, jax.Array]) -> Written:
    """What a call writes.

    Args:
        plan: the plan of the call.
        new: the new tokens.
        base: the first block of the cache.
        blocks: the arrays that are written to, by name; scales last. JAX sorts the names of ``new.tokens``.
    """
    tokens = []
    for i, (name, array) in enumerate(blocks.items()):
        group = group_of(i >= plan.token_arrays, array.dtype.itemsize, plan.unit, plan.sublanes)
        token = jnp.arange(groups_of(plan.T, group) * group, dtype=jnp.int32) - (new.first % group)[:, None]
        token, x = jnp.clip(token, 0, plan.T - 1)[:, None], new.tokens[name]
        words = jnp.take_along_axis(x, token, 2) if i >= plan.token_arrays else _words_of(x, token[..., None])
        tokens.append(jnp.pad(words, ((0, plan.items - plan.B), *[(0, 0)] * (words.ndim - 1))))
    return Written(new.first, new.first + new.size, (new.blocks + base).reshape(-1).astype(jnp.int32), tuple(tokens))


def _words_of(x: jax.Array, token: jax.Array) -> jax.Array:
    """The ``token`` [B, 1, n, 1] of each slot, of tokens [B, K, T, d], as words of 32 bits.

    If T is 1, one word that repeats the token.
    """
    itemsize = x.dtype.itemsize
    packed, bits = 4 // itemsize, lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * itemsize}"))

    def shifted(i: int) -> jax.Array:
        # Not by a bitcast of pairs or fours: as a last axis, they would be padded to 128 lanes.
        some = bits if x.shape[2] == 1 else jnp.take_along_axis(bits, token[:, :, i::packed], 2)
        return some.astype(jnp.uint32) << (8 * itemsize * i)

    words = functools.reduce(jnp.bitwise_or, map(shifted, range(packed)))
    return lax.bitcast_convert_type(words, jnp.int32)
