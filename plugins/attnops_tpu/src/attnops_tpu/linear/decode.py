"""The kernel of few tokens: token by token, with all arithmetic in float32 by the vector unit."""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.kernels import equally_varying, folds_batch, output_like
from attnops_tpu.linear.plan import LANES, LinearPlan, compiler_params
from attnops_tpu.linear.prepare import finished, of_batch, padded_state, zeroed
from attnops_tpu.linear.products import BY_COLUMNS, parts, product
from attnops_tpu.references import Input, Output, call_kernel

_PARTS: Final = 3


class Refs(NamedTuple):
    """The references of the kernel, of k key heads and h value heads of a row, and T tokens."""

    gates: Any  # [1, 1, 1, 2 · T · h] float32 in scalar memory: what is kept of the state, then rates
    channels: Any  # [1, 1, T · h, D] float32: what is kept of each row of the state; None for decays by head
    query: Any  # [1, 1, T · k, D] float32
    key: Any  # [1, 1, T · k, D] float32
    value: Any  # [1, 1, T · h, Dv] float32
    copies: Any  # [3 · k, k · 128] bfloat16, by which a product copies three parts of each of k columns to 128 lanes
    copies_of_heads: Any  # [3 · h, h · 128]; None for decays by head
    initial: Any  # [1, h, D, Dv]
    outputs: Any  # [1, 1, T · h, Dv] float32
    state: Any  # [1, h, D, Dv]


def decode(
    plan: LinearPlan, query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array | None,
    beta: jax.Array | None, initial_state: jax.Array | None, mask: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The outputs [B, T, H, Dv] and the last state [B, H, D, Dv], padded."""
    is_token, starts = (None, None) if mask is None else mask
    (B, T), H = query.shape[:2], value.shape[2]

    def of_steps(x: jax.Array, heads: int, width: int) -> jax.Array:
        """[B, steps, T · heads, width] of an array [B, T, all heads, last]."""
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), (0, 0), (0, width - x.shape[3])))
        return jnp.moveaxis(x.reshape(B, T, -1, heads, width), 2, 1).reshape(B, -1, T * heads, width)

    def of_heads(x: jax.Array | None, otherwise: float) -> jax.Array:
        x = jnp.broadcast_to(jnp.asarray(otherwise if x is None else x, jnp.float32), (B, T, H))
        return zeroed(x, is_token)[..., None]

    query, key, value = (zeroed(x, is_token) for x in (query, key, value))
    by_channel = decay is not None and decay.ndim == 4
    kept = jnp.exp(zeroed(decay, is_token) if by_channel else of_heads(decay, 0.0))  # type: ignore[arg-type]
    kept = kept if starts is None else jnp.where(starts[:, :, None, None], 0.0, kept)
    gates = [of_steps(x, plan.heads, 1) for x in (kept[..., :1], of_heads(beta, 1.0))]
    results = _call(
        plan, jnp.swapaxes(jnp.concatenate(gates, axis=2), 2, 3),
        of_steps(kept, plan.heads, plan.D) if by_channel else None, of_steps(query, plan.keys, plan.D),
        of_steps(key, plan.keys, plan.D), of_steps(value, plan.heads, plan.Dv),
        padded_state(plan, initial_state, B, H),
    )  # fmt: skip
    outputs, last = finished(plan, results)
    outputs = jnp.moveaxis(outputs.reshape(B, -1, T, plan.heads, plan.Dv), 1, 2)
    return outputs.reshape(B, T, H, plan.Dv).astype(plan.dtype), last


@folds_batch
def _call(plan: LinearPlan, *given: Any) -> tuple[jax.Array, jax.Array]:
    """The outputs, as values are, and the last state, of the arrays of `Refs`, without copies."""
    copies = [
        jnp.tile(jnp.repeat(jnp.eye(count, dtype=jnp.bfloat16), LANES, axis=1), (_PARTS, 1))
        for count in (plan.keys, plan.heads)
    ]
    arrays: Any = [None if x is None else of_batch(plan, x) for x in given]
    (gates, channels, query, key, value, state), copies = equally_varying((arrays, copies))
    steps, T = gates.shape[1], value.shape[2] // plan.heads
    # How many steps in turn have the same key head.
    same = steps // query.shape[1]

    def block(x: jax.Array, shared: int = 1, **options: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *x.shape[2:]), lambda b, h: (b, lax.div(h, jnp.int32(shared)), 0, 0), **options)

    def whole(x: jax.Array) -> Input:
        return Input(x, pl.BlockSpec(x.shape, lambda b, h: (0, 0)))

    initial = Input(state, pl.BlockSpec((1, plan.heads, plan.D, plan.Dv), lambda b, h: (b, h, 0, 0)))
    refs = Refs(
        Input(gates, block(gates, memory_space=pltpu.SMEM)),
        None if channels is None else Input(channels, block(channels)),
        Input(query, block(query, same)),
        Input(key, block(key, same)),
        Input(value, block(value)),
        whole(copies[0]),
        None if channels is None else whole(copies[1]),
        initial,
        Output(output_like(state, value.shape, state.dtype), block(value)),
        Output(output_like(state, state.shape, state.dtype), initial.spec, over=initial),
    )
    outputs, last = call_kernel(
        functools.partial(_kernel, plan, T), refs, "linear_attention_decode", grid=(plan.B, steps),
        params=compiler_params(plan, refs, 2), interpret=plan.interpret,
    )  # fmt: skip
    return outputs, last


def _kernel(plan: LinearPlan, T: int, refs: Refs) -> None:
    """The tokens of some heads of a row."""
    # The queries of a token, and below them the keys; what is kept of a head's state.
    columns = [_columns((refs.query, refs.key), refs.copies, t, plan.keys) for t in range(T)]
    by_channel = refs.channels is not None
    channels = [_columns((refs.channels,), refs.copies_of_heads, t, plan.heads) for t in range(T) if by_channel]

    def wide(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x] * (plan.Dv // LANES), axis=1)

    for head in range(plan.heads):
        state = refs.initial[0, head]
        lanes = _part(head * plan.keys // plan.heads, LANES)
        for t, column in enumerate(columns):
            row = t * plan.heads + head
            query, key = (wide(column[_part(i, plan.D), lanes]) for i in range(2))
            kept = wide(channels[t][:, _part(head, LANES)]) if by_channel else refs.gates[0, 0, 0, row]
            value = refs.value[0, 0, row : row + 1]
            state = jnp.where(kept == 0, 0.0, state * kept)
            if plan.beta:
                rate = refs.gates[0, 0, 0, T * plan.heads + row]
                value = rate * (value - jnp.sum(state * key, axis=0, keepdims=True))
            state = state + key * value
            refs.outputs[0, 0, row : row + 1] = plan.scale * jnp.sum(state * query, axis=0, keepdims=True)
        refs.state[0, head] = state


def _columns(arrays: tuple[Any, ...], copies: Any, t: int, heads: int) -> jax.Array:
    """[n · D, heads · 128]: n arrays of a token, one below the other, those of a head in each of 128 lanes."""
    rows = jnp.concatenate([x[0, 0, _part(t, heads)] for x in arrays], axis=1)
    stacked = jnp.concatenate([x.astype(jnp.float32) for x in parts(rows, _PARTS)], axis=0).astype(jnp.bfloat16)
    return product([stacked], [copies[...]], 1, BY_COLUMNS)


def _part(i: int, width: int) -> slice:
    return slice(i * width, (i + 1) * width)
