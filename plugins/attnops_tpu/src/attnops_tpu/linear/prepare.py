"""The arrays of a call, as the kernels read them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from attnops_linear.gates import before, cumulative, product

LANES: Final = 128
# Tokens of a chunk; sums of decays are exact over so many.
CHUNK: Final = 64
# The rows of `Arrays.gates`.
COARSE, FINE, RESETS, BETA, KEPT, TO_END, WHOLE = range(7)
GATES: Final = 8


class Arrays(NamedTuple):
    """Of a call in N chunks of C tokens; head dims are padded to D and Dv, multiples of 128.

    Attributes:
        query: [B, N · C, K · D].
        key: [B, N · C, K · D].
        value: [B, N · C, H · Dv].
        gates: [B, H, N, 8, C] float32, values of each token by head: the sums of `attnops_linear.gates.Sums`, the rate
            of the delta rule, and the products of decays from the chunk's start up to the token, from it up to the
            chunk's end, and of the whole chunk.
        state: [B, H, D, Dv] float32.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    gates: jax.Array
    state: jax.Array


def arrays(
    query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array | None, beta: jax.Array | None,
    initial_state: jax.Array | None, mask: Any,
) -> Arrays:  # fmt: skip
    """The arrays of a call, see `attnops_linear.LinearAttention.forward_native`. Padding is 0."""
    is_token, starts = (None, None) if mask is None else mask
    (B, T, _, D), (H, Dv) = query.shape, value.shape[2:]
    Dp, Dvp = (-(-n // LANES) * LANES for n in (D, Dv))
    N = -(-T // CHUNK)
    dtype = jnp.result_type(query, key, value)

    def of_tokens(x: jax.Array, width: int) -> jax.Array:
        if is_token is not None:
            x = jnp.where(is_token[:, :, None, None], x, 0)
        x = jnp.pad(x, ((0, 0), (0, N * CHUNK - T), (0, 0), (0, width - x.shape[3])))
        return x.astype(dtype).reshape(B, N * CHUNK, -1)

    def of_heads(x: jax.Array | None, default: float = 0.0) -> jax.Array:
        """[B, H, N, C, 1] float32, of an array [H], [B, T, H] or [B, T, 1]."""
        x = jnp.full((B, T, 1), default) if x is None else jnp.broadcast_to(x, (B, T, x.shape[-1]))
        if is_token is not None:
            x = jnp.where(is_token[:, :, None], x, 0)
        x = jnp.pad(x, ((0, 0), (0, N * CHUNK - T), (0, 0))).astype(jnp.float32)
        x = jnp.moveaxis(x, 2, 1).reshape(B, x.shape[2], N, CHUNK, 1)
        return jnp.broadcast_to(x, (B, H, N, CHUNK, 1))

    sums = cumulative(of_heads(decay), None if starts is None else of_heads(starts[:, :, None]) > 0)
    end, start = sums.tokens(CHUNK - 1, CHUNK), before(sums, 0)
    rows = [
        sums.coarse, sums.fine, sums.resets.astype(jnp.float32), of_heads(beta),
        product(sums, start), product(end, sums), product(end, start),
    ]  # fmt: skip
    gates = jnp.concatenate([jnp.broadcast_to(x, rows[0].shape) for x in (*rows, rows[0])], axis=-1)
    state = jnp.zeros((B, H, D, Dv)) if initial_state is None else initial_state
    state = jnp.pad(state, ((0, 0), (0, 0), (0, Dp - D), (0, Dvp - Dv)))
    return Arrays(
        of_tokens(query, Dp), of_tokens(key, Dp), of_tokens(value, Dvp), jnp.swapaxes(gates, -1, -2),
        state.astype(jnp.float32),
    )  # fmt: skip


def heads_of_step(K: int, H: int, most: int) -> tuple[int, int]:
    """The key heads and value heads that a grid step computes, at most so many value heads."""
    R = H // K
    if R > most:
        return 1, max(n for n in range(1, most + 1) if R % n == 0)
    keys = max(n for n in range(1, K + 1) if K % n == 0 and n * R <= most)
    return keys, keys * R
