"""Factors of queries and keys that hold decays by channel, so that products of them have the decays between tokens.

The decays after token j up to token i are exp(G_i - G_j) by channel, inside the product of a query with a key. They
split at a reference r: exp(G_i - G_r) is a factor of the query, and exp(G_r - G_j) of the key. Each exponent is a sum
over the tokens between, by a product with a triangular matrix, and not a difference of cumulative sums: so it has no
error that is large beside it, and one decay of -200 makes it an exact 0.

Two ways to choose r:

- `mild`: the middle of a block of 16 tokens is the reference of its queries, for all keys up to the block's end. The
  exponents of 8 tokens on one side of it are positive. For chunks in which these are at most one of `MILD`.
- `careful`: the level of a pair (i, j) is the highest bit in which they differ, and r the end of j's block of so
  many tokens, which is just before i's. No exponent is positive; each of 6 levels has a product of all tokens.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from attnops_tpu.linear.chunk import part, stacked
from attnops_tpu.linear.plan import LANES, LinearPlan
from attnops_tpu.linear.prepare import CHUNK
from attnops_tpu.linear.products import BY_ROWS, parts, product, products

# A logarithm whose exponential is 0 with any number beside it; smaller ones are as good.
EMPTY: Final = -200.0
# The largest exponent of a factor of `mild`, of bfloat16 arrays (8 tokens with decays of exp(-5)) and of others: a
# float32 exponent x has an error of |x| / 2^24, which the other factor, exp(-x) or so, does not make smaller.
MILD: Final = (40.0, 8.0)
# The largest query and key of such a chunk, which times these factors are finite.
ORDINARY: Final = 1e12
_BLOCK: Final = 16
_HALF: Final = _BLOCK // 2
_HALVES: Final = CHUNK // _HALF
_LEVELS: Final = (1, 2, 4, 8, 16, 32)
# Of float32 logarithms.
_PARTS: Final = 3


class Factors(NamedTuple):
    """Of some heads; lists by head or, where it says so, by pair of heads, [C, 128] side by side.

    Attributes:
        scores: by pair, [q k, k k] with their decays; what is not before or at a query is undefined.
        queries: with the decays since the chunk's start, [C, D] float32.
        keys: the same of keys; empty without the delta rule.
        to_end: keys with the decays up to the chunk's end.
        whole: the decays of the chunk, [1, D].
    """

    scores: list[list[jax.Array]]
    queries: list[jax.Array]
    keys: list[jax.Array]
    to_end: list[jax.Array]
    whole: list[jax.Array]


def exponents(decay: jax.Array, count: int) -> jax.Array:
    """[C + 8, n], of logarithms [C, n]: of each token relative to the middle of its block, and sums of 8 tokens."""
    row, column = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    same = _block(row, _HALF) == _block(column, _HALF)
    is_second = row & _HALF > 0
    after, before = same & is_second & (column <= row), same & ~is_second & (column > row)
    relative = jnp.where(after, 1.0, jnp.where(before, -1.0, 0.0))
    row, column = (lax.broadcasted_iota(jnp.int32, (_HALVES, CHUNK), axis) for axis in (0, 1))
    sums = jnp.where(_block(column, _HALF) == row, 1.0, 0.0)
    return _summed(jnp.concatenate([relative, sums], axis=0), decay, count)


def _block(token: jax.Array, size: int) -> jax.Array:
    """Which block of ``size`` tokens, a power of 2."""
    return token >> (size.bit_length() - 1)


def _summed(which: jax.Array, decay: jax.Array, count: int) -> jax.Array:
    """The sums of logarithms by a matrix of 1, 0 and -1, which bfloat16 holds; ``count`` parts of them."""
    return product([which.astype(jnp.bfloat16)], parts(decay, count), count)


def mild(
    plan: LinearPlan, rough: int, found: jax.Array, queries: list[jax.Array], keys: list[jax.Array],
    pairs: list[tuple[int, int]],
) -> Factors:  # fmt: skip
    """See above.

    Args:
        plan: what is static.
        rough: the ``count`` of products for the outputs.
        found: `exponents` of the heads, [C + 8, heads · D].
        queries: of each head, [C, D].
        keys: the same.
        pairs: of heads.
    """
    logarithms = [found[:, part(i, plan.D)] for i in range(len(keys))]
    up, down = ([jnp.exp(sign * x[:CHUNK]) for x in logarithms] for sign in (1, -1))
    kept = [jnp.exp(x[CHUNK:]) for x in logarithms]
    queries = [x.astype(jnp.float32) * y for x, y in zip(queries, up, strict=True)]
    rows = [queries]
    if plan.beta:
        rows.append([x.astype(jnp.float32) * y for x, y in zip(keys, up, strict=True)])
    keys = [x.astype(jnp.float32) * y for x, y in zip(keys, down, strict=True)]
    counts = [rough, plan.passes][: len(rows)]
    split = [[parts(x, count) for x in each] for each, count in zip(rows, counts, strict=True)]
    scores: list[list[list[jax.Array]]] = [[[] for _ in rows] for _ in pairs]
    is_first = lax.broadcasted_iota(jnp.int32, (_BLOCK, LANES), 1) < CHUNK
    for block in range(CHUNK // _BLOCK):
        place, stop = part(block, _BLOCK), (block + 1) * _BLOCK
        if block:
            keys = [_moved(x, block * _BLOCK, _row(y, 2 * block - 1) * _row(y, 2 * block))
                    for x, y in zip(keys, kept, strict=True)]  # fmt: skip
        columns = [parts(x, plan.passes) for x in keys]
        for pair, of_pair in zip(pairs, scores, strict=True):
            left = [([x[place] for x in each[i]], n) for each, n in zip(split, counts, strict=True) for i in pair]
            both = products(left, stacked([[x[:stop] for x in columns[i]] for i in pair]))
            for blocks, first, second in zip(of_pair, both[::2], both[1::2], strict=True):
                blocks.append(jnp.where(is_first, _wide(first), _rolled(_wide(second), CHUNK - stop)))
    starts = [_starts(x) for x in kept]
    since = [[jnp.concatenate([x[part(n, _BLOCK)] * _row(y, n) for n in range(CHUNK // _BLOCK)], axis=0)
              for x, y in zip(each, starts, strict=True)] for each in rows]  # fmt: skip
    return Factors(
        [[jnp.concatenate(x, axis=0) for x in each] for each in scores],
        since[0], since[1] if plan.beta else [],
        [x * _row(y, _HALVES - 1) for x, y in zip(keys, kept, strict=True)],
        [x[-1:] * _row(y, _HALVES - 1) for x, y in zip(starts, kept, strict=True)],
    )  # fmt: skip


def _wide(x: jax.Array) -> jax.Array:
    """[rows, 128], with more lanes."""
    more = LANES - x.shape[1]
    return jnp.concatenate([x, jnp.zeros((x.shape[0], more), x.dtype)], axis=1) if more else x


def _rolled(x: jax.Array, lanes: int) -> jax.Array:
    return pltpu.roll(x, lanes, 1) if lanes else x


def _moved(keys: jax.Array, size: int, kept: jax.Array) -> jax.Array:
    """The first ``size`` keys with another reference."""
    return jnp.concatenate([keys[:size] * kept, keys[size:]], axis=0)


def _starts(kept: jax.Array) -> jax.Array:
    """[4, D]: the decays from the chunk's start to the middle of each block."""
    found = [_row(kept, 0)]
    for i in range(2, _HALVES, 2):
        found.append(found[-1] * (_row(kept, i - 1) * _row(kept, i)))
    return jnp.concatenate(found, axis=0)


def _row(x: jax.Array, i: int) -> jax.Array:
    return x[i : i + 1]


def careful(plan: LinearPlan, decays: list[jax.Array], queries: list[jax.Array], keys: list[jax.Array]) -> Factors:
    """See above; of a pair of heads, whose logarithms are [C, D]."""
    rows = [[x.astype(jnp.float32) for x in each] for each in ([queries, keys] if plan.beta else [queries])]
    keys = [x.astype(jnp.float32) for x in keys]
    row, lane = (lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), axis) for axis in (0, 1))
    differ = row ^ (lane & (CHUNK - 1))

    def scored(rows: list[list[jax.Array]], keys: list[jax.Array]) -> list[jax.Array]:
        left, right = ([parts(x, plan.passes) for x in each] for each in ([x for each in rows for x in each], keys))
        found = product(stacked(left), stacked(right), plan.passes, BY_ROWS)
        cut = [found[part(i, CHUNK)] for i in range(len(left))]
        return [jnp.where(lane < CHUNK, cut[i], cut[i + 1]) for i in range(0, len(cut), 2)]

    scores = scored(rows, keys)
    for size in _LEVELS:
        since, to_end = _of_level(decays, size)
        found = scored([[x * y for x, y in zip(each, since, strict=True)] for each in rows],
                       [x * y for x, y in zip(keys, to_end, strict=True)])  # fmt: skip
        is_level = (differ >= size) & (differ < 2 * size)
        scores = [jnp.where(is_level, new, old) for new, old in zip(found, scores, strict=True)]
    since, to_end = _of_level(decays, CHUNK)
    moved = [[x * y for x, y in zip(each, since, strict=True)] for each in rows]
    return Factors(
        [scores], moved[0], moved[1] if plan.beta else [],
        [x * y for x, y in zip(keys, to_end, strict=True)], [x[CHUNK - 1 :] for x in since],
    )  # fmt: skip


def _of_level(decays: list[jax.Array], size: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """The decays from the start of each token's block of ``size`` up to the token, and after it up to its end."""
    row, column = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    same = _block(row, size) == _block(column, size)
    masks = same & (column <= row), same & (column > row)
    since, to_end = ([jnp.exp(_summed(jnp.where(mask, 1.0, 0.0), x, _PARTS)) for x in decays] for mask in masks)
    return since, to_end
