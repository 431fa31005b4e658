"""The new tokens of a step in the layout in which the kernel writes them.

A transfer moves whole *groups* of slots, which fill a register's sublanes: of 8 sublanes 8 slots of 32 bits, 16 of 16,
32 of 8; or 128 slots of scales, which are in the lanes. Few new tokens of a row are given one by one, each as words
that repeat it: so the kernel puts it in any slot. More are given in groups aligned as the row's.
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
from attnops_tpu.caches.tile_sizes import LANES, MAX_BY_TOKEN


class Written(NamedTuple):
    """What a call writes: arrays, or the kernel's references to them, of which ``tokens`` are those of an item."""

    first: Any  # the slot of the first new token of each row, counted from the row's first, int32 [B]
    # the slot after the last, int32 [B]; ``first`` for none. In a ring it may be beyond the last slot, which slot 0
    # follows.
    stop: Any
    blocks: Any  # the blocks with new tokens of each row, int32 [B · blocks per row]
    begin: Any  # if tokens are given one by one, an item's first, int32 [items]; else None
    # One by one: int32 words [tokens, K, d] that repeat a token's bits 1, 2 or 4 times, and scales float32
    # [tokens, K, 128], the same in all lanes; at least T from each `begin` on. Else whole groups of each item: bits of
    # tokens as they are stored, int32 words [items, K, n, d] of 1, 2 or 4 slots each, and scales float32 [items, K, n].
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
        new: the new tokens; if they are written one by one, those of a batch, or packed ones.
        base: the first block of the cache.
        blocks: the arrays that are written to, by name; scales last. JAX sorts the names of ``new.tokens``.
    """
    B, stop, of_blocks = new.first.shape[0], new.first + new.size, (new.blocks + base).reshape(-1).astype(jnp.int32)
    tokens = []
    if plan.T <= MAX_BY_TOKEN:
        begin = jnp.arange(B, dtype=jnp.int32) * plan.T
        if new.starts is not None:  # of rows without tokens they may be any
            begin = jnp.clip(new.starts, 0, new.tokens["key"].shape[2])
        tokens = [_one_by_one(plan, new.tokens[name], i >= plan.token_arrays) for i, name in enumerate(blocks)]
        return Written(new.first, stop, of_blocks, jnp.pad(begin, (0, plan.items - B)), tuple(tokens))
    for i, (name, array) in enumerate(blocks.items()):
        group = group_of(i >= plan.token_arrays, array.dtype.itemsize, plan.unit, plan.sublanes)
        token = jnp.arange(groups_of(plan.T, group) * group, dtype=jnp.int32) - (new.first % group)[:, None]
        token, x = jnp.clip(token, 0, plan.T - 1)[:, None], new.tokens[name]
        words = jnp.take_along_axis(x, token, 2) if i >= plan.token_arrays else _words_of(x, token[..., None])
        tokens.append(jnp.pad(words, ((0, plan.items - plan.B), *[(0, 0)] * (words.ndim - 1))))
    return Written(new.first, stop, of_blocks, None, tuple(tokens))


def _one_by_one(plan: CachePlan, x: jax.Array, is_scale: bool) -> jax.Array:
    """`Written.tokens` of tokens [B, K, T, d] or scales [B, K, T] of a batch, or packed [1, K, N, d] or [1, K, N]."""
    x = jnp.broadcast_to(x[..., None], (*x.shape, LANES)) if is_scale else _repeated(x)
    x = x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])
    return jnp.pad(x, ((0, plan.T), (0, 0), (0, 0)))


def _repeated(x: jax.Array) -> jax.Array:
    """Words of 32 bits that repeat the bits of elements."""
    itemsize = x.dtype.itemsize
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * itemsize}")).astype(jnp.uint32)
    words = (bits << (8 * itemsize * i) for i in range(4 // itemsize))
    return lax.bitcast_convert_type(functools.reduce(jnp.bitwise_or, words), jnp.int32)


def _words_of(x: jax.Array, token: jax.Array) -> jax.Array:
    """The ``token`` [B, 1, n, 1] of each slot, of tokens [B, K, T, d], as words of 32 bits."""
    itemsize = x.dtype.itemsize
    packed, bits = 4 // itemsize, lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * itemsize}"))

    def shifted(i: int) -> jax.Array:
        # Not by a bitcast of pairs or fours: as a last axis, they would be padded to 128 lanes.
        return jnp.take_along_axis(bits, token[:, :, i::packed], 2).astype(jnp.uint32) << (8 * itemsize * i)

    words = functools.reduce(jnp.bitwise_or, map(shifted, range(packed)))
    return lax.bitcast_convert_type(words, jnp.int32)
