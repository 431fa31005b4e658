"""Kernels of other libraries for a prompt over pages, which `tpu_prefill.py` counts: ``ragged_paged_attention`` v3 of
tpu-inference (its kernel for mixed batches), flywheel-tpu's paged kernel and tokamax's ``batched_rpa``, each with its
own choice of tiles. See `tpu_decode_peers` for what they need.

All parts of a kernel are added up for the row with the prompt. RPA v3 loops over tiles of queries, blocks of keys and
parts of these, at depths 2 to 4 (1 is its grid), and masks all parts. flywheel's loops are those of `tpu_flywheel`; its
masked body, which skips what no query of a tile sees, is counted in full. ``batched_rpa`` has one step for each tile of
queries and block of keys.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import tpu_flywheel
from tpu_block import estimated_cycles
from tpu_decode_peers import REFUSALS, arrays, peer_loop, rpa_v3_module
from tpu_kernels import run

from attnops_tpu.aot import compile_for
from attnops_tpu.collectives import KERNEL as CALL
from attnops_tpu.memory import outside_bytes
from attnops_tpu.schedule import Schedule, measure

PAGE: Final = 128
LANES: Final = 128
# Slots of the row, whose pages are more than vector memory.
SLOTS: Final = 1 << 15


class Shape(NamedTuple):
    """Heads and features, and the tiles of RPA v3.

    Attributes:
        heads: H.
        kv_heads: K.
        head_dim: D.
        sizes: queries, keys, queries at a time, keys at a time; empty for the kernel's own choice.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    sizes: tuple[int, ...] = ()


LLAMA: Final = Shape()


class Tile(NamedTuple):
    """Queries and keys of a block, and keys at a time."""

    bq: int
    bk: int
    keys: int


class Prompt(NamedTuple):
    """The kernel of a library for one prompt.

    Attributes:
        tile: its tile.
        bundles: of the whole prompt.
        reads: tokens that it reads.
        steady: bundles for 512 × 512 scores that nothing is masked of.
    """

    tile: Tile
    bundles: float
    reads: int
    steady: float


class Program(NamedTuple):
    """The compiled program that has the kernel of a library for one prompt.

    Attributes:
        outside: bytes that it moves outside of the kernel.
        estimate: the cycles that XLA estimates for what is outside of the kernel.
        temporaries: bytes that it has besides arguments and results.
    """

    outside: int
    estimate: int
    temporaries: int


def _rpa_v3(generation: str, queries: int, shape: Shape) -> tuple[Callable[..., Any], tuple[Any, ...], Tile]:
    import jax.numpy as jnp

    module = rpa_v3_module(generation)
    H, K, D, given = shape
    floats, ints = arrays()
    M = SLOTS // PAGE
    pages = floats(*module.get_kv_cache_shape(M, PAGE, K, D, jnp.bfloat16))
    new = floats(queries, K, D)
    chosen = module.get_default_block_sizes(
        jnp.bfloat16, jnp.bfloat16, H, K, D, PAGE, queries, 1, M, case=module.RpaCase.MIXED
    )
    sizes = given or tuple(chosen[name] for name in ("bq_sz", "bkv_sz", "bq_csz", "bkv_csz"))

    def run(*args: Any) -> Any:
        return module.ragged_paged_attention(
            *args, sm_scale=D**-0.5, m_block_sizes=sizes, vmem_limit_bytes=VMEM[generation]
        )

    query = floats(queries, H, D)
    return run, (query, new, new, pages, ints(1), ints(M), ints(2), ints(3)), Tile(sizes[0], sizes[1], sizes[3])


def _flywheel(generation: str, queries: int, shape: Shape) -> tuple[Callable[..., Any], tuple[Any, ...], Tile]:
    tpu_flywheel.pretend(generation)
    H, K, D, _ = shape
    from flywheel_tpu import flash_attn_with_kvcache
    from flywheel_tpu.pallas.flash_fwd_varlen_paged import resolve_paged_tiles

    floats, ints = arrays()
    M = SLOTS // PAGE
    tiles = resolve_paged_tiles(
        max_seqlen_q_bucket=queries, max_seqlen_k_bucket=SLOTS, page_size=PAGE, head_dim=D, return_lse=False,
        rotary_dtype=None, gqa_fold=H // K, has_window=False,
    )  # fmt: skip

    def run(q: Any, k: Any, v: Any, pages: Any, lengths: Any, table: Any) -> Any:
        return flash_attn_with_kvcache(q, pages, None, k, v, cache_seqlens=lengths, block_table=table, causal=True)

    new = floats(1, queries, K, D)
    query, pages = floats(1, queries, H, D), floats(M, PAGE, 2 * K, D)
    return (
        run,
        (query, new, new, pages, ints(1), ints(1, M)),
        Tile(tiles.block_q, tiles.block_kv, tiles.block_kv_compute),
    )


def _batched(generation: str, queries: int, shape: Shape) -> tuple[Callable[..., Any], tuple[Any, ...], Tile]:
    tpu_flywheel.pretend(generation)
    H, K, D, _ = shape
    from tokamax._src.ops.batched_rpa.kernel import configs, wrapper

    floats, ints = arrays()
    M, lanes = SLOTS // PAGE, -(-D // LANES) * LANES
    # One prompt fills no batch of two.
    sizes = configs.BlockSizes(bq_sz=BATCHED[0], bq_c_sz=BATCHED[0], bkv_sz=BATCHED[1], batch_size=1, n_buffer=2)

    def run(*args: Any) -> Any:
        return wrapper.ragged_paged_attention(*args, sm_scale=D**-0.5, prefill_block_sizes=sizes)

    new = floats(queries, K, D)
    pages = floats(M, PAGE, 2 * K, lanes)
    query = floats(queries, H, D)
    return run, (query, new, new, pages, ints(1), ints(M), ints(2), ints(3)), Tile(*BATCHED, BATCHED[1])


VMEM: Final = {"v5e": 100 << 20, "v5p": 50 << 20, "v6e": 100 << 20, "tpu7x": 50 << 20}
# tokamax's own choice at 8 kv heads.
BATCHED: Final = 128, 512
# A part of the kernel's name, and the function.
PEERS: Final[dict[str, tuple[str, Callable[..., Any]]]] = {
    "RPA v3": ("RPAm", _rpa_v3),
    "flywheel": ("flash_attn_varlen_paged", _flywheel),
    "batched_rpa": ("RPAm", _batched),
}


def _rpa_v3_bundles(schedule: Schedule, tile: Tile, blocks: list[tuple[int, int]], K: int) -> tuple[float, float]:
    """The bundles of a prompt and of a block that no query is masked of.

    Args:
        schedule: the kernel's.
        tile: its tile.
        blocks: for each tile of queries the blocks of keys, and their parts.
        K: kv heads.
    """
    runs = [(depth, len(list(run))) for depth, run in itertools.groupby(schedule.depths)]
    part = max(n for depth, n in runs if depth >= 4)
    of = {depth: sum(n for d, n in runs if d == depth) for depth in (0, 1, 2, 3)}
    total = of[0] + of[1] + sum(of[2] + n * of[3] + parts * part for n, parts in blocks)
    return float(total), of[3] + tile.bk / tile.keys * part


def _flywheel_bundles(schedule: Schedule, tile: Tile, blocks: list[tuple[int, int]], K: int) -> tuple[float, float]:
    depths = [(depth, len(list(run))) for depth, run in itertools.groupby(schedule.depths)]
    outline = tpu_flywheel.Outline(depths, [tuple(span[:3]) for span in schedule.spans])
    tiles, rows = sum(n for n, _ in blocks), len(blocks)
    # The masked body comes first in this kernel's code, and pages are waited for and unpacked before it for each tile.
    parts = tpu_flywheel.bundles(outline, rows, tiles, [float(rows), float(tiles - rows)], loads=tiles)
    one, two = (sum(tpu_flywheel.bundles(outline, 0, n, [0.0, float(n)], loads=n).values()) for n in (1, 2))
    # For each kv head.
    return K * (sum(parts.values()) - parts["once"]), K * (two - one)


def _batched_bundles(schedule: Schedule, tile: Tile, blocks: list[tuple[int, int]], K: int) -> tuple[float, float]:
    step = peer_loop(schedule)
    return float(step * sum(n for n, _ in blocks)), float(step)


# The queries from which on a kernel's tiles, and so its code, are the same.
SAME_FROM: Final = {"RPA v3": 512, "flywheel": 2048, "batched_rpa": 512}
COUNTS: Final = {"RPA v3": _rpa_v3_bundles, "flywheel": _flywheel_bundles, "batched_rpa": _batched_bundles}


@functools.cache
def _told(name: str, generation: str, queries: int, shape: Shape) -> tuple[str, Tile, Program]:
    """What a process prints that compiles a program: the kernel's name, its tile, and the program."""
    kernel, tile, program = run(_command(name, generation, queries, shape))
    return kernel, Tile(*tile), Program(*program)


def _command(name: str, generation: str, queries: int, shape: Shape) -> list[str]:
    return [str(Path(__file__).resolve()), json.dumps([name, generation, queries, shape])]


@functools.cache
def _compiled(name: str, generation: str, queries: int, shape: Shape) -> tuple[Schedule, Tile]:
    # Compiled twice, since a dump of the whole program multiplies the compiler's time.
    kernel, tile, _ = _told(name, generation, queries, shape)
    return measure(_command(name, generation, queries, shape), only=kernel)[0], tile


def program(name: str, generation: str, queries: int, shape: Shape = LLAMA) -> Program:
    """The program of a library for a prompt; if its own tiles do not fit so many queries, that of fewer, times more."""
    try:
        return _told(name, generation, queries, shape)[2]
    except RuntimeError as error:
        fewer = SAME_FROM[name]
        if queries <= fewer or not any(refusal in str(error) for refusal in REFUSALS):
            raise
        return Program(*(x * queries // fewer for x in _told(name, generation, fewer, shape)[2]))


def prompts(generation: str, queries: int, context: int, shape: Shape = LLAMA) -> dict[str, Prompt]:
    """`prompt` of each library whose kernel the compiler takes."""
    result = {}
    for name in PEERS:
        try:
            compiled = min(queries, SAME_FROM[name])
            result[name] = prompt(name, generation, queries, context, shape, compiled)
        except RuntimeError as error:
            if not any(refusal in str(error) for refusal in REFUSALS):
                raise
    return result


def prompt(name: str, generation: str, queries: int, context: int, shape: Shape = LLAMA, compiled: int = 0) -> Prompt:
    """The kernel of a library for a prompt at the end of so many tokens.

    Args:
        name: one of `PEERS`.
        generation: the TPU.
        queries: tokens of the prompt.
        context: tokens at whose end it is.
        shape: the heads.
        compiled: queries for which the kernel is compiled, if its code is the same; 0 for as many as the prompt has.
    """
    compiled = compiled or queries
    schedule, tile = _compiled(name, generation, compiled, shape)
    ends = [min(first + tile.bq, context) for first in range(context - queries, context, tile.bq)]
    blocks = [(-(-end // tile.bk), -(-end // tile.keys)) for end in ends]
    whole, block = COUNTS[name](schedule, tile, blocks, shape.kv_heads)
    steady = block * 512**2 / (shape.heads * tile.bq * tile.bk)
    return Prompt(tile, whole, sum(ends), steady)


if __name__ == "__main__":
    peer, of_generation, of_queries, of_shape = json.loads(sys.argv[1])
    heads = Shape(*of_shape[:3], tuple(of_shape[3]))
    function, given_arguments, of_tile = PEERS[peer][1](of_generation, of_queries, heads)
    result = compile_for(function, given_arguments, of_generation, donated=(3,))  # the pages
    text = result.as_text() or ""
    (kernel,) = re.findall(rf"%({PEERS[peer][0]}[\w.\-]*) = [^\n]*" + re.escape(CALL), text)
    temporaries = result.memory_analysis().temp_size_in_bytes
    print(json.dumps([kernel, of_tile, [outside_bytes(text), estimated_cycles(text), temporaries]]))
