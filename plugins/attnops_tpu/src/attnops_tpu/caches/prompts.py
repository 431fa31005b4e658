"""New tokens of rows with several tiles of queries, such as prompts: the first grid step writes all of them, and waits
until they are in main memory, before any key is read.

They are written in *chunks* of consecutive slots of a block, several of which are transferred at a time. The array of
new tokens begins anywhere in a group of slots, so the tokens of a chunk are moved to the slots that they have in the
cache. A chunk's other slots are read, and written as they were: only this row has them, since pages that rows share are
full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops_caches import NewTokens
from attnops_tpu.caches.new_tokens import group_of, groups_of
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.tile_sizes import LANES

# The most bytes of a chunk, and of all chunks that are being transferred.
_CHUNK: Final = 256 << 10
_PENDING: Final = 2 << 20
# The most chunks of a call, of which each has six numbers in scalar memory.
MAX_CHUNKS: Final = 10_000


class Prompts(NamedTuple):
    """What a call writes: arrays, or references to them. All but ``tokens`` are in scalar memory."""

    count: Any  # how many chunks there are, int32 [1]; the following are int32 [chunks] each
    batch: Any  # the row of ``tokens``
    token: Any  # the token that belongs to a chunk's first slot; negative if that is before the first token
    first: Any  # the first slot of a chunk that has a new token
    stop: Any  # the slot after the last
    block: Any  # the block of a chunk
    slot: Any  # the chunk's first slot in its block
    # tokens as they are stored [rows, K, n, d], and scales [rows, K, n]; packed rows are one; n is whole groups, and at
    # least those of a transfer
    tokens: tuple[Any, ...]


class Sizes(NamedTuple):
    """Sizes of what is written."""

    chunk: int  # slots per chunk
    groups: tuple[int, ...]  # slots per group of each array
    buffers: int  # chunks that are being transferred


def bytes_of_token(K: int, elements: Sequence[int], itemsize: int, scales: int) -> int:
    """Bytes of a token as vector memory holds it, of K heads: arrays of so many elements per head, and scales."""
    return K * (sum(-(-n // LANES) * LANES for n in elements) * itemsize + 4 * scales)


def chunk_of(unit: int, group: int, token_bytes: int) -> int:
    """Slots per chunk: a unit, or a part of it that is whole groups; ``token_bytes``: see `bytes_of_token`."""
    chunk = unit
    while chunk * token_bytes > _CHUNK and chunk % (2 * group) == 0:
        chunk //= 2
    return chunk


def most_chunks(T: int, rows: int, is_packed: bool, chunk: int) -> int:
    """The most chunks of T new tokens of each row, or, of packed rows, of all."""
    return T // chunk + 2 * min(rows, T) if is_packed else rows * groups_of(T, chunk)


def sizes(plan: CachePlan, arrays: Sequence[jax.Array]) -> Sizes:
    """The sizes for the arrays of a cache."""
    groups = tuple(
        group_of(i >= plan.token_arrays, x.dtype.itemsize, plan.unit, plan.sublanes) for i, x in enumerate(arrays)
    )
    elements = [x.shape[3] for x in arrays[: plan.token_arrays]]
    token_bytes = bytes_of_token(plan.K, elements, arrays[0].dtype.itemsize, len(arrays) - plan.token_arrays)
    chunk = chunk_of(plan.unit, max(groups), token_bytes)
    return Sizes(chunk, groups, min(max(_PENDING // (chunk * token_bytes), 4), 16))


def prompts(plan: CachePlan, new: NewTokens, base: jax.Array | int, blocks: Mapping[str, jax.Array]) -> Prompts:
    """What a call writes; the arguments are those of `attnops_tpu.caches.new_tokens.written`."""
    chunk, groups, _ = sizes(plan, list(blocks.values()))
    tokens = []
    for (name, array), group in zip(blocks.items(), groups, strict=True):
        x = lax.bitcast_convert_type(new.tokens[name], array.dtype)
        n = max(x.shape[2] + -x.shape[2] % group, chunk + group)
        tokens.append(jnp.pad(x, [(0, 0), (0, 0), (0, n - x.shape[2]), (0, 0)][: x.ndim]))
    T, rows, is_packed = new.tokens["key"].shape[2], new.first.shape[0], new.starts is not None
    stop = new.first + new.size
    each = jnp.where(new.size > 0, -(-stop // chunk) - new.first // chunk, 0)
    ends = jnp.cumsum(each, dtype=jnp.int32)
    index = jnp.arange(most_chunks(T, rows, is_packed, chunk), dtype=jnp.int32)
    row = jnp.minimum((ends <= index[:, None]).sum(1, dtype=jnp.int32), rows - 1)
    first = new.first[row]
    begin = (index - (ends - each)[row] + first // chunk) * chunk  # continues beyond a ring's end
    place = begin // plan.unit - first // plan.unit if plan.is_paged else jnp.zeros_like(begin)
    return Prompts(
        count=ends[-1:],
        batch=jnp.zeros_like(row) if is_packed else row,
        token=begin - first + (0 if new.starts is None else new.starts[row]),
        first=jnp.maximum(first - begin, 0),
        stop=jnp.minimum(stop[row] - begin, chunk),
        block=(new.blocks + base)[row, jnp.clip(place, 0, new.blocks.shape[1] - 1)].astype(jnp.int32),
        slot=begin % (plan.unit if plan.is_paged else plan.S),
        tokens=tuple(tokens),
    )


def words_of(new: Prompts | None) -> int:
    """The words of 32 bits that a call has in scalar memory."""
    return 0 if new is None else sum(x.size for x in new[:-1])
