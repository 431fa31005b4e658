"""The arrays of a call, as the kernels read them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from attnops_linear.gates import before, cumulative, product
from attnops_tpu.linear.plan import LinearPlan

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
    plan: LinearPlan, query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array | None,
    beta: jax.Array | None, initial_state: jax.Array | None, mask: Any,
) -> Arrays:  # fmt: skip
    """The arrays of a call, see `attnops_linear.LinearAttention.forward_native`. Padding is 0."""
    is_token, starts = (None, None) if mask is None else mask
    (B, T), H = query.shape[:2], value.shape[2]
    N = -(-T // CHUNK)
    dtype = jnp.result_type(query, key, value)

    def of_tokens(x: jax.Array, width: int) -> jax.Array:
        x = jnp.pad(zeroed(x, is_token), ((0, 0), (0, N * CHUNK - T), (0, 0), (0, width - x.shape[3])))
        return x.astype(dtype).reshape(B, N * CHUNK, -1)

    def of_heads(x: jax.Array | None) -> jax.Array:
        """[B, H, N, C, 1] float32, of an array [H], [B, T, H] or [B, T, 1]; 0 for None."""
        x = jnp.zeros((B, T, 1)) if x is None else jnp.broadcast_to(x, (B, T, x.shape[-1]))
        x = jnp.pad(zeroed(x, is_token), ((0, 0), (0, N * CHUNK - T), (0, 0))).astype(jnp.float32)
        x = jnp.moveaxis(x, 2, 1).reshape(B, x.shape[2], N, CHUNK, 1)
        return jnp.broadcast_to(x, (B, H, N, CHUNK, 1))

    sums = cumulative(of_heads(decay), None if starts is None else of_heads(starts[:, :, None]) > 0)
    end, start = sums.tokens(CHUNK - 1, CHUNK), before(sums, 0)
    rows = [
        sums.coarse, sums.fine, sums.resets.astype(jnp.float32), of_heads(beta),
        product(sums, start), product(end, sums), product(end, start),
    ]  # fmt: skip
    gates = jnp.concatenate([jnp.broadcast_to(x, rows[0].shape) for x in (*rows, rows[0])], axis=-1)
    return Arrays(
        of_tokens(query, plan.D), of_tokens(key, plan.D), of_tokens(value, plan.Dv), jnp.swapaxes(gates, -1, -2),
        padded_state(plan, initial_state, B, H),
    )  # fmt: skip


def zeroed(x: jax.Array, is_token: jax.Array | None) -> jax.Array:
    """An array [B, T, ...] with 0 for padding."""
    return x if is_token is None else jnp.where(is_token.reshape(*x.shape[:2], *[1] * (x.ndim - 2)), x, 0)


def padded_state(plan: LinearPlan, state: jax.Array | None, B: int, H: int) -> jax.Array:
    """The first state, [B, H, D, Dv] float32 with padded head dims."""
    if state is None:
        return jnp.zeros((B, H, plan.D, plan.Dv))
    D, Dv = state.shape[2:]
    return jnp.pad(state, ((0, 0), (0, 0), (0, plan.D - D), (0, plan.Dv - Dv))).astype(jnp.float32)
