"""Tokens of several rows of a cache in one packed row: `attnops_caches.Rows`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops.masks import KeyPadding, Segments
from attnops_caches.rows import check_rows

if TYPE_CHECKING:
    from attnops_linear.conv import CausalConv1d
    from attnops_linear.operation import LinearAttention
    from attnops_linear.state import StateCache

# Tokens of one row that are computed at a time.
PIECE: Final = 64


class Runs(NamedTuple):
    """The runs of packed tokens that are not empty, of R.

    Attributes:
        first: the index of each run's first token, int32 [R].
        counts: the tokens of each run, int32 [R]; 0 for one that has none, or no row of the cache.
        slots: the row of the cache of each run, int32 [R]; B, which is none, without tokens.
    """

    first: jax.Array
    counts: jax.Array
    slots: jax.Array

    def kept(self, old: jax.Array, new: jax.Array) -> jax.Array:
        """An array by row of the cache, [B, ...], with those of the runs, [R, ...]."""
        return old.at[self.slots].set(new.astype(old.dtype), mode="drop")


def without_masks(options: dict[str, Any]) -> dict[str, Any]:
    """The options that are given; a `ValueError` if another than rows says which tokens are of which row."""
    for name in ("query_lengths", "mask"):
        if options.get(name) is not None:
            raise ValueError(f"rows and {name} are given, but rows say which tokens are whose and which are padding")
    return {name: x for name, x in options.items() if x is not None}


def runs_of(rows: Any, x: jax.Array, batch: int) -> Runs:
    """The runs of the tokens of an array [1, N, ...].

    Raises:
        ValueError: ``rows`` are not those of N tokens, or there is more than a packed row.
    """
    if x.shape[0] != 1:
        raise ValueError(f"rows are given with {x.shape[0]} rows of tokens, but packed tokens have one: [1, N, ...]")
    N = x.shape[1]
    checked = check_rows(rows, N, batch)
    counts = checked.first_counts(N, batch)
    slots = jnp.where(counts > 0, jnp.asarray(checked.slots), batch)
    return Runs(jnp.clip(jnp.asarray(checked.starts), 0, N)[:-1], counts, slots)


def step_linear(
    operation: LinearAttention, arrays: tuple[Any, ...], cache: StateCache, rows: Any, options: dict[str, Any]
) -> tuple[jax.Array, StateCache]:
    """The outputs of packed tokens, [1, N, Hv, Dv], and the cache after them; see `LinearAttention.step`.

    The first tokens of all runs are a batch, so that a step of one token a row is one call; what follows of each run is
    computed `PIECE` tokens at a time, in a loop that has no more iterations than there are tokens for.
    """
    options = without_masks(options)
    call = operation.bind(*arrays, **options)
    runs = runs_of(rows, call.args[0], cache.lengths.shape[0])
    tokens = dict(zip(("query", "key", "value"), call.args, strict=True))
    tokens |= {name: call.options[name] for name in ("decay", "beta") if getattr(options.get(name), "ndim", 0) > 1}
    others = {name: x for name, x in options.items() if name not in tokens}
    query, value = call.args[0], call.args[2]
    N, lengths = query.shape[1], cache.lengths.at[runs.slots].add(runs.counts, mode="drop")
    outputs = jnp.zeros((1, N, *value.shape[2:]), query.dtype)
    if not N:
        return outputs, cache

    def compute(index: jax.Array, is_token: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The outputs [n, T, ...] of tokens, and the states after them."""
        given = {name: x[0, jnp.clip(index, 0, N - 1)] for name, x in tokens.items()}
        found = operation(**given, **others, mask=KeyPadding(is_token), initial_state=state, return_state=True)
        assert found.state is not None
        return found.attention_outputs, found.state

    states = cache.state.at[runs.slots].get(mode="clip")
    firsts, states = compute(runs.first[:, None], (runs.counts > 0)[:, None], states)
    outputs = outputs.at[0, jnp.where(runs.counts > 0, runs.first, N)].set(firsts[:, 0], mode="drop")
    size = min(PIECE, N)
    pieces = -(-jnp.maximum(runs.counts - 1, 0) // size)
    ends = jnp.cumsum(pieces)

    def add(carry: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
        piece, outputs, states = carry
        run = jnp.searchsorted(ends, piece, side="right")
        place = 1 + (piece - (ends - pieces)[run]) * size + jnp.arange(size)
        index, is_token = runs.first[run] + place, place < runs.counts[run]
        found, state = compute(index[None], is_token[None], lax.dynamic_slice_in_dim(states, run, 1))
        outputs = outputs.at[0, jnp.where(is_token, index, N)].set(found[0], mode="drop")
        return piece + 1, outputs, lax.dynamic_update_slice_in_dim(states, state, run, 0)

    _, outputs, states = lax.while_loop(lambda carry: carry[0] < ends[-1], add, (jnp.int32(0), outputs, states))
    return outputs, dataclasses.replace(cache, state=runs.kept(cache.state, states), lengths=lengths)


def step_conv(
    operation: CausalConv1d, x: Any, weight: Any, cache: StateCache, rows: Any, options: dict[str, Any]
) -> tuple[jax.Array, StateCache]:
    """The outputs of packed tokens, [1, N, C], and the cache after them; a run follows the last tokens of its row."""
    options = without_masks(options)
    call = operation.bind(x, weight, **options)
    x, weight = call.args
    assert cache.conv is not None
    runs = runs_of(rows, x, cache.lengths.shape[0])
    if cache.conv.shape[1:] != (weight.shape[1] - 1, x.shape[2]):
        raise ValueError(
            f"the cache's conv has shape {cache.conv.shape}, but must have [B, W - 1, C]=[B, {weight.shape[1] - 1}, "
            f"{x.shape[2]}]: create it with conv=({x.shape[2]}, {weight.shape[1]})"
        )
    N, (R,), W = x.shape[1], runs.counts.shape, weight.shape[1]
    bounds = runs.first + (W - 1) * jnp.arange(R, dtype=jnp.int32)  # of the tokens before each run
    before, taps = jnp.arange(N, dtype=jnp.int32), jnp.arange(W - 1, dtype=jnp.int32)
    run = jnp.searchsorted(runs.first, before, side="right").astype(jnp.int32)
    place = before + (W - 1) * run
    ids = jnp.searchsorted(bounds, jnp.arange(N + (W - 1) * R), side="right")
    is_token = (run > 0) & (before < (runs.first + runs.counts)[jnp.maximum(run - 1, 0)])
    full = jnp.zeros((N + (W - 1) * R, x.shape[2]), jnp.promote_types(x.dtype, cache.conv.dtype))
    full = full.at[place].set(jnp.where(is_token[:, None], x[0], 0).astype(full.dtype))
    full = full.at[bounds[:, None] + taps].set(cache.conv.at[runs.slots].get(mode="clip").astype(full.dtype))
    outputs = operation(full[None], weight, mask=Segments(ids), **options).outputs[:, place]
    last = full[(bounds + runs.counts)[:, None] + taps]
    outputs = jnp.where(is_token[None, :, None], outputs, 0).astype(x.dtype)
    return outputs, cache.with_conv(runs.kept(cache.conv, last))
