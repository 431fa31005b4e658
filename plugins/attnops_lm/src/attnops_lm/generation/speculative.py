"""Prompt lookup: tokens drafted from an earlier place of the same row (Saxena 2023, "Prompt Lookup Decoding")."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def look_up(tokens: jax.Array, lengths: jax.Array, count: int, largest: int) -> tuple[jax.Array, jax.Array]:
    """Drafts: the tokens that followed an earlier occurrence of each row's last tokens, and their number.

    The longest suffix of at most ``largest`` tokens that occurs earlier is used. If it occurs several times, the last
    place with ``count`` tokens after it is used, or else the first place.

    Args:
        tokens: int32 [B, S]; negative ones match nothing.
        lengths: the lengths of the rows, int32 [B].
        count: g, the most drafts.
        largest: the most last tokens that are compared.

    Returns:
        Drafts int32 [B, g], and their number int32 [B].
    """
    S = tokens.shape[1]
    index = jnp.arange(S)
    # run[b, j]: the number of tokens directly before place j that equal the row's last tokens.
    same = jnp.ones(tokens.shape, bool)
    run = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(1, largest + 1):
        end = jnp.take_along_axis(tokens, jnp.maximum(lengths - back, 0)[:, None], axis=1)
        earlier = jnp.roll(tokens, back, axis=1)
        same &= (earlier == end) & (earlier >= 0) & (index >= back) & (lengths[:, None] >= back)
        run += same
    after = lengths[:, None] - index  # tokens from place j to the row's end
    run = jnp.where(after > 0, run, 0)
    best = run.max(axis=1, keepdims=True)
    full = jnp.where((run == best) & (after >= count), index, -1).max(axis=1)
    start = jnp.where(full >= 0, full, (run == best).argmax(axis=1))
    counts = jnp.where(best[:, 0] > 0, jnp.minimum(lengths - start, count), 0)
    place = jnp.minimum(start[:, None] + jnp.arange(count), S - 1)
    return jnp.take_along_axis(tokens, place, axis=1), counts.astype(jnp.int32)


def accepted(drafts: jax.Array, counts: jax.Array, picked: jax.Array) -> jax.Array:
    """The number of the first ``counts[b]`` drafts before one that differs from the picked token, int32 [B]."""
    right = (drafts == picked[:, : drafts.shape[1]]) & (jnp.arange(drafts.shape[1]) < counts[:, None])
    return jnp.cumprod(right, axis=1).sum(axis=1).astype(jnp.int32)
