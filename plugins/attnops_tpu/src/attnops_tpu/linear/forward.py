"""The forward kernel: chunk by chunk, with the state of each head in vector memory."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attnops import OperationMetadata
from attnops_linear import LinearOutput
from attnops_linear.chunks import FEW
from attnops_tpu.linear.decode import decode
from attnops_tpu.linear.inverse import inverses
from attnops_tpu.linear.plan import LinearPlan, compiler_params
from attnops_tpu.linear.plan import plan as make_plan
from attnops_tpu.linear.prepare import (
    BETA, CHUNK, COARSE, FINE, GATES, KEPT, RESETS, TO_END, WHOLE, Arrays, arrays,
)  # fmt: skip
from attnops_tpu.linear.products import BY_COLUMNS, BY_ROWS, parts, product
from attnops_tpu.references import Input, Output, call_kernel


class Refs(NamedTuple):
    """The references of the kernel, of k key heads and h value heads, and the C tokens of a chunk."""

    query: Any  # [1, C, k · D]
    key: Any  # [1, C, k · D]
    value: Any  # [1, C, h · Dv]
    gates: Any  # [1, h, 1, 8, C]
    initial: Any  # [1, h, D, Dv]
    outputs: Any  # [1, C, h · Dv]
    state: Any  # [1, h, D, Dv]


def forward(
    metadata: OperationMetadata, query: jax.Array, key: jax.Array, value: jax.Array, *,
    decay: jax.Array | None = None, beta: jax.Array | None = None, scale: float | None = None,
    initial_state: jax.Array | None = None, mask: Any = None, return_state: bool = False,
) -> LinearOutput:  # fmt: skip
    """See `attnops_linear.LinearAttention.forward_native`."""
    (B, T, _, D), (H, Dv) = query.shape, value.shape[2:]
    plan = make_plan(metadata, query, value, scale, beta is not None)
    if T <= FEW:
        outputs, state = decode(plan, query, key, value, decay, beta, initial_state, mask)
        outputs = outputs.astype(query.dtype)
    else:
        outputs, state = _call(plan, arrays(plan, query, key, value, decay, beta, initial_state, mask), query.dtype)
        outputs = outputs.reshape(B, -1, H, plan.Dv)
    outputs = outputs[:, :T, :, :Dv]
    if mask is not None and mask.is_token is not None:
        outputs = jnp.where(mask.is_token[:, :, None, None], outputs, 0)
    return LinearOutput(outputs, state[:, :, :D, :Dv] if return_state else None)


def _call(plan: LinearPlan, given: Arrays, dtype: Any) -> tuple[jax.Array, ...]:
    """The outputs [B, N · C, H · Dv] and the last state [B, H, D, Dv]."""
    B, H, N = given.gates.shape[:3]
    chunk, keys, heads = CHUNK, plan.keys, plan.heads
    # How many steps in turn have the same key head.
    same = H * plan.D // given.key.shape[2] * keys // heads

    def of_keys(b: Any, h: Any, n: Any) -> tuple[Any, ...]:
        return b, n, lax.div(h, jnp.int32(same))

    state = pl.BlockSpec((1, heads, plan.D, plan.Dv), lambda b, h, n: (b, h, 0, 0))
    values = pl.BlockSpec((1, chunk, heads * plan.Dv), lambda b, h, n: (b, n, h))
    refs = Refs(
        Input(given.query, pl.BlockSpec((1, chunk, keys * plan.D), of_keys)),
        Input(given.key, pl.BlockSpec((1, chunk, keys * plan.D), of_keys)),
        Input(given.value, values),
        Input(given.gates, pl.BlockSpec((1, heads, 1, GATES, chunk), lambda b, h, n: (b, h, n, 0, 0))),
        Input(given.state, state),
        Output(jax.ShapeDtypeStruct(given.value.shape, dtype), values),
        Output(jax.ShapeDtypeStruct(given.state.shape, jnp.float32), state, over=given.state),
    )
    outputs, last = call_kernel(
        functools.partial(_kernel, plan), refs, "linear_attention", grid=(B, H // heads, N),
        params=compiler_params(plan, refs, 3), interpret=plan.interpret,
    )  # fmt: skip
    return outputs, last


def _kernel(plan: LinearPlan, refs: Refs) -> None:
    """A chunk of some heads, two of them side by side in the lanes of [64, 128].

    The matrix unit keeps the order of the program. So each phase has all heads before the next one begins: a phase
    hides the delay of the products of the one before.
    """

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        refs.state[...] = refs.initial[...]

    count, heads = plan.count, range(plan.heads)
    exact = refs.outputs.dtype == jnp.float32
    pairs = [(i, min(i + 1, plan.heads - 1)) for i in range(0, plan.heads, 2)]
    keys = [parts(refs.key[0, :, of(i * plan.keys // plan.heads, plan.D)], count) for i in heads]
    queries = [parts(refs.query[0, :, of(i * plan.keys // plan.heads, plan.D)], count) for i in heads]
    gates = [refs.gates[0, i, 0] for i in heads]
    columns = [x.T for x in gates]

    scores = []
    for pair in pairs:
        rows = [*[queries[i] for i in pair], *([keys[i] for i in pair] if plan.beta else [])]
        found = product(_stacked(rows), _stacked([keys[i] for i in pair]), count, BY_ROWS)
        cut = [found[i * CHUNK : (i + 1) * CHUNK] for i in range(len(rows))]
        scores.append([_beside(*cut[i : i + 2]) for i in range(0, len(cut), 2)])

    past = []
    for i in heads:
        state = parts(refs.state[0, i], count)
        if not plan.beta:
            past.append((None, product(queries[i], state, count if exact else 1)))
            continue
        rows = _stacked([queries[i], keys[i]])
        found = product(rows, state, count) if exact else product(rows, state[:1], 1)
        of_query, of_key = found[:CHUNK], found[CHUNK:]
        if not exact and count > 1:
            of_key = of_key + product(keys[i], state[1:], count - 1)
        past.append((of_key, of_query))

    row, column = (lax.broadcasted_iota(jnp.int32, (CHUNK, 2 * CHUNK), axis) for axis in (0, 1))
    column = column & (CHUNK - 1)
    systems, weights = [], []
    for pair, found in zip(pairs, scores, strict=True):

        def by_row(gate: int, pair: tuple[int, int] = pair) -> jax.Array:
            return _beside(*(jnp.broadcast_to(columns[i][:, gate : gate + 1], (CHUNK, 2 * CHUNK)) for i in pair))

        def by_column(gate: int, pair: tuple[int, int] = pair) -> jax.Array:
            return jnp.concatenate([gates[i][gate : gate + 1] for i in pair], axis=1)

        logarithm = (by_row(COARSE) - by_column(COARSE)) + (by_row(FINE) - by_column(FINE))
        keeps = (by_row(RESETS) == by_column(RESETS)) & (row >= column)
        decays = jnp.exp(jnp.where(keeps, logarithm, -jnp.inf))
        weights.append(found[0] * decays)
        if plan.beta:
            systems.append(jnp.where(row > column, found[1] * decays * by_column(BETA), 0.0))

    values = [refs.value[0, :, of(i, plan.Dv)] for i in heads]
    if plan.beta:
        solved = inverses(systems, count)
        targets = [values[i].astype(jnp.float32) - past[i][0] * columns[i][:, KEPT : KEPT + 1] for i in heads]
        values = [
            product(_half(solved[i // 2], i, count), parts(targets[i], count), count) * columns[i][:, BETA : BETA + 1]
            for i in heads
        ]
    few = count if exact else 1
    for i in heads:
        found = product(_half(weights[i // 2], i, few), parts(values[i], few), few)
        outputs = (past[i][1] * columns[i][:, KEPT : KEPT + 1] + found) * plan.scale
        refs.outputs[0, :, of(i, plan.Dv)] = outputs.astype(refs.outputs.dtype)
    for i in heads:
        added = values[i].astype(jnp.float32) * columns[i][:, TO_END : TO_END + 1]
        added = product(keys[i], parts(added, count), count, BY_COLUMNS)
        refs.state[0, i] = gates[i][WHOLE : WHOLE + 1, :1] * refs.state[0, i] + added


def of(i: int, width: int) -> slice:
    """The lanes of a head."""
    return slice(i * width, (i + 1) * width)


def _beside(a: jax.Array, b: jax.Array) -> jax.Array:
    """The left half of the lanes of one array, and the right half of another."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, a.shape, 1) < CHUNK, a, b)


def _half(x: jax.Array, head: int, count: int) -> list[jax.Array]:
    """The parts of a head's half of the lanes."""
    return [part[:, of(head % 2, CHUNK)] for part in parts(x, count)]


def _stacked(matrices: list[list[jax.Array]]) -> list[jax.Array]:
    """The parts of matrices one below the other."""
    return [jnp.concatenate(each, axis=0) for each in zip(*matrices, strict=True)]
