"""The arrays of a call, as the kernel of many tokens reads them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.typing import DType
from attnops_linear.gates import before, cumulative, product
from attnops_tpu.linear.plan import LinearPlan
from attnops_tpu.linear.products import parts

# Tokens of a chunk; sums of decays are exact over so many.
CHUNK: Final = 64
# The values of each token that the kernel copies along lanes: of both heads of a pair side by side, and of each.
OF_PAIR: Final = ("coarse", "fine", "resets")
OF_HEAD: Final = ("kept", "beta", "to_end")
# The rows of `Arrays.rows`, and how many there are. The last two are of the heads of a pair.
ROWS: Final = ("coarse", "fine", "resets", "beta", "whole", "whole")
GATES: Final = 8
_PARTS: Final = 3


class Arrays(NamedTuple):
    """Of a call in N chunks of C tokens; head dims are padded to D and Dv, multiples of 128.

    A grid step computes h heads, in p pairs; a pair may lack its second head. The sums are those of
    `attnops_linear.gates.Sums`. The products of decays are "kept" from the chunk's start up to the token, "to_end" from
    the token up to the chunk's end, and "whole" of the chunk.

    Attributes:
        query: [B, N · C, K · D].
        key: [B, N · C, K · D].
        value: [B, N · C, H · Dv].
        rows: [B, H / h, N, 8, p · 2 · C] float32, values of the tokens of each pair's heads side by side.
        columns: [B, H / h, N, 48, p · C] bfloat16, three parts of 8 values for each of both heads.
        state: [B, H, D, Dv] float32.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    rows: jax.Array
    columns: jax.Array
    state: jax.Array


def arrays(
    plan: LinearPlan, query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array | None,
    beta: jax.Array | None, initial_state: jax.Array | None, mask: Any,
) -> Arrays:  # fmt: skip
    """The arrays of a call, see `attnops_linear.LinearAttention.forward_native`. Padding is 0."""
    is_token, starts = (None, None) if mask is None else mask
    (B, T), H = query.shape[:2], value.shape[2]
    N, pairs = -(-T // CHUNK), -(-plan.heads // 2)
    dtype = jnp.result_type(query, key, value)

    def of_heads(x: jax.Array | None) -> jax.Array:
        """[B, H, N, C, 1] float32, of an array [H], [B, T, H] or [B, T, 1]; 0 for None."""
        x = jnp.zeros((B, T, 1), jnp.float32) if x is None else jnp.broadcast_to(x, (B, T, x.shape[-1]))
        x = jnp.pad(zeroed(x, is_token), ((0, 0), (0, N * CHUNK - T), (0, 0))).astype(jnp.float32)
        x = jnp.moveaxis(x, 2, 1).reshape(B, x.shape[2], N, CHUNK, 1)
        return jnp.broadcast_to(x, (B, H, N, CHUNK, 1))

    def of_pairs(x: jax.Array) -> jax.Array:
        """[B, H / h, N, 2, p, C]."""
        x = jnp.broadcast_to(x, (B, H, N, CHUNK, 1)).reshape(B, H // plan.heads, plan.heads, N, CHUNK)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, plan.heads % 2), (0, 0), (0, 0)))
        return jnp.transpose(x.reshape(B, -1, pairs, 2, N, CHUNK), (0, 1, 4, 3, 2, 5))

    sums = cumulative(of_heads(decay), None if starts is None else of_heads(starts[:, :, None]) > 0)
    end, start = sums.tokens(CHUNK - 1, CHUNK), before(sums, 0)
    values = {
        "coarse": sums.coarse, "fine": sums.fine, "resets": sums.resets.astype(jnp.float32), "beta": of_heads(beta),
        "kept": product(sums, start), "to_end": product(end, sums), "whole": product(end, start),
    }  # fmt: skip
    by_pair = {name: of_pairs(x) for name, x in values.items()}
    rows = [jnp.swapaxes(by_pair[name], 3, 4).reshape(B, -1, N, 1, pairs * 2 * CHUNK) for name in ROWS[:-2]]
    rows += [jnp.repeat(by_pair["whole"][:, :, :, i], 2, axis=-1).reshape(rows[0].shape) for i in range(2)]
    columns = jnp.stack([by_pair[name] for name in OF_PAIR + OF_HEAD], axis=4)
    columns = jnp.pad(columns, (*[(0, 0)] * 4, (0, GATES - columns.shape[4]), (0, 0), (0, 0)))
    columns = columns.reshape(B, -1, N, 2 * GATES, pairs * CHUNK)
    return Arrays(
        of_tokens(query, plan.D, is_token, dtype), of_tokens(key, plan.D, is_token, dtype),
        of_tokens(value, plan.Dv, is_token, dtype),
        jnp.pad(jnp.concatenate(rows, axis=3), (*[(0, 0)] * 3, (0, GATES - len(rows)), (0, 0))),
        jnp.concatenate(parts(columns, _PARTS), axis=3),
        padded_state(plan, initial_state, B, H),
    )  # fmt: skip


def copies() -> jax.Array:
    """[48, 9 · 128] bfloat16, by which a product copies `Arrays.columns` to the lanes: 1 where a lane has a value."""
    head, gate, second = np.arange(2)[:, None, None], np.arange(GATES)[:, None], np.arange(2 * CHUNK) >= CHUNK
    blocks = [(gate == i) & (head == second) for i in range(len(OF_PAIR))]
    for i in range(len(OF_HEAD)):
        blocks += [(gate == len(OF_PAIR) + i) & (head == one) & (second >= 0) for one in range(2)]
    found = np.concatenate(np.broadcast_arrays(*blocks), axis=-1).reshape(2 * GATES, -1)
    return jnp.asarray(np.tile(found, (_PARTS, 1)), jnp.bfloat16)


def of_tokens(x: jax.Array, width: int, is_token: jax.Array | None, dtype: DType) -> jax.Array:
    """[B, N · C, heads · width] of an array [B, T, heads, last]."""
    B, T = x.shape[:2]
    x = jnp.pad(zeroed(x, is_token), ((0, 0), (0, -T % CHUNK), (0, 0), (0, width - x.shape[3])))
    return x.astype(dtype).reshape(B, T + -T % CHUNK, -1)


def zeroed(x: jax.Array, is_token: jax.Array | None) -> jax.Array:
    """An array [B, T, ...] with 0 for padding."""
    return x if is_token is None else jnp.where(is_token.reshape(*x.shape[:2], *[1] * (x.ndim - 2)), x, 0)


def of_batch(plan: LinearPlan, x: jax.Array) -> jax.Array:
    """``x`` with the rows of the batch; one that all slices of `jax.vmap` share has a single row."""
    return x if x.shape[0] == plan.B else jnp.broadcast_to(x, (plan.B, *x.shape[1:]))


def finished(plan: LinearPlan, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The results of a kernel; those of the interpreter outside of traces when they are there.

    It runs JAX programs of its own, which could wait for ever beside those that this thread would run meanwhile.
    """
    if plan.interpret and not any(isinstance(x, jax.core.Tracer) for x in results):
        jax.block_until_ready(results)
    return results


def padded_state(plan: LinearPlan, state: jax.Array | None, B: int, H: int) -> jax.Array:
    """The first state, [B, H, D, Dv] float32 with padded head dims."""
    if state is None:
        return jnp.zeros((B, H, plan.D, plan.Dv), jnp.float32)
    D, Dv = state.shape[2:]
    return jnp.pad(state, ((0, 0), (0, 0), (0, plan.D - D), (0, plan.Dv - Dv))).astype(jnp.float32)
