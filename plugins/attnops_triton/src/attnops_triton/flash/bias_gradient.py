"""The gradients of biases that have an element per score or per distance; only for biases that are differentiated."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attnops.kernels import one_by_one
from attnops_triton.flash.backward import Inputs, input_operands
from attnops_triton.flash.kernels.bias_gradient import attnops_flash_array_gradient, attnops_flash_table_gradient
from attnops_triton.flash.launch import launch
from attnops_triton.flash.operands import Arrays, Operand
from attnops_triton.flash.plan import FlashPlan, cdiv
from attnops_triton.flash.tile_schedule import EveryTile


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
    operands = [*input_operands(inputs, arrays), *_tile_operands(tiles)]
    outputs = {"d_array": jax.ShapeDtypeStruct(shape, jnp.float32)}
    rows, columns = cdiv(plan.T, plan.by_score.bq), cdiv(plan.S, plan.by_score.bk)
    batches = 1 if shape[0] > 1 else plan.B
    programs = shape[0] * shape[1] * rows * columns
    sizes = {"rows": rows, "columns": columns, "batches": batches}
    results = launch(plan, plan.by_score, attnops_flash_array_gradient, operands, outputs, programs, sizes)
    return results["d_array"]


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
    operands = [*input_operands(inputs, arrays), *_tile_operands(tiles)]
    n = plan.by_score.bq
    rows, columns = cdiv(plan.T, n), cdiv(plan.S, n)
    programs = plan.H * (rows + columns - 1)
    outputs = {"sums": jax.ShapeDtypeStruct((plan.H, rows + columns - 1, n, n), jnp.float32)}
    sizes = {"rows": rows, "columns": columns, "batches": plan.B}
    results = launch(plan, plan.by_score, attnops_flash_table_gradient, operands, outputs, programs, sizes)
    return _by_distance(results["sums"], plan)


def _tile_operands(tiles: EveryTile) -> list[Operand]:
    return [Operand(name, array) for name, array in tiles._asdict().items() if array is not None]


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
