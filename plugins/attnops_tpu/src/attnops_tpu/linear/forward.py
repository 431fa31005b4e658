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
from attnops_tpu.linear.channels import chunks
from attnops_tpu.linear.chunk import Kept, chunk, half, part, past
from attnops_tpu.linear.decode import decode
from attnops_tpu.linear.plan import LANES, LinearPlan, compiler_params
from attnops_tpu.linear.plan import plan as make_plan
from attnops_tpu.linear.prepare import CHUNK, Arrays, arrays, copies, finished, of_batch
from attnops_tpu.linear.products import BY_COLUMNS, parts, product
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
    # Of `attnops_tpu.linear.chunk.Kept`, or None.
    states: Any  # [1, 1, h, D, Dv]
    inverses: Any  # [1, 1, 1, p · C, 2 · C]


def forward(
    metadata: OperationMetadata, query: jax.Array, key: jax.Array, value: jax.Array, **options: Any
) -> LinearOutput:
    """See `attnops_linear.LinearAttention.forward_native`."""
    return forward_with_states(metadata, query, key, value, keeps=False, **options)[0]


def forward_with_states(
    metadata: OperationMetadata, query: jax.Array, key: jax.Array, value: jax.Array, *,
    decay: jax.Array | None = None, beta: jax.Array | None = None, scale: float | None = None,
    initial_state: jax.Array | None = None, mask: Any = None, return_state: bool = False, keeps: bool = True,
) -> tuple[LinearOutput, Kept | None]:  # fmt: skip
    """The output, and what reverse mode keeps of more than `FEW` tokens, unless decays are by channel."""
    (B, T, _, D), (H, Dv) = query.shape, value.shape[2:]
    plan = make_plan(metadata, query, value, scale, beta is not None, keeps)
    kept = None
    if T <= FEW:
        outputs, state = decode(plan, query, key, value, decay, beta, initial_state, mask)
    elif decay is not None and decay.ndim == 4:
        outputs, state = chunks(plan, query, key, value, decay, beta, initial_state, mask)
    else:
        given = arrays(plan, query, key, value, decay, beta, initial_state, mask)
        outputs, state, *more = finished(plan, _call(plan, given))
        outputs = outputs.reshape(B, -1, H, plan.Dv)
        kept = Kept(more[0], more[1] if plan.beta else None) if keeps else None
    outputs = outputs[:, :T, :, :Dv]
    if mask is not None and mask.is_token is not None:
        outputs = jnp.where(mask.is_token[:, :, None, None], outputs, 0)
    return LinearOutput(outputs, state[:, :, :D, :Dv] if return_state else None), kept


@folds_batch
def _call(plan: LinearPlan, given: Arrays) -> tuple[jax.Array, ...]:
    """The outputs [B, N · C, H · Dv], the last state [B, H, D, Dv] and, with ``plan.keeps``, the arrays of `Kept`."""
    given, copied = equally_varying((Arrays(*(of_batch(plan, x) for x in given)), copies()))
    (B, H), N = given.state.shape[:2], given.rows.shape[2]
    keys, heads = plan.keys, plan.heads
    # How many steps in turn have the same key head.
    same = H * plan.D // given.key.shape[2] * keys // heads

    def of_keys(b: Any, h: Any, n: Any) -> tuple[Any, ...]:
        return b, n, lax.div(h, jnp.int32(same))

    def of_chunk(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, 1, *x.shape[3:]), lambda b, h, n: (b, h, n, 0, 0))

    initial = Input(given.state, pl.BlockSpec((1, heads, plan.D, plan.Dv), lambda b, h, n: (b, h, 0, 0)))
    values = pl.BlockSpec((1, CHUNK, heads * plan.Dv), lambda b, h, n: (b, n, h))
    shape = *given.columns.shape[:3], given.columns.shape[4], 2 * CHUNK
    inverses = output_like(given.value, shape, jnp.dtype(jnp.bfloat16 if plan.passes == 1 else jnp.float32))
    refs = Refs(
        Input(given.query, pl.BlockSpec((1, CHUNK, keys * plan.D), of_keys)),
        Input(given.key, pl.BlockSpec((1, CHUNK, keys * plan.D), of_keys)),
        Input(given.value, values),
        Input(given.rows, of_chunk(given.rows)),
        Input(given.columns, of_chunk(given.columns)),
        Input(copied, pl.BlockSpec(copied.shape, lambda b, h, n: (0, 0))),
        initial,
        Output(output_like(given.value, given.value.shape, plan.dtype), values),
        Output(output_like(given.value, given.state.shape, jnp.dtype(jnp.float32)), initial.spec, over=initial),
        Output(output_like(given.value, (B, N, *given.state.shape[1:]), jnp.dtype(jnp.float32)), pl.BlockSpec(
            (1, 1, heads, plan.D, plan.Dv), lambda b, h, n: (b, n, h, 0, 0))) if plan.keeps else None,
        Output(inverses, of_chunk(inverses)) if plan.keeps and plan.beta else None,
    )  # fmt: skip
    results = call_kernel(
        functools.partial(_kernel, plan), refs, "linear_attention", grid=(B, H // heads, N),
        params=compiler_params(plan, refs, 3), interpret=plan.interpret,
    )  # fmt: skip
    return tuple(results)


def _kernel(plan: LinearPlan, refs: Refs) -> None:
    """A chunk of some heads."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        refs.state[...] = refs.initial[...]

    if refs.states is not None:
        refs.states[0, 0] = refs.state[0]
    # Outputs of bfloat16 arrays are rounded to it, and need no other parts.
    count, rough = plan.passes, plan.passes if refs.key.dtype == jnp.float32 else 1
    heads = range(plan.heads)
    found = chunk(plan, refs, lambda i, query, key: past(plan, rough, refs.state[0, i], query, key))
    gates = found.gates
    if refs.inverses is not None:
        for i, x in enumerate(found.inverses):
            refs.inverses[0, 0, 0, part(i, CHUNK)] = x.astype(refs.inverses.dtype)
    weights = [parts(x[0] * decay, rough) for x, decay in zip(found.scores, found.decays, strict=True)]
    for i in heads:
        inside = product(half(weights[i // 2], i), parts(found.updates[i], rough), rough)
        outputs = (found.past[i].of_query * gates.of_head("kept", i, plan.Dv) + inside) * plan.scale
        refs.outputs[0, :, part(i, plan.Dv)] = outputs.astype(refs.outputs.dtype)
        added = parts(found.updates[i].astype(jnp.float32) * gates.of_head("to_end", i, plan.Dv), count)
        whole = jnp.concatenate([gates.whole(i)] * (plan.Dv // LANES), axis=1)
        refs.state[0, i] = whole * refs.state[0, i] + product(found.keys[i], added, count, BY_COLUMNS)
