"""The backward kernel: chunk by chunk from the last one, with the gradient of each head's state in vector memory.

With S the state before a chunk, dS' the gradient of the state after it and the names of `attnops_tpu.linear.chunk`, the
forward pass is, for the decays e(i, j), "kept" e(i, start), "to_end" e(end, j) and "whole" of the chunk, s the scale::

    A = tril(Q Kᵀ ∘ e)    M = strict tril(K Kᵀ ∘ e)    Y = (I + M B)⁻¹ (V − kept K S)    U = B Y
    O = s (kept Q S + A U)                              S' = whole S + Kᵀ (to_end U)

so that with dO given::

    dU = s Aᵀ dO + to_end K dS'                         dV = Z = (I + M B)⁻ᵀ B dU
    dQKᵀ = s (dO Yᵀ) B ∘ e                              dKKᵀ = −(Z Yᵀ) B ∘ e, strictly lower
    dQ = s kept dO Sᵀ + dQKᵀ K                          dS = whole dS' + s Qᵀ kept dO − Kᵀ kept Z
    dK = to_end U dS'ᵀ + dQKᵀᵀ Q + (dKKᵀ + dKKᵀᵀ) K − kept Z Sᵀ

The gradient of a beta is that of U = B Y at Y, less what M B Y has of it: no division by betas, which may be 0::

    dβ_j = dU_j · Y_j − (Mᵀ Z)_j · Y_j = Σ_i (s A ∘ dO Yᵀ − M ∘ Z Yᵀ)_ij + to_end_j K_j · (dS' Y_j)

The logarithm of token t's decay is in e(i, j) for j < t ≤ i. So its gradient is a sum over such pairs, in which nothing
cancels, of ``F = dQKᵀ ∘ Q Kᵀ + dKKᵀ ∘ K Kᵀ``; a product with a triangular matrix sums F over j < t::

    Σ_{i ≥ t} (Σ_{j < t} F_ij + kept_i (s dO_i · Q_i S − Z_i · K_i S))
        + Σ_{j < t} to_end_j K_j · (dS' U_j) + whole S · dS'

Where a token empties the state, e, kept, to_end and whole are 0 across it, and so is this sum. Without beta, Y = U = V,
and Z = dU. The matrices are those of "Parallelizing Linear Transformers with the Delta Rule" (Yang et al. 2024,
arXiv:2406.06484).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from attnops import OperationMetadata
from attnops.kernels import equally_varying, folds_batch, output_like
from attnops_linear import LinearOutput
from attnops_tpu.linear.chunk import Chunk, Kept, Parts, Past, chunk, half, is_before, pairs, part, stacked
from attnops_tpu.linear.plan import LANES, LinearPlan, compiler_params
from attnops_tpu.linear.plan import plan as make_plan
from attnops_tpu.linear.prepare import (
    CHUNK,
    Arrays,
    arrays,
    copies,
    finished,
    of_batch,
    of_tokens,
    zeroed,
)
from attnops_tpu.linear.products import BY_COLUMNS, BY_ROWS, parts, product
from attnops_tpu.references import Input, Output, call_kernel


class Refs(NamedTuple):
    """The references of the kernel, for the chunks from the last one on; names as in `attnops_tpu.linear.forward`."""

    query: Any  # [1, C, k · D]
    key: Any  # [1, C, k · D]
    value: Any  # [1, C, h · Dv]
    rows: Any  # [1, 1, 1, 8, p · 2 · C]
    columns: Any  # [1, 1, 1, 48, p · C]
    copies: Any  # [48, 9 · 128]
    states: Any  # [1, 1, h, D, Dv], before the chunk
    inverses: Any  # [1, 1, 1, p · C, 2 · C] or None
    d_outputs: Any  # [1, C, h · Dv]
    d_last: Any  # [1, h, D, Dv], of the last state
    d_query: Any  # [1, C, k · D]
    d_key: Any  # [1, C, k · D]
    d_value: Any  # [1, C, h · Dv]
    d_rows: Any  # [1, 1, 1, 8, p · 2 · C], of decays and of betas
    d_state: Any  # [1, h, D, Dv], of the state after the chunk, at last of the first state


def backward(
    metadata: OperationMetadata, kept: Kept, d: LinearOutput, query: jax.Array, key: jax.Array,
    value: jax.Array, *, decay: jax.Array | None = None, beta: jax.Array | None = None, scale: float | None = None,
    initial_state: jax.Array | None = None, mask: Any = None,
) -> dict[str, jax.Array]:  # fmt: skip
    """The gradients of the arrays, by name, each in its array's dtype.

    Args:
        metadata: the operation's metadata.
        kept: what `attnops_tpu.linear.forward.forward_with_states` keeps.
        d: the gradients of the output and, or None, of the last state.
        query: [B, T, K, D]; it and the others are the arguments of that.
        key: [B, T, K, D].
        value: [B, T, Hv, Dv].
        decay: [Hv], [B, T, Hv] or None.
        beta: [B, T, Hv] or None.
        scale: of queries.
        initial_state: [B, Hv, D, Dv] or None.
        mask: an `attnops_linear.masks.Tokens` or None.
    """
    (B, T, K, D), (H, Dv) = query.shape, value.shape[2:]
    plan = make_plan(metadata, query, value, scale, beta is not None, keeps=True)
    d_state = jnp.zeros((B, H, D, Dv), jnp.float32) if d.state is None else d.state
    given = arrays(plan, query, key, value, decay, beta, d_state, mask)
    is_token = None if mask is None else mask.is_token
    d_outputs = of_tokens(d.attention_outputs, plan.Dv, is_token, given.value.dtype)
    d_query, d_key, d_value, d_rows, d_first = finished(plan, _call(plan, given, kept, d_outputs))

    def of_keys(x: jax.Array) -> jax.Array:
        # Steps of some value heads each have a part of a key head's gradient.
        x = x.reshape(B, -1, K // plan.keys, H // plan.heads * plan.keys // K, plan.keys, plan.D).sum(axis=3)
        return x.reshape(B, -1, K, plan.D)[:, :T, :, :D]

    def of_gates(i: int) -> jax.Array:
        x = d_rows[:, :, :, i].reshape(B, H // plan.heads, -1, d_rows.shape[4] // CHUNK, CHUNK)[:, :, :, : plan.heads]
        return zeroed(jnp.transpose(x, (0, 2, 4, 1, 3)).reshape(B, -1, H)[:, :T], is_token)

    found = {
        "query": (of_keys(d_query), query), "key": (of_keys(d_key), key),
        "value": (d_value.reshape(B, -1, H, plan.Dv)[:, :T, :, :Dv], value),
    }  # fmt: skip
    if decay is not None:
        found["decay"] = (of_gates(0) if decay.ndim == 3 else of_gates(0).sum(axis=(0, 1)), decay)
    if beta is not None:
        found["beta"] = (of_gates(1), beta)
    if initial_state is not None:
        found["initial_state"] = (d_first[:, :, :D, :Dv], initial_state)
    return {name: x.astype(like.dtype) for name, (x, like) in found.items()}


@folds_batch
def _call(plan: LinearPlan, given: Arrays, kept: Kept, d_outputs: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients of `Refs`, for whole rows."""
    given, kept, d_outputs = jax.tree.map(functools.partial(of_batch, plan), (given, kept, d_outputs))
    given, kept, d_outputs, copied = equally_varying((given, kept, d_outputs, copies()))
    (B, H), N = given.state.shape[:2], given.rows.shape[2]
    keys, heads = plan.keys, plan.heads
    # How many steps in turn have the same key head.
    same = H * plan.D // given.key.shape[2] * keys // heads
    float32 = jnp.dtype(jnp.float32)

    def block(*shape: int, width: int = 1) -> pl.BlockSpec:
        return pl.BlockSpec((1, CHUNK, *shape), lambda b, h, n: (b, N - 1 - n, lax.div(h, jnp.int32(width))))

    def of_chunk(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, 1, *x.shape[3:]), lambda b, h, n: (b, h, N - 1 - n, 0, 0))

    def of_key(x: jax.Array) -> Output:
        of_steps = output_like(
            given.value, (B, N * CHUNK, H // heads * keys * plan.D), float32 if same > 1 else x.dtype
        )
        return Output(of_steps, block(keys * plan.D))

    shared, values = block(keys * plan.D, width=same), block(heads * plan.Dv)
    last = Input(given.state, pl.BlockSpec((1, heads, plan.D, plan.Dv), lambda b, h, n: (b, h, 0, 0)))
    refs = Refs(
        Input(given.query, shared),
        Input(given.key, shared),
        Input(given.value, values),
        Input(given.rows, of_chunk(given.rows)),
        Input(given.columns, of_chunk(given.columns)),
        Input(copied, pl.BlockSpec(copied.shape, lambda b, h, n: (0, 0))),
        Input(kept.states, pl.BlockSpec((1, 1, heads, plan.D, plan.Dv), lambda b, h, n: (b, N - 1 - n, h, 0, 0))),
        None if kept.inverses is None else Input(kept.inverses, of_chunk(kept.inverses)),
        Input(d_outputs, values),
        last,
        of_key(given.query),
        of_key(given.key),
        Output(output_like(given.value, given.value.shape, given.value.dtype), values),
        Output(output_like(given.value, given.rows.shape, float32), of_chunk(given.rows)),
        Output(output_like(given.value, given.state.shape, float32), last.spec, over=last),
    )
    results = call_kernel(
        functools.partial(_kernel, plan), refs, "linear_attention_backward", grid=(B, H // heads, N),
        params=compiler_params(plan, refs, 3), interpret=plan.interpret,
    )  # fmt: skip
    return tuple(results)


class _Solved(NamedTuple):
    """Of each head, float32: the gradient of the values, [C, Dv]; and by pair, products [C, 128] with Yᵀ, times e."""

    d_values: list[jax.Array]
    ends: list[jax.Array]  # [C, Dv], to_end K dS'
    of_outputs: list[jax.Array]  # s dO Yᵀ ∘ e
    of_values: list[jax.Array]  # −Z Yᵀ ∘ e, strictly lower; with the delta rule only


def _kernel(plan: LinearPlan, refs: Refs) -> None:
    """A chunk of some heads; see `attnops_tpu.linear.chunk.chunk` for the order of its products."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        refs.d_state[...] = refs.d_last[...]

    # Gradients of bfloat16 arrays are rounded to it, and those of decays and betas are as exact; only what the next
    # chunk's depend on needs other parts.
    count, rough = plan.passes, plan.passes if refs.key.dtype == jnp.float32 else 1
    heads = range(plan.heads)
    states, d_states = ([ref[i] for i in heads] for ref in (refs.states.at[0, 0], refs.d_state.at[0]))

    def look_up(i: int, _: Parts, key: Parts) -> Past:
        # The keys of a head are multiplied by both states at once.
        both = jnp.concatenate([states[i], d_states[i]] if plan.beta else [d_states[i]], axis=1)
        seen = product(key, parts(both, count), count)
        return Past(None, seen[:, : plan.Dv] if plan.beta else None, seen[:, -plan.Dv :])

    found = chunk(plan, refs, look_up, refs.inverses[0, 0, 0] if plan.beta else None)
    gates = found.gates
    d_outputs = [parts(refs.d_outputs[0, :, part(i, plan.Dv)], count) for i in heads]
    solved = _solved(plan, rough, found, d_outputs)
    d_values = solved.d_values
    scores = [
        [x * gates.row("beta", i) if plan.beta else x for x in both]
        for i, both in enumerate(zip(solved.of_outputs, *([solved.of_values] if plan.beta else []), strict=True))
    ]
    d_scores = [[parts(x, rough) for x in both] for both in scores]

    # Products with the states: [to_end U | −kept Z] and [0 | dO] times both transposed. Decays multiply the left
    # operands, so that one product adds up what both states have of a key's gradient.
    nothing = jnp.zeros((CHUNK, plan.Dv), jnp.bfloat16)
    of_states = []
    for i in heads:
        after = found.updates[i] * gates.of_head("to_end", i, plan.Dv)
        before = -gates.of_head("kept", i, plan.Dv) * d_values[i] if plan.beta else jnp.zeros_like(after)
        for_key = parts(jnp.concatenate([after, before], axis=1), rough)
        for_query = [jnp.concatenate([nothing, x], axis=1) for x in d_outputs[i][:rough]]
        both = parts(jnp.concatenate([d_states[i], states[i]], axis=1), rough)
        of_states.append(product(stacked([for_key, for_query]), both, rough, BY_ROWS))
    # Products with the scores' gradients.
    of_keys = [product(stacked([half(x, i) for x in d_scores[i // 2]]), found.keys[i][:rough], rough) for i in heads]
    of_queries = [
        product(
            stacked([half(x, i) for x in d_scores[i // 2]]),
            stacked([x[i][:rough] for x in ((found.queries, found.keys) if plan.beta else (found.queries,))]),
            rough, BY_COLUMNS,
        )
        for i in heads
    ]  # fmt: skip
    d_queries, d_keys = [None] * plan.keys, [None] * plan.keys  # type: list[Any], list[Any]
    of_kept, of_end = [], []
    for i in heads:
        key = i * plan.keys // plan.heads
        kept = gates.of_head("kept", i, plan.D)
        of_end.append(_along(solved.ends[i] * found.solved[i]))
        looked = plan.scale * kept * of_states[i][CHUNK:]
        d_query = looked + of_keys[i][:CHUNK]
        d_key = of_states[i][:CHUNK] + of_queries[i]
        of_key = None
        if plan.beta:
            d_key = d_key + of_keys[i][CHUNK:]
            of_key = d_values[i] * found.past[i].of_key * gates.of_head("kept", i, plan.Dv)
        of_kept.append(_along(looked * _whole(found.queries[i]), of_key))
        d_queries[key] = d_query if d_queries[key] is None else d_queries[key] + d_query
        d_keys[key] = d_key if d_keys[key] is None else d_keys[key] + d_key
        refs.d_value[0, :, part(i, plan.Dv)] = d_values[i].astype(refs.d_value.dtype)
    for i in range(plan.keys):
        refs.d_query[0, :, part(i, plan.D)] = d_queries[i].astype(refs.d_query.dtype)
        refs.d_key[0, :, part(i, plan.D)] = d_keys[i].astype(refs.d_key.dtype)
    of_whole = [x * y for x, y in zip(states, d_states, strict=True)]
    _gates(plan, rough, refs, found, solved, scores, of_kept, of_end, of_whole)
    for i in heads:
        kept = gates.of_head("kept", i, plan.Dv)
        right = [parts(plan.scale * kept * _whole(d_outputs[i]), count)]
        right += [parts(-kept * d_values[i], count)] if plan.beta else []
        left = [found.queries[i], found.keys[i]] if plan.beta else [found.queries[i]]
        whole = jnp.concatenate([gates.whole(i)] * (plan.Dv // LANES), axis=1)
        refs.d_state[0, i] = whole * d_states[i] + product(stacked(left), stacked(right), count, BY_COLUMNS)


def _solved(plan: LinearPlan, rough: int, found: Chunk, d_outputs: list[list[jax.Array]]) -> _Solved:
    count, heads, gates = plan.passes, range(plan.heads), found.gates
    decays = [plan.scale * decay for decay in found.decays]
    weights = [parts(x[0] * decay, count) for x, decay in zip(found.scores, decays, strict=True)]
    # What the state after the chunk has of them.
    ends = [found.past[i].of_gradient * gates.of_head("to_end", i, plan.Dv) for i in heads]
    d_updates = [x + product(half(weights[i // 2], i), d_outputs[i], count, BY_COLUMNS) for i, x in enumerate(ends)]
    d_values = d_updates
    if plan.beta:
        right = [parts(x * gates.of_head("beta", i, plan.Dv), count) for i, x in enumerate(d_updates)]
        d_values = [product(half(found.solutions[i // 2], i), right[i], count, BY_COLUMNS) for i in heads]
    rows = [[x[:rough] for x in d_outputs], *([[parts(x, rough) for x in d_values]] if plan.beta else [])]
    columns = [parts(x, rough) for x in found.solved]
    is_first = lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), 1) < CHUNK
    of_outputs, of_values = [], []
    for i, pair in enumerate(pairs(plan)):
        both = product(stacked([x[j] for x in rows for j in pair]), stacked([columns[j] for j in pair]), rough, BY_ROWS)
        cut = [both[part(j, CHUNK)] for j in range(2 * len(rows))]
        each = [jnp.where(is_first, cut[j], cut[j + 1]) for j in range(0, len(cut), 2)]
        of_outputs.append(each[0] * decays[i])
        if plan.beta:
            of_values.append(jnp.where(is_before(), -each[1] * found.decays[i], 0.0))
    return _Solved(d_values, ends, of_outputs, of_values)


def _gates(
    plan: LinearPlan, rough: int, refs: Refs, found: Chunk, solved: _Solved, scores: list[list[jax.Array]],
    of_kept: list[jax.Array], of_end: list[jax.Array], of_whole: list[jax.Array],
) -> None:  # fmt: skip
    """Write the gradients of decays and betas."""
    row, lane = (lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), axis) for axis in (0, 1))
    place = lane & (CHUNK - 1)
    sums = _along(jnp.concatenate([x.sum(axis=0, keepdims=True) for x in of_whole], axis=0))
    left, right = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    earlier = ((left < right) & ((left < CHUNK) == (right < CHUNK))).astype(jnp.bfloat16)
    # Those of all pairs are one product, whose right operand the matrix unit loads once.
    products = [[x * y for x, y in zip(*both, strict=True)] for both in zip(scores, found.scores, strict=True)]
    befores = product(parts(jnp.concatenate([sum(x[1:], x[0]) for x in products]), rough), [earlier], rough)
    for i, (first, second) in enumerate(pairs(plan)):
        before = befores[part(i, CHUNK)]
        kept, end = (jnp.where(lane < CHUNK, x[first], x[second]) for x in (of_kept, of_end))
        beta: Any = 1.0
        if plan.beta:
            beta = jnp.where(
                lane < CHUNK,
                found.gates.of_head("beta", first, LANES), found.gates.of_head("beta", second, LANES),
            )  # fmt: skip
        d_decay = jnp.where(row >= place, before + kept, end * beta).sum(axis=0, keepdims=True)
        wholes = [found.gates.whole(j) * sums[j : j + 1] for j in (first, second)]
        refs.d_rows[0, 0, 0, 0:1, part(i, LANES)] = d_decay + jnp.where(lane[:1] < CHUNK, wholes[0], wholes[1])
        if plan.beta:
            of_beta = solved.of_outputs[i] * found.scores[i][0] + solved.of_values[i] * found.scores[i][1]
            d_beta = (of_beta + jnp.where(row == place, end, 0.0)).sum(axis=0, keepdims=True)
            refs.d_rows[0, 0, 0, 1:2, part(i, LANES)] = d_beta


def _along(added: jax.Array, subtracted: jax.Array | None = None) -> jax.Array:
    """The sum over the lanes of one array, less that of another, [C, 1]."""

    def folded(x: jax.Array) -> jax.Array:
        return functools.reduce(jnp.add, (x[:, part(i, LANES)] for i in range(x.shape[1] // LANES)))

    total = folded(added)
    return (total if subtracted is None else total - folded(subtracted)).sum(axis=1, keepdims=True)


def _whole(x: list[jax.Array]) -> jax.Array:
    """The sum of parts, float32."""
    return sum((y.astype(jnp.float32) for y in reversed(x[:-1])), x[-1].astype(jnp.float32))
