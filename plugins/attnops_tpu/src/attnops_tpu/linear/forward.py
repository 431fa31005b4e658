"""The forward kernel: chunk by chunk, with the state of each head in vector memory."""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops import OperationMetadata
from attnops_linear import LinearOutput
from attnops_tpu.generations import bounds_checks, generation
from attnops_tpu.linear.inverse import inverse
from attnops_tpu.linear.prepare import (
    BETA, CHUNK, COARSE, FINE, GATES, KEPT, RESETS, TO_END, WHOLE, Arrays, arrays, heads_of_step,
)  # fmt: skip
from attnops_tpu.references import Input, Output, call_kernel, needed

# Value heads of a grid step.
_HEADS: Final = 4


class Refs(NamedTuple):
    """The references of the kernel, of k key heads and h value heads, and the C tokens of a chunk."""

    query: Any  # [1, C, k · D]
    key: Any  # [1, C, k · D]
    value: Any  # [1, C, h · Dv]
    gates: Any  # [1, h, 1, 8, C]
    initial: Any  # [1, h, D, Dv]
    outputs: Any  # [1, C, h · Dv]
    state: Any  # [1, h, D, Dv]


class Plan(NamedTuple):
    """What is static.

    Attributes:
        keys: key heads of a grid step.
        heads: value heads of a grid step.
        D: of keys, padded.
        Dv: of values, padded.
        scale: of queries.
        beta: whether it is the delta rule.
        precision: of products.
    """

    keys: int
    heads: int
    D: int
    Dv: int
    scale: float
    beta: bool
    precision: lax.Precision


def forward(
    metadata: OperationMetadata, query: jax.Array, key: jax.Array, value: jax.Array, *,
    decay: jax.Array | None = None, beta: jax.Array | None = None, scale: float | None = None,
    initial_state: jax.Array | None = None, mask: Any = None, return_state: bool = False,
) -> LinearOutput:  # fmt: skip
    """See `attnops_linear.LinearAttention.forward_native`."""
    (B, T, K, D), (H, Dv) = query.shape, value.shape[2:]
    given = arrays(query, key, value, decay, beta, initial_state, mask)
    keys, heads = heads_of_step(K, H, _HEADS)
    plan = Plan(
        keys, heads, *given.state.shape[2:], D**-0.5 if scale is None else scale, beta is not None,
        lax.Precision.HIGHEST if metadata.precision is None else metadata.precision,
    )  # fmt: skip
    outputs, state = _call(plan, given, query.dtype, metadata.interpret)
    outputs = outputs.reshape(B, -1, H, plan.Dv)[:, :T, :, :Dv]
    if mask is not None and mask.is_token is not None:
        outputs = jnp.where(mask.is_token[:, :, None, None], outputs, 0)
    return LinearOutput(outputs, state[:, :, :D, :Dv] if return_state else None)


def _call(plan: Plan, given: Arrays, dtype: Any, interpret: bool) -> tuple[jax.Array, ...]:
    """The outputs [B, N · C, H · Dv] and the last state [B, H, D, Dv]."""
    B, H, N = given.gates.shape[:3]
    ratio = H // (given.key.shape[2] // plan.D)  # value heads of a key head
    chunk, keys, heads = CHUNK, plan.keys, plan.heads

    def of_keys(b: Any, h: Any, n: Any) -> tuple[Any, ...]:
        return b, n, h * heads // (ratio * keys)

    state = pl.BlockSpec((1, heads, plan.D, plan.Dv), lambda b, h, n: (b, h, 0, 0))
    values = pl.BlockSpec((1, chunk, heads * plan.Dv), lambda b, h, n: (b, n, h))
    refs = Refs(
        Input(given.query, pl.BlockSpec((1, chunk, keys * plan.D), of_keys)),
        Input(given.key, pl.BlockSpec((1, chunk, keys * plan.D), of_keys)),
        Input(given.value, values),
        Input(given.gates, pl.BlockSpec((1, heads, 1, GATES, chunk), lambda b, h, n: (b, h, n, 0, 0))),
        Input(given.state, state),
        Output(jax.ShapeDtypeStruct(given.value.shape, dtype), values),
        Output(jax.ShapeDtypeStruct(given.state.shape, jnp.float32), state),
    )
    parallel, arbitrary = pltpu.GridDimensionSemantics.PARALLEL, pltpu.GridDimensionSemantics.ARBITRARY
    params = pltpu.CompilerParams(
        dimension_semantics=(parallel, parallel, arbitrary),
        vmem_limit_bytes=min(generation().vmem, needed(refs, generation().sublanes) + (12 << 20)),
        disable_bounds_checks=not bounds_checks(),
    )
    outputs, last = call_kernel(
        functools.partial(_kernel, plan), refs, "linear_attention", grid=(B, H // heads, N), params=params,
        interpret=interpret,
    )  # fmt: skip
    return outputs, last


def _kernel(plan: Plan, refs: Refs) -> None:
    """A chunk of some heads."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        refs.state[...] = refs.initial[...]

    dot = functools.partial(lax.dot_general, precision=plan.precision, preferred_element_type=jnp.float32)
    rows, columns = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    for head in range(plan.heads):
        i, of_value = head * plan.keys // plan.heads, slice(head * plan.Dv, (head + 1) * plan.Dv)
        of_key = slice(i * plan.D, (i + 1) * plan.D)
        query, key = refs.query[0, :, of_key].astype(jnp.float32), refs.key[0, :, of_key].astype(jnp.float32)
        value = refs.value[0, :, of_value].astype(jnp.float32)
        state = refs.state[0, head]
        gates = refs.gates[0, head, 0]
        tokens = gates.T
        row, column = (lambda i, gates=gates: gates[i : i + 1]), (lambda i, tokens=tokens: tokens[:, i : i + 1])
        logarithm = (column(COARSE) - row(COARSE)) + (column(FINE) - row(FINE))
        keeps = (column(RESETS) == row(RESETS)) & (rows >= columns)
        decays = jnp.exp(jnp.where(keeps, logarithm, -jnp.inf))
        transposed = (((1,), (1,)), ((), ()))
        plain = (((1,), (0,)), ((), ()))
        past = dot(query, state, plain) * column(KEPT)
        scores = dot(query, key, transposed) * decays
        if plan.beta:
            strict = jnp.where(rows > columns, dot(key, key, transposed) * decays, 0.0) * column(BETA)
            target = column(BETA) * (value - dot(key, state, plain) * column(KEPT))
            value = dot(inverse(strict, dot), target, plain)
        outputs = past + dot(scores, value, plain)
        refs.outputs[0, :, of_value] = (outputs * plan.scale).astype(refs.outputs.dtype)
        added = dot(key, value * column(TO_END), (((0,), (0,)), ((), ())))
        refs.state[0, head] = gates[WHOLE : WHOLE + 1, :1] * state + added
