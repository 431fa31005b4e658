"""The gradients of biases that have an element per score or per distance; only for biases that are differentiated."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attnops.kernels import one_by_one
from attnops_triton.flash.backward import Inputs, input_operands
from attnops_triton.flash.operands import Arrays, Operand
from attnops_triton.flash.plan import FlashPlan, cdiv
from attnops_triton.flash.steps import recompute_weights, score_gradients
from attnops_triton.flash.tile import TileWriter
from attnops_triton.flash.tile_schedule import EveryTile
from attnops_triton.language.launch import launch
from attnops_triton.language.source import SourceWriter


@one_by_one
def array_gradient(plan: FlashPlan, inputs: Inputs, arrays: Arrays, tiles: EveryTile) -> jax.Array:
    """The gradient of an array bias [B or 1, H or 1, T, S], float32, summed over the batches and heads that share an
    element.

    Args:
        plan: the plan of the call.
        inputs: query, key, value, the output's cotangent, and the statistics per query.
        arrays: the other inputs of the scores: masks, biases, sinks and the dropout hash.
        tiles: the coverage of every tile.
    """
    assert arrays.array is not None
    shape = arrays.array.shape
    operands = [*input_operands(plan, inputs, arrays), *_tile_operands(tiles)]
    outputs = {"d_array": jax.ShapeDtypeStruct(shape, jnp.float32)}
    write, sizes = SourceWriter(), plan.by_score
    tile = TileWriter.make(write, plan, sizes, operands)
    rows, columns = cdiv(plan.T, sizes.bq), cdiv(plan.S, sizes.bk)
    write.integer("rows", rows)
    write.integer("columns", columns)
    write(
        "pid = tl.program_id(0)",
        "row = pid // columns % rows",
        "column = pid % columns",
        "lead = pid // (rows * columns)",
        f"q0 = row * {sizes.bq}",
        f"kv0 = column * {sizes.bk}",
        f"acc = tl.full({tile.shape}, 0.0, tl.float32)",
    )
    tile.queries()
    tile.keys()
    batches, heads = (1 if size > 1 else full for size, full in zip(shape, (plan.B, plan.H), strict=False))
    with write.block(f"for r in range(0, {write.integer('batches', batches)} * {heads}):"):
        write(f"b = lead // {shape[1]} + r // {heads}", f"h = lead % {shape[1]} + r % {heads}")
        _add(tile, operands)
    at = "d_array_ptr + lead.to(tl.int64) * T * S + q0.to(tl.int64) * S + kv0.to(tl.int64)"
    write(f"tl.store({at} + (qx - q0) * S + (kx - kv0), acc, mask=(qx < T) & (kx < S))")
    programs = shape[0] * shape[1] * rows * columns
    return launch(plan, sizes, write, "attnops_flash_array_gradient", operands, outputs, programs)["d_array"]


@one_by_one
def table_gradient(plan: FlashPlan, inputs: Inputs, arrays: Arrays, tiles: EveryTile) -> jax.Array:
    """The gradient of a table by distance, [1, H, T + S − 1], float32. It needs O((T + S) · block) memory per head.

    All tiles of a block diagonal have the same distances at the same positions. A program adds the tiles of one
    diagonal, over all batches. XLA then adds the elements of a tile that have the same distance.

    Args:
        plan: the plan of the call.
        inputs: query, key, value, the output's cotangent, and the statistics per query.
        arrays: the other inputs of the scores: masks, biases, sinks and the dropout hash.
        tiles: the coverage of every tile; tiles are square.
    """
    operands = [*input_operands(plan, inputs, arrays), *_tile_operands(tiles)]
    write, sizes = SourceWriter(), plan.by_score
    n = sizes.bq
    tile = TileWriter.make(write, plan, sizes, operands)
    rows, columns = cdiv(plan.T, n), cdiv(plan.S, n)
    diagonals = rows + columns - 1
    outputs = {"sums": jax.ShapeDtypeStruct((plan.H, diagonals, n, n), jnp.float32)}
    write.integer("rows", rows)
    write.integer("columns", columns)
    write(
        "pid = tl.program_id(0)",
        "h = pid // (rows + columns - 1)",
        "ahead = pid % (rows + columns - 1) - (rows - 1)",
        "first = tl.maximum(0, -ahead)",
        "last = tl.minimum(rows, columns - ahead)",
        f"acc = tl.full({tile.shape}, 0.0, tl.float32)",
    )
    with write.block("for r in range(first, last):"):
        write("row = r + 0", "column = row + ahead", f"q0 = row * {n}", f"kv0 = column * {n}")
        tile.queries()
        tile.keys()
        with write.block(f"for batch in range(0, {write.integer('batches', plan.B)}):"):
            write("b = h * 0 + batch")
            _add(tile, operands)
    i = f"tl.arange(0, {n})"
    write(f"tl.store(sums_ptr + pid.to(tl.int64) * {n * n} + {i}[:, None] * {n} + {i}[None, :], acc)")
    sums = launch(plan, sizes, write, "attnops_flash_table_gradient", operands, outputs, plan.H * diagonals)["sums"]
    return _by_distance(sums, plan)


def _tile_operands(tiles: EveryTile) -> list[Operand]:
    return [Operand(name, array) for name, array in tiles._asdict().items() if array is not None]


def _add(tile: TileWriter, operands: list[Operand]) -> None:
    """Add the gradient of the tile's scores to ``acc``."""
    write, plan = tile.write, tile.plan
    at = f"{tile.base('coverage', 'rows * columns')} + row * columns + column"
    with write.block(f"if tl.load({at}) > 0:"):
        write(f"k = h // {plan.G}")
        if plan.bit_mask:
            write(f"bits_at = tl.load({tile.base('numbers', 'rows * columns')} + row * columns + column)")
        tile.load("q", "q", plan.H, "h", plan.D, True)
        tile.load("d_out", "q", plan.H, "h", plan.Dv, True)
        tile.load_values("", False)
        tile.load_values("q", True)
        tile.load_statistics(True)
        tile.load("k", "kv", plan.K, "k", plan.D, True)
        tile.load_values("kv", True)
        tile.product("s", "q", "k", plan.D)
        tile.load("v", "kv", plan.K, "k", plan.Dv, True)
        tile.product("dp", "d_out", "v", plan.Dv)
        has_ok = recompute_weights(tile, True, True)
        if plan.scoring.dropout_prob:
            tile.dropout()
        score_gradients(tile, has_ok)
        write("acc += ds")


def _by_distance(sums: jax.Array, plan: FlashPlan) -> jax.Array:
    """The sums of diagonals [H, diagonals, n, n], summed by distance: [1, H, T + S − 1]."""
    H, diagonals, n, _ = sums.shape
    # Reverse the rows, then shift each by one more column than the row before it. A reshape does that: element (i, j)
    # of a row-major n × 2n array is at 2n · i + j = (2n − 1) · i + (i + j). All elements of a column then have one
    # distance.
    wide = jnp.pad(jnp.flip(sums, 2), ((0, 0), (0, 0), (0, 0), (0, n))).reshape(H, diagonals, -1)
    by_column = wide[..., : n * (2 * n - 1)].reshape(H, diagonals, n, 2 * n - 1).sum(2)
    near, far = by_column[..., :n], jnp.pad(by_column[..., n:], ((0, 0), (0, 0), (0, 1)))
    both = jnp.pad(near.reshape(H, -1), ((0, 0), (0, n))) + jnp.pad(far.reshape(H, -1), ((0, 0), (n, 0)))
    first = cdiv(plan.T, n) * n - plan.T
    return both[None, :, first : first + plan.T + plan.S - 1]
