"""The backward kernels: one by tiles of queries for dq, one by tiles of keys for dk and dv; no atomics, one order.

Both compute the scores again from the logsumexp (Dao 2023, arXiv:2307.08691). Gradients of what an elementwise bias has
one of for each query, key or head are by-products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnops.kernels import folds_batch
from attnops_triton.flash.loops import place_by_key, place_by_query, visit_loops, visit_operands
from attnops_triton.flash.operands import Arrays, Operand, base, score_operands
from attnops_triton.flash.plan import Plan
from attnops_triton.flash.tile import Tile, dtype
from attnops_triton.flash.visits import Visits
from attnops_triton.language.launch import launch
from attnops_triton.language.source import Writer, number


class Inputs(NamedTuple):
    """What the kernels of the backward pass share.

    Attributes:
        q: [B, T, H, D].
        k: [B, S, K, D].
        v: [B, S, K, Dv].
        d_out: [B, T, H, Dv].
        level: [B, H, T], the largest score, see `attnops_triton.flash.forward.forward`; +inf where weights are to be 0.
        rest: [B, H, T], what the logsumexp has beside it.
        delta: [B, H, T], ``d_out · out − d_logsumexp``.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    d_out: jax.Array
    level: jax.Array
    rest: jax.Array
    delta: jax.Array


def input_operands(plan: Plan, inputs: Inputs, arrays: Arrays) -> list[Operand]:
    """`Inputs` and what scores depend on beside them."""
    return [Operand(name, x) for name, x in zip(Inputs._fields, inputs, strict=True)] + score_operands(plan, arrays)


def by_query(
    plan: Plan, inputs: Inputs, arrays: Arrays, visits: Visits, wanted: tuple[int, ...]
) -> tuple[jax.Array, dict[int, jax.Array]]:
    """The gradient of query, [B, T, H, D], and of values of the bias, [B, H, T] each.

    Args:
        plan: of the call.
        inputs: see `Inputs`.
        arrays: what scores depend on beside these.
        visits: by tiles of queries.
        wanted: the numbers of the values, of a query or of a head, whose gradients are asked for; a head's is the sum.
    """
    dq, *rest = _by_query(plan, inputs, arrays, visits, wanted)
    return dq, dict(zip(wanted, rest, strict=True))


def by_key(
    plan: Plan, inputs: Inputs, arrays: Arrays, visits: Visits, wanted: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, dict[int, jax.Array]]:
    """The gradients of key, [B, S, K, D], of value, [B, S, K, Dv], and of values of the bias, [B, H, S] each.

    Args:
        plan: of the call.
        inputs: see `Inputs`.
        arrays: what scores depend on beside these.
        visits: by tiles of keys.
        wanted: the numbers of the values, of a key, whose gradients are asked for.
    """
    dk, dv, *rest = _by_key(plan, inputs, arrays, visits, wanted)
    return dk, dv, dict(zip(wanted, rest, strict=True))


def _by_query(plan: Plan, inputs: Inputs, arrays: Arrays, visits: Visits, wanted: tuple[int, ...]) -> Any:
    @folds_batch
    def run(plan: Plan, inputs: Inputs, arrays: Arrays, visits: Visits) -> Any:
        operands = [*input_operands(plan, inputs, arrays), *visit_operands(visits)]
        outputs = {"dq": jax.ShapeDtypeStruct((plan.B, plan.T, plan.H, plan.D), jnp.dtype(plan.gradient_dtype))}
        outputs |= {f"dq_bias{i}": jax.ShapeDtypeStruct((plan.B, plan.H, plan.T), jnp.float32) for i in wanted}
        write = Writer()
        programs = _write_by_query(write, plan, operands, visits, wanted)
        found = launch(plan, plan.by_query, write, "attnops_flash_backward_query", operands, outputs, programs)
        return tuple(found.values())

    return run(plan, inputs, arrays, visits)


def _by_key(plan: Plan, inputs: Inputs, arrays: Arrays, visits: Visits, wanted: tuple[int, ...]) -> Any:
    @folds_batch
    def run(plan: Plan, inputs: Inputs, arrays: Arrays, visits: Visits) -> Any:
        operands = [*input_operands(plan, inputs, arrays), *visit_operands(visits)]
        shapes = {"dk": (plan.B, plan.S, plan.K, plan.D), "dv": (plan.B, plan.S, plan.K, plan.Dv)}
        outputs = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(plan.gradient_dtype)) for name, shape in shapes.items()}
        outputs |= {f"dk_bias{i}": jax.ShapeDtypeStruct((plan.B, plan.H, plan.S), jnp.float32) for i in wanted}
        write = Writer()
        programs = _write_by_key(write, plan, operands, visits, wanted)
        found = launch(plan, plan.by_key, write, "attnops_flash_backward_key", operands, outputs, programs)
        return tuple(found.values())

    return run(plan, inputs, arrays, visits)


def weights_again(tile: Tile, masked: bool, edge: bool) -> bool:
    """Write ``p`` from the products ``s``; whether there is ``ok``, which scores count.

    Args:
        tile: the tile.
        masked: whether the mask is to be applied.
        edge: whether keys beyond the last are to be left out.
    """
    scoring, write = tile.plan.scoring, tile.write
    has_ok = masked and tile.allowed(edge)
    if has_ok and scoring.has_fully_masked_tokens and scoring.changes_scores:
        # Else derivatives would be 0 times NaN where nobody sees.
        write("s = tl.where(ok, s, 0.0)")
    tile.change()
    if has_ok:
        write('s = tl.where(ok, s, float("-inf"))')
    tile.weights("level", "rest")
    return has_ok


def score_gradients(tile: Tile, has_ok: bool) -> None:
    """Write ``ds``, the gradient of the changed scores, from ``p``, ``dp`` and, with dropout, ``keep``."""
    scoring, write = tile.plan.scoring, tile.write
    beside = tile.beside("q")
    if scoring.dropout_prob:
        write(f"dp = tl.where(keep, dp * {number(1 / (1 - scoring.dropout_prob))}, 0.0)")
    write(f"ds = p * (dp - delta{beside})")
    if has_ok and scoring.has_fully_masked_tokens:
        write("ds = tl.where(ok, ds, 0.0)")


def _write_by_query(write: Writer, plan: Plan, operands: list[Operand], visits: Visits, wanted: tuple[int, ...]) -> int:
    bq, bk, scoring = plan.by_query.bq, plan.by_query.bk, plan.scoring
    tile = Tile.make(write, plan, bq, bk, operands)
    ragged = plan.T % bq != 0
    programs = place_by_query(write, plan, bq)
    write(f"q0 = row * {bq}")
    tile.queries()
    tile.rows("q", "q", plan.H, "h", plan.D, ragged)
    tile.rows("d_out", "q", plan.H, "h", plan.Dv, ragged)
    tile.values_of("", False)
    tile.values_of("q", ragged)
    tile.level(ragged)
    for i, (_, width) in enumerate(plan.pieces(plan.D)):
        write(f"dq_{i} = tl.full([{bq}, {width}], 0.0, tl.float32)")
    for i in wanted:
        write(f"dq_bias{i} = tl.full([{bq}], 0.0, tl.float32)")

    def body(masked: bool) -> None:
        edge = masked and plan.S % bk != 0
        tile.keys()
        tile.rows("k", "kv", plan.K, "k", plan.D, edge)
        tile.values_of("kv", edge)
        tile.product("s", "q", "k", plan.D)
        tile.rows("v", "kv", plan.K, "k", plan.Dv, edge)
        tile.product("dp", "d_out", "v", plan.Dv)
        has_ok = weights_again(tile, masked, edge)
        if scoring.dropout_prob:
            tile.keep()
        score_gradients(tile, has_ok)
        tile.pull_back()
        for i in wanted:
            write(f"dq_bias{i} += tl.reduce(d_bias{i}, 1, total)")
        if has_ok:
            tile.hide("kv", *(f"k_{i}" for i in range(len(plan.pieces(plan.D)))))
        write(f"ds = ds.to({dtype(plan)})")
        for i in range(len(plan.pieces(plan.D))):
            tile.dot(f"dq_{i}", "ds", f"k_{i}", add=True)

    visit_loops(write, visits, "kv0", bk, body)
    for i in range(len(plan.pieces(plan.D))):
        write(f"dq_{i} = dq_{i} * {number(float(plan.scale))}")
    tile.store_rows("dq", "dq", "q", plan.H, "h", plan.D, f"tl.{plan.gradient_dtype}")
    for i in wanted:
        masked = f", mask=qi < {plan.T}" if ragged else ""
        write(f"tl.store({base(f'dq_bias{i}', (plan.B, plan.H, plan.T))} + qi, dq_bias{i}{masked})")
    return programs


def _write_by_key(write: Writer, plan: Plan, operands: list[Operand], visits: Visits, wanted: tuple[int, ...]) -> int:
    bq, bk, scoring = plan.by_key.bq, plan.by_key.bk, plan.scoring
    tile = Tile.make(write, plan, bq, bk, operands, transposed=True)
    ragged = plan.S % bk != 0
    programs = place_by_key(write, plan, bk)
    write(f"kv0 = row * {bk}")
    tile.keys()
    tile.rows("k", "kv", plan.K, "k", plan.D, ragged)
    tile.rows("v", "kv", plan.K, "k", plan.Dv, ragged)
    for name, dim in (("dk", plan.D), ("dv", plan.Dv)):
        for i, (_, width) in enumerate(plan.pieces(dim)):
            write(f"{name}_{i} = tl.full([{bk}, {width}], 0.0, tl.float32)")

    def body(masked: bool) -> None:
        edge = masked and plan.T % bq != 0
        tile.queries()
        tile.rows("q", "q", plan.H, "h", plan.D, edge)
        tile.values_of("q", edge)
        tile.level(edge)
        tile.product("s", "q", "k", plan.D)
        has_ok = weights_again(tile, masked, scoring.has_fully_masked_tokens)
        tile.rows("d_out", "q", plan.H, "h", plan.Dv, edge)
        if has_ok:
            tile.hide("q", *(f"q_{i}" for i in range(len(plan.pieces(plan.D)))),
                      *(f"d_out_{i}" for i in range(len(plan.pieces(plan.Dv)))))  # fmt: skip
        left = "p"
        if scoring.dropout_prob:
            tile.keep()
            write(f"kept = tl.where(keep, p * {number(1 / (1 - scoring.dropout_prob))}, 0.0)")
            left = "kept"
        write(f"left = {left}.to({dtype(plan)})")
        for i in range(len(plan.pieces(plan.Dv))):
            tile.dot(f"dv_{i}", "left", f"d_out_{i}", add=True)
        tile.product("dp", "d_out", "v", plan.Dv)
        score_gradients(tile, has_ok)
        tile.pull_back()
        for i in wanted:
            write(f"dk_bias{i} += tl.reduce(d_bias{i}, 1, total)")
        write(f"ds = ds.to({dtype(plan)})")
        for i in range(len(plan.pieces(plan.D))):
            tile.dot(f"dk_{i}", "ds", f"q_{i}", add=True)

    with write.block(f"for g in range(0, {plan.G}):"):
        write(f"h = k * {plan.G} + g")
        tile.values_of("", False)
        tile.values_of("kv", ragged)
        for i in wanted:
            write(f"dk_bias{i} = tl.full([{bk}], 0.0, tl.float32)")
        visit_loops(write, visits, "q0", bq, body)
        for i in wanted:
            masked = f", mask=ki < {plan.S}" if ragged else ""
            write(f"tl.store({base(f'dk_bias{i}', (plan.B, plan.H, plan.S))} + ki, dk_bias{i}{masked})")
    for i in range(len(plan.pieces(plan.D))):
        write(f"dk_{i} = dk_{i} * {number(float(plan.scale))}")
    tile.store_rows("dk", "dk", "kv", plan.K, "k", plan.D, f"tl.{plan.gradient_dtype}")
    tile.store_rows("dv", "dv", "kv", plan.K, "k", plan.Dv, f"tl.{plan.gradient_dtype}")
    return programs
