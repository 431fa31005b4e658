"""The forward kernel: chunk by chunk, with the state of each head in vector memory."""

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
from attnops_linear.chunks import FEW
from attnops_tpu.linear.decode import decode
from attnops_tpu.linear.inverse import inverses
from attnops_tpu.linear.plan import LANES, LinearPlan, compiler_params
from attnops_tpu.linear.plan import plan as make_plan
from attnops_tpu.linear.prepare import CHUNK, OF_HEAD, OF_PAIR, ROWS, Arrays, arrays, copies, finished, of_batch
from attnops_tpu.linear.products import BY_COLUMNS, BY_ROWS, parts, product
from attnops_tpu.references import Input, Output, call_kernel


class Refs(NamedTuple):
    """The references of the kernel, of k key heads and h value heads, and the C tokens of a chunk."""

    query: Any  # [1, C, k · D]
    key: Any  # [1, C, k · D]
    value: Any  # [1, C, h · Dv]
    rows: Any  # [1, 1, 1, 8, p · 2 · C]
    columns: Any  # [1, 1, 1, 48, p · C]
    copies: Any  # [48, 9 · 128]
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
    else:
        given = arrays(plan, query, key, value, decay, beta, initial_state, mask)
        outputs, state = finished(plan, _call(plan, given))
        outputs = outputs.reshape(B, -1, H, plan.Dv)
    outputs = outputs[:, :T, :, :Dv]
    if mask is not None and mask.is_token is not None:
        outputs = jnp.where(mask.is_token[:, :, None, None], outputs, 0)
    return LinearOutput(outputs, state[:, :, :D, :Dv] if return_state else None)


@folds_batch
def _call(plan: LinearPlan, given: Arrays) -> tuple[jax.Array, ...]:
    """The outputs [B, N · C, H · Dv] and the last state [B, H, D, Dv]."""
    given, copied = equally_varying((Arrays(*(of_batch(plan, x) for x in given)), copies()))
    (B, H), N = given.state.shape[:2], given.rows.shape[2]
    chunk, keys, heads = CHUNK, plan.keys, plan.heads
    # How many steps in turn have the same key head.
    same = H * plan.D // given.key.shape[2] * keys // heads

    def of_keys(b: Any, h: Any, n: Any) -> tuple[Any, ...]:
        return b, n, lax.div(h, jnp.int32(same))

    def of_chunk(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, 1, *x.shape[3:]), lambda b, h, n: (b, h, n, 0, 0))

    initial = Input(given.state, pl.BlockSpec((1, heads, plan.D, plan.Dv), lambda b, h, n: (b, h, 0, 0)))
    values = pl.BlockSpec((1, chunk, heads * plan.Dv), lambda b, h, n: (b, n, h))
    refs = Refs(
        Input(given.query, pl.BlockSpec((1, chunk, keys * plan.D), of_keys)),
        Input(given.key, pl.BlockSpec((1, chunk, keys * plan.D), of_keys)),
        Input(given.value, values),
        Input(given.rows, of_chunk(given.rows)),
        Input(given.columns, of_chunk(given.columns)),
        Input(copied, pl.BlockSpec(copied.shape, lambda b, h, n: (0, 0))),
        initial,
        Output(output_like(given.value, given.value.shape, plan.dtype), values),
        Output(output_like(given.value, given.state.shape, jnp.dtype(jnp.float32)), initial.spec, over=initial),
    )
    outputs, last = call_kernel(
        functools.partial(_kernel, plan), refs, "linear_attention", grid=(B, H // heads, N),
        params=compiler_params(plan, refs, 3), interpret=plan.interpret,
    )  # fmt: skip
    return outputs, last


class Gates:
    """The values of a step's tokens.

    Matrix products copy columns to the lanes: the cross-lane unit would be busier with them than all others.
    """

    def __init__(self, refs: Refs) -> None:
        self._rows = refs.rows
        self._columns = product([refs.columns[0, 0, 0]], [refs.copies[...]], 1, BY_COLUMNS)

    def row(self, name: str, pair: int) -> jax.Array:
        """[1, 128]: those of the tokens of a pair of heads; "whole" of the first one."""
        return self._row(ROWS.index(name), pair)

    def whole(self, head: int) -> jax.Array:
        """[1, 128]: what is kept of a head's state."""
        return self._row(ROWS.index("whole") + head % 2, head // 2)

    def of_pair(self, name: str, pair: int) -> jax.Array:
        """[C, 128]: a token's value, of the first head in one half of the lanes and of the second in the other."""
        return self._block(OF_PAIR.index(name), pair)

    def of_head(self, name: str, head: int, width: int) -> jax.Array:
        """[C, width]: a token's value."""
        block = self._block(len(OF_PAIR) + 2 * OF_HEAD.index(name) + head % 2, head // 2)
        return jnp.concatenate([block] * (width // LANES), axis=1)

    def _row(self, row: int, pair: int) -> jax.Array:
        x: jax.Array = self._rows[0, 0, 0, row : row + 1, _part(pair, LANES)]
        return x

    def _block(self, i: int, pair: int) -> jax.Array:
        return self._columns[_part(pair, CHUNK), _part(i, LANES)]


class Past(NamedTuple):
    """What the state before a chunk has for its tokens, [C, Dv] float32.

    Attributes:
        of_query: the state's values for queries, q S.
        of_key: those for keys; with the delta rule only.
    """

    of_query: jax.Array
    of_key: Any


def _kernel(plan: LinearPlan, refs: Refs) -> None:
    """A chunk of some heads.

    The matrix unit keeps the order of the program. So each phase has all heads before the next one begins: a phase
    hides the delay of the products of the one before.
    """

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        refs.state[...] = refs.initial[...]

    # Outputs of bfloat16 arrays are rounded to it, and need no other parts.
    count, rough = plan.passes, plan.passes if refs.key.dtype == jnp.float32 else 1
    heads = range(plan.heads)
    gates = Gates(refs)
    keys, queries = (
        [parts(x[0, :, _part(i * plan.keys // plan.heads, plan.D)], count) for i in heads]
        for x in (refs.key, refs.query)
    )
    pairs = [(i, min(i + 1, plan.heads - 1)) for i in heads[::2]]
    scores = [_scores(plan, [queries[i] for i in pair], [keys[i] for i in pair]) for pair in pairs]
    past = [_past(plan, rough, queries[i], keys[i], refs.state[0, i]) for i in heads]
    decays = [_decays(gates, i) for i in range(len(pairs))]
    weights = [parts(found[0] * decay, rough) for found, decay in zip(scores, decays, strict=True)]
    values: list[jax.Array] = [refs.value[0, :, _part(i, plan.Dv)] for i in heads]
    if plan.beta:
        # With B the diagonal matrix of betas, (I + B M)⁻¹ B = B (I + M B)⁻¹, whose betas are along the lanes.
        systems = [
            jnp.where(_is_before(), found[1] * decay * gates.row("beta", i), 0.0)
            for i, (found, decay) in enumerate(zip(scores, decays, strict=True))
        ]
        solutions = [parts(x, count) for x in inverses(systems, count)]
        targets = [
            x.astype(jnp.float32) - past[i].of_key * gates.of_head("kept", i, plan.Dv) for i, x in enumerate(values)
        ]
        values = [
            product(_half(solutions[i // 2], i), parts(x, count), count) * gates.of_head("beta", i, plan.Dv)
            for i, x in enumerate(targets)
        ]
    for i in heads:
        found = product(_half(weights[i // 2], i), parts(values[i], rough), rough)
        outputs = (past[i].of_query * gates.of_head("kept", i, plan.Dv) + found) * plan.scale
        refs.outputs[0, :, _part(i, plan.Dv)] = outputs.astype(refs.outputs.dtype)
        added = parts(values[i].astype(jnp.float32) * gates.of_head("to_end", i, plan.Dv), count)
        whole = jnp.concatenate([gates.whole(i)] * (plan.Dv // LANES), axis=1)
        refs.state[0, i] = whole * refs.state[0, i] + product(keys[i], added, count, BY_COLUMNS)


def _scores(plan: LinearPlan, queries: list[list[jax.Array]], keys: list[list[jax.Array]]) -> list[jax.Array]:
    """Of a pair of heads, [C, 128]: products of queries with keys, and with the delta rule of keys with keys."""
    rows = [*queries, *(keys if plan.beta else [])]
    found = product(_stacked(rows), _stacked(keys), plan.passes, BY_ROWS)
    is_first = lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), 1) < CHUNK
    cut = [found[_part(i, CHUNK)] for i in range(len(rows))]
    return [jnp.where(is_first, cut[i], cut[i + 1]) for i in range(0, len(cut), 2)]


def _past(plan: LinearPlan, rough: int, query: list[jax.Array], key: list[jax.Array], state: jax.Array) -> Past:
    states = parts(state, plan.passes)
    if not plan.beta:
        return Past(product(query, states, rough), None)
    found = product(_stacked([query, key]), states, rough)
    of_query, of_key = found[:CHUNK], found[CHUNK:]
    return Past(of_query, of_key if rough == plan.passes else of_key + product(key, states[1:], plan.passes - 1))


def _decays(gates: Gates, pair: int) -> jax.Array:
    """The products of decays after token j up to token i, 0 for i < j; [C, 128] of a pair of heads."""

    def difference(name: str) -> jax.Array:
        return gates.of_pair(name, pair) - gates.row(name, pair)

    keeps = (difference("resets") == 0) & ~_is_before(reverse=True)
    return jnp.exp(jnp.where(keeps, difference("coarse") + difference("fine"), -jnp.inf))


def _is_before(reverse: bool = False) -> jax.Array:
    """Whether token j is before token i; the reverse: whether i is before j. [C, 128]."""
    row, lane = (lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), axis) for axis in (0, 1))
    column = lane & (CHUNK - 1)
    return row < column if reverse else column < row


def _part(i: int, width: int) -> slice:
    """The i-th ``width`` lanes or rows."""
    return slice(i * width, (i + 1) * width)


def _half(x: list[jax.Array], head: int) -> list[jax.Array]:
    """A head's half of the lanes of a pair's parts."""
    return [part[:, _part(head % 2, CHUNK)] for part in x]


def _stacked(matrices: list[list[jax.Array]]) -> list[jax.Array]:
    """The parts of matrices one below the other."""
    return [jnp.concatenate(each, axis=0) for each in zip(*matrices, strict=True)]
