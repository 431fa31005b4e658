"""Caches for a call of `generate`: room for the prompt and for all that may be generated."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from attnops_caches import Cache, PagedCache, PagePool, WindowCache
from attnops_lm.caching import LayerCache, counted, with_table
from attnops_lm.generation.config import GenerationConfig
from attnops_lm.generation.prompt import chunk_size

DEFAULT_PAGE_SIZE = 16


class Room(NamedTuple):
    """The caches for a call, and their sizes.

    Attributes:
        caches: one per layer, with room for at least the prompt and what may be generated.
        pool: for a beam search over pages, a pool of 2 · B · k rows; else None.
        used: tokens that are in the caches already, int32 [B].
        length: S of the array [B, S] of all tokens, tokens in the caches included.
        max_append: the most tokens that can be appended to every cache at a time; None for no limit.
    """

    caches: tuple[LayerCache, ...]
    pool: PagePool | None
    used: np.ndarray
    length: int
    max_append: int | None


def make_room(
    model: Any,
    config: GenerationConfig,
    starts: np.ndarray,
    lengths: np.ndarray,
    most: int,
    given: tuple[LayerCache, ...] | None,
    step: int,
    chunk: int | None,
) -> Room:
    """Create caches with enough room, or check the caller's.

    Args:
        model: makes the caches.
        config: which kind of caches.
        starts: tokens of left padding, int32 [B].
        lengths: the lengths of the prompts, int32 [B].
        most: the most tokens generated per row.
        given: the caller's caches.
        step: tokens that a step appends at a time.
        chunk: tokens of the prompt that are appended at a time; None if the caller does not set it.

    Raises:
        ValueError: the caller's caches have too little room, or the tokens are more than the model's context.
    """
    if given is not None:
        if len(given) != model.config.num_layers:
            raise ValueError(f"{len(given)} caches given, but the model has {model.config.num_layers} layers")
        room = _checked(given, lengths, most, step)
        _check_context(model.config, lengths, room.used - np.asarray(counted(given).starts), most)
        return room
    _check_context(model.config, lengths - starts, np.zeros_like(lengths), most)
    S = rounded(int(lengths.max()) + most)
    used = np.zeros(len(lengths), np.int32)
    if config.cache_implementation == "paged":
        return _paged(model, config, starts, lengths, most, S)
    options = {}
    if config.cache_implementation == "sliding_window":
        options["max_append"] = max(chunk_size(chunk, int(lengths.max()) - 1, None), step)
    caches = model.init_cache(len(lengths), S, starts=starts, **options)
    return Room(caches, None, used, S, options.get("max_append"))


def _check_context(config: Any, tokens: np.ndarray, used: np.ndarray, most: int) -> None:
    """Raise if a row, including the tokens in the caller's caches, would exceed the model's context."""
    context = config.max_position_embeddings
    longest = int((tokens + used).max())
    if longest + most > context:
        held = f"{longest} tokens" + (", those in past_key_values included," if used.any() else "")
        raise ValueError(
            f"a prompt of {held} and max_new_tokens={most} are {longest + most}, but must be at most the model's "
            f"context, {context}: {_advice(context - longest)}"
        )


def _advice(room: int) -> str:
    return f"ask for at most {room} new ones, or shorten the prompt" if room > 0 else "shorten the prompt"


def rounded(length: int) -> int:
    """The length rounded up to a power of two, above 1,024 to a multiple of 1,024, so that calls share programs."""
    return max(16, 1 << (length - 1).bit_length()) if length <= 1024 else -(-length // 1024) * 1024


def _paged(model: Any, config: GenerationConfig, starts: np.ndarray, lengths: np.ndarray, most: int, S: int) -> Room:
    B, k, page = len(lengths), config.num_beams, config.page_size or DEFAULT_PAGE_SIZE
    if k > 1 and model.config.has_linear_layers:
        raise ValueError(
            f"num_beams={k} and cache_implementation='paged', but beams can't share the states of linear layers by "
            f"page: set cache_implementation='static'"
        )
    pages = B * math.ceil(S / page)
    if k > 1:
        # Beams share the full pages of the prompt; a fork copies one page of each beam.
        shared = int((np.maximum(lengths - 1, 0) // page).min())
        pages = B * shared + B * k * (math.ceil(S / page) - shared + 1)
    caches, _ = model.init_ragged_pages(page_size=page, max_model_length=S, batch_size=B, pages=pages)
    rows = B if k == 1 else 2 * B * k
    pool = PagePool.create(pages=pages, page_size=page, rows=rows, max_pages=math.ceil(S / page))
    wanted = np.zeros(rows, np.int32)
    wanted[: B * k : k] = lengths - 1 if k > 1 else lengths + most
    pool = pool.reserve(wanted)
    caches = tuple(
        dataclasses.replace(cache, starts=jnp.asarray(starts) + 0) if isinstance(cache, PagedCache) else cache
        for cache in with_table(caches, pool.table[: B * k : k])
    )
    return Room(caches, pool if k > 1 else None, np.zeros(B, np.int32), S, None)


def _checked(caches: tuple[LayerCache, ...], lengths: np.ndarray, most: int, step: int) -> Room:
    """The caller's caches, if they have room for all tokens."""
    first = counted(caches)
    if first.batch != len(lengths):
        raise ValueError(f"past_key_values have {first.batch} rows, but input_ids {len(lengths)}: one row each")
    used = np.asarray(first.lengths)
    needed = used + lengths + most - 1  # the last token is never appended
    for i, cache in enumerate(caches):
        if not isinstance(cache, Cache):
            continue  # a state has room for any number of tokens
        room, what = np.full(len(lengths), cache.length), "make it longer"
        if isinstance(cache, PagedCache):
            what = "give it the table of a pool that has reserved them"
            room = (np.cumprod(np.asarray(cache.table) >= 0, axis=1).sum(axis=1)) * cache.page_size
        short = np.flatnonzero(needed > room) if not cache.unbounded else ()
        for b in short:
            raise ValueError(
                f"past_key_values[{i}] has room for {room[b]} tokens in row {b}, but {used[b]} in it, {lengths[b]} of "
                f"the prompt and {most} - 1 generated ones are {needed[b]}: {what}, or generate fewer"
            )
        if isinstance(cache, WindowCache) and cache.max_append < step:
            raise ValueError(
                f"past_key_values[{i}] was created with max_append={cache.max_append}, but a step appends {step} "
                f"tokens, the last one and its drafts: create it with more, or set prompt_lookup_num_tokens to less"
            )
    windows = [cache.max_append for cache in caches if isinstance(cache, WindowCache)]
    return Room(tuple(caches), None, used, rounded(int(needed.max()) + 1), min(windows) if windows else None)
