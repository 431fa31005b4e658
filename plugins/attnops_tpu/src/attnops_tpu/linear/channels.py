"""The forward kernel with decays by channel: chunk by chunk, with the state of each head in vector memory."""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops.kernels import equally_varying, folds_batch, output_like
from attnops_tpu.linear.chunk import half, is_before, pairs, part
from attnops_tpu.linear.factors import EMPTY, MILD, ORDINARY, Factors, careful, exponents, mild
from attnops_tpu.linear.inverse import inverses
from attnops_tpu.linear.plan import LANES, LinearPlan, compiler_params
from attnops_tpu.linear.prepare import CHUNK, finished, of_batch, of_tokens, padded_state, zeroed
from attnops_tpu.linear.products import BY_COLUMNS, BY_ROWS, parts, product, products
from attnops_tpu.references import Input, Output, call_kernel

# Of float32 numbers.
_PARTS: Final = 3


class Arrays(NamedTuple):
    """Of a call in N chunks of C tokens; head dims are padded to D and Dv. A grid step has h heads, in p pairs.

    Attributes:
        query: [B, N · C, K · D].
        key: [B, N · C, K · D].
        value: [B, N · C, H · Dv].
        decay: [B, N · C, H · D] float32.
        rows: betas of the tokens of each pair's heads side by side, [B, H / h, N, p, 2 · C] float32; or None.
        columns: three parts of the betas of each head, [B, H / h, N, 3 · h, C] bfloat16; or None.
        state: [B, H, D, Dv] float32.
    """

    query: Any
    key: Any
    value: Any
    decay: Any
    rows: Any
    columns: Any
    state: Any


class Refs(NamedTuple):
    """The references of the kernel, of k key heads and h value heads."""

    query: Any  # [1, C, k · D]
    key: Any  # [1, C, k · D]
    value: Any  # [1, C, h · Dv]
    decay: Any  # [1, C, h · D]
    rows: Any  # [1, 1, 1, p, 2 · C]; None without betas
    columns: Any  # [1, 1, 1, 3 · h, C]; None without
    copies: Any  # [3 · h, h · 128]; None without
    initial: Any  # [1, h, D, Dv]
    outputs: Any  # [1, C, h · Dv]
    state: Any  # [1, h, D, Dv]
    transposed: Any  # [h, Dv, D], the states: decays by channel multiply their columns


def chunks(
    plan: LinearPlan, query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array | None,
    initial_state: jax.Array | None, mask: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The outputs [B, N · C, H, Dv] and the last state [B, H, D, Dv], padded."""
    given = _arrays(plan, query, key, value, decay, beta, initial_state, mask)
    outputs, state = finished(plan, _call(plan, given))
    return outputs.reshape(*outputs.shape[:2], -1, plan.Dv), state


def _arrays(
    plan: LinearPlan, query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array | None,
    initial_state: jax.Array | None, mask: Any,
) -> Arrays:  # fmt: skip
    is_token, starts = (None, None) if mask is None else mask
    (B, T), H = query.shape[:2], value.shape[2]
    dtype = jnp.result_type(query, key, value)
    decay = zeroed(decay, is_token).astype(jnp.float32)
    if starts is not None:
        decay = jnp.where(starts[:, :, None, None], EMPTY, decay)
    rows = columns = None
    if beta is not None:
        x = jnp.pad(zeroed(beta, is_token).astype(jnp.float32), ((0, 0), (0, -T % CHUNK), (0, 0)))
        x = jnp.transpose(x.reshape(B, -1, CHUNK, H // plan.heads, plan.heads), (0, 3, 1, 4, 2))
        columns = jnp.concatenate(parts(x, _PARTS), axis=3)
        # A pair that lacks its second head has the first twice.
        rows = jnp.pad(x, (*[(0, 0)] * 3, (0, plan.heads % 2), (0, 0)), mode="edge")
        rows = rows.reshape(*x.shape[:3], -1, 2 * CHUNK)
    return Arrays(
        of_tokens(query, plan.D, is_token, dtype), of_tokens(key, plan.D, is_token, dtype),
        of_tokens(value, plan.Dv, is_token, dtype), of_tokens(decay, plan.D, None, decay.dtype), rows, columns,
        padded_state(plan, initial_state, B, H),
    )  # fmt: skip


@folds_batch
def _call(plan: LinearPlan, given: Arrays) -> tuple[jax.Array, ...]:
    """The outputs [B, N · C, H · Dv] and the last state [B, H, D, Dv]."""
    # By which a product copies a head's betas to 128 lanes.
    copies = jnp.asarray(np.tile(np.repeat(np.eye(plan.heads), LANES, axis=1), (_PARTS, 1)), jnp.bfloat16)
    given = Arrays(*(None if x is None else of_batch(plan, x) for x in given))
    given, copies = equally_varying((given, copies))
    (B, H), N = given.state.shape[:2], given.query.shape[1] // CHUNK
    keys, heads = plan.keys, plan.heads
    # How many steps in turn have the same key head.
    same = H * plan.D // given.key.shape[2] * keys // heads

    def of_tokens(width: int, shared: int = 1) -> pl.BlockSpec:
        return pl.BlockSpec((1, CHUNK, width), lambda b, h, n: (b, n, lax.div(h, jnp.int32(shared))))

    def of_chunk(x: jax.Array | None) -> Any:
        if x is None:
            return None
        return Input(x, pl.BlockSpec((1, 1, 1, *x.shape[3:]), lambda b, h, n: (b, h, n, 0, 0)))

    initial = Input(given.state, pl.BlockSpec((1, heads, plan.D, plan.Dv), lambda b, h, n: (b, h, 0, 0)))
    values = of_tokens(heads * plan.Dv)
    refs = Refs(
        Input(given.query, of_tokens(keys * plan.D, same)),
        Input(given.key, of_tokens(keys * plan.D, same)),
        Input(given.value, values),
        Input(given.decay, of_tokens(heads * plan.D)),
        of_chunk(given.rows),
        of_chunk(given.columns),
        Input(copies, pl.BlockSpec(copies.shape, lambda b, h, n: (0, 0))) if plan.beta else None,
        initial,
        Output(output_like(given.value, given.value.shape, plan.dtype), values),
        Output(output_like(given.value, given.state.shape, jnp.dtype(jnp.float32)), initial.spec, over=initial),
        pltpu.VMEM((heads, plan.Dv, plan.D), jnp.float32),
    )
    results = call_kernel(
        functools.partial(_kernel, plan, N), refs, "linear_attention_channels", grid=(B, H // heads, N),
        params=compiler_params(plan, refs, 3), interpret=plan.interpret,
    )  # fmt: skip
    return tuple(results)


def _kernel(plan: LinearPlan, N: int, refs: Refs) -> None:
    """A chunk of some heads."""
    heads = list(range(plan.heads))

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        for i in heads:
            refs.transposed[i] = refs.initial[0, i].T

    def arrays(heads: list[Any]) -> tuple[list[jax.Array], list[jax.Array]]:
        of_key = [_quotient(i, plan.heads // plan.keys) for i in heads]
        queries, keys = ([x[0, :, _lanes(i, plan.D)] for i in of_key] for x in (refs.query, refs.key))
        return queries, keys

    decay = refs.decay[0]
    found = exponents(_at_least(decay), _PARTS)
    is_mild = jnp.max(jnp.abs(found[:CHUNK])) <= MILD[refs.key.dtype == jnp.float32]
    for x in (refs.query, refs.key):
        is_mild &= jnp.max(jnp.abs(x[0].astype(jnp.float32))) <= ORDINARY

    @pl.when(is_mild)
    def _() -> None:
        two = pairs(plan)
        _finish(plan, refs, heads, two, mild(plan, _rough(plan, refs), found, *arrays(heads), two))

    @pl.when(jnp.logical_not(is_mild))
    def _() -> None:
        @pl.loop(0, -(-plan.heads // 2))
        def _(pair: jax.Array) -> None:
            both = [2 * pair, jnp.minimum(2 * pair + 1, plan.heads - 1)]
            decays = [_at_least(refs.decay[0, :, _lanes(i, plan.D)]) for i in both]
            _finish(plan, refs, both, [(0, 1)], careful(plan, decays, *arrays(both)))

    @pl.when(pl.program_id(2) == N - 1)
    def _() -> None:
        for i in heads:
            refs.state[0, i] = refs.transposed[i].T


def _finish(plan: LinearPlan, refs: Refs, heads: list[Any], two: list[tuple[int, int]], factors: Factors) -> None:
    """The outputs and new states of some heads; `attnops_tpu.linear.chunk.chunk` says why it goes phase by phase."""
    count, rough = plan.passes, _rough(plan, refs)
    places = range(len(heads))
    states = [refs.transposed[i] for i in heads]
    split = [parts(x, count) for x in states]
    queries = [parts(x, rough) for x in factors.queries]
    updates = [refs.value[0, :, _lanes(i, plan.Dv)] for i in heads]
    weights = [parts(jnp.where(is_before(reverse=True), 0.0, x[0]), rough) for x in factors.scores]
    if not plan.beta:
        past = [product(queries[i], split[i], rough, BY_ROWS) for i in places]
    else:
        keys = [parts(x, count) for x in factors.keys]
        both = [products([(queries[i], rough), (keys[i], count)], split[i]) for i in places]
        past, of_key = [x[0] for x in both], [x[1] for x in both]
        # With B the diagonal matrix of betas, (I + B M)⁻¹ B = B (I + M B)⁻¹, whose betas are along the lanes.
        systems = [
            jnp.where(is_before(), x[1] * refs.rows[0, 0, 0, _rows(heads[pair[0]])], 0.0)
            for x, pair in zip(factors.scores, two, strict=True)
        ]
        solutions = [parts(x, count) for x in inverses(systems, count)]
        targets = [parts(x.astype(jnp.float32) - y, count) for x, y in zip(updates, of_key, strict=True)]
        rates = [_rates(plan, refs, i) for i in heads]
        solved = [product(half(solutions[i // 2], i), targets[i], count) for i in places]
        updates = [x * y for x, y in zip(solved, rates, strict=True)]
    for i, head in enumerate(heads):
        inside = product(half(weights[i // 2], i), parts(updates[i], rough), rough)
        refs.outputs[0, :, _lanes(head, plan.Dv)] = ((past[i] + inside) * plan.scale).astype(refs.outputs.dtype)
        added = product(parts(updates[i], count), parts(factors.to_end[i], count), count, BY_COLUMNS)
        refs.transposed[head] = factors.whole[i] * states[i] + added


def _rough(plan: LinearPlan, refs: Refs) -> int:
    """The count of products for outputs: those of bfloat16 arrays are rounded to it, and need no other parts."""
    return plan.passes if refs.key.dtype == jnp.float32 else 1


def _at_least(decay: jax.Array) -> jax.Array:
    # NaN stays.
    return jnp.where(decay < EMPTY, EMPTY, decay)


def _rates(plan: LinearPlan, refs: Refs, head: Any) -> jax.Array:
    """[C, Dv]: the betas of a head's tokens along all lanes."""
    found = product([refs.columns[0, 0, 0]], [refs.copies[:, _lanes(head, LANES)]], 1, BY_COLUMNS)
    return jnp.concatenate([found] * (plan.Dv // LANES), axis=1)


def _lanes(i: Any, width: int) -> Any:
    """The i-th ``width`` lanes; i may be traced."""
    return part(i, width) if isinstance(i, int) else pl.ds(pl.multiple_of(i * width, LANES), width)


def _rows(head: Any) -> Any:
    """The row of a head's pair."""
    pair = _quotient(head, 2)
    return part(pair, 1) if isinstance(pair, int) else pl.ds(pair, 1)


def _quotient(i: Any, n: int) -> Any:
    return i // n if isinstance(i, int) else lax.div(i, jnp.int32(n))
