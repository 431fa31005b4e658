"""flywheel-tpu's attention kernels (``pip install flywheel-tpu``, Python 3.12), and how often a problem runs each part
of their code.

A kernel has no grid: it loops over groups of heads, rows of tiles and the tiles of a row, so that the compiler's
schedule has these loops at depths 1 to 3. A tile takes one of several bodies, in the order of the source: the one
without masks; a body for each place of a tile that a static mask cuts, or one with all masks; and what ends a row. Each
forward body contains a second one, which computes the tile again where scores would overflow with the first tile's
maximum; it is counted as never run. How many tiles take which body follows from flywheel's own functions of its
schedule. What is skipped before the bodies (loads of the row's tile) and after them (the row's end) is counted once a
row, everything else in the loop for every tile.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

# Tokens of a document, by which flywheel chooses the tiles of packed sequences.
DOCUMENT: Final = 1024
# Heads that one body computes at documents of this length, by flywheel's table, which has v6e alone.
FOLD: Final = {"v6e": 2}
# Keys before a query that windows show.
LEFT: Final = {"window": 1023, "wide window": 4095}
# Devices as flywheel's tables name them.
_NAMES: Final = {"v5e": "TPU v5", "v5p": "TPU v5", "v6e": "TPU v6", "tpu7x": "TPU v7"}
# Bodies are longer, and other regions shorter.
_BODY: Final = 1000


class Outline(NamedTuple):
    """A kernel's schedule.

    Attributes:
        depths: runs of bundles, (how many loops they are in, how many bundles).
        spans: what each branch may skip, (first bundle, end, how many loops it is in).
    """

    depths: Sequence[tuple[int, int]]
    spans: Sequence[tuple[int, int, int]]


def pretend(generation: str) -> None:
    """Make Pallas and flywheel, which ask the device for its generation, get this one."""
    import jax
    from flywheel_tpu import tuned_block_sizes
    from jax._src import tpu_info

    chips = tpu_info.ChipVersion
    chip = {"v5e": chips.TPU_V5E, "v5p": chips.TPU_V5P, "v6e": chips.TPU_V6E, "tpu7x": chips.TPU_7X}[generation]
    info = tpu_info.get_tpu_info_for_chip(chip, 1)
    tpu_info.registry["cpu"] = lambda: info
    jax.default_backend = lambda *_: "tpu"  # by which flywheel knows how much vector memory there is
    tuned_block_sizes.get_device_name = lambda *_: _NAMES[generation]  # of its tables, by which it folds heads


def _tiles(blocks: Sequence[int], mask: str, T: int) -> Any:
    """The `BlockSizes` of a forward kernel: given or flywheel's own."""
    from flywheel_tpu import flash_attn_interface as flywheel
    from flywheel_tpu.pallas.block_sizes import BlockSizes

    if blocks:
        q, k, at_a_time, keys = blocks
        return BlockSizes(q, k, keys, at_a_time)
    window = (LEFT[mask], 0) if mask in LEFT else (-1, -1)
    documents = (DOCUMENT, DOCUMENT) if mask == "documents" else (None, None)
    return flywheel.default_block_sizes(T, T, *documents, window_size=window)


def function(blocks: Sequence[int], mask: str, heads: int, T: int, D: int, is_backward: bool) -> Callable[..., Any]:
    """Flywheel's attention of [1, T, H, D] arrays; flywheel's own layout is [1, H, T, D].

    Args:
        blocks: tiles of the pass, (queries, keys, queries at a time, keys at a time); empty for flywheel's own.
        mask: causal, full, window, wide window or documents. Documents and windows have no backward pass.
        heads: H.
        T: tokens.
        D: the head dim.
        is_backward: whether `blocks` are those of the backward pass.
    """
    import jax.numpy as jnp
    from flywheel_tpu import flash_attn_interface as flywheel

    if is_backward and blocks:
        names = "block", "block_kv", "block_q_compute", "block_kv_compute"
        flywheel.flash_attn_bwd = functools.partial(flywheel.flash_attn_bwd, **dict(zip(names, blocks, strict=True)))
        blocks = ()

    def of_heads(q: Any, k: Any, v: Any) -> Any:
        if mask == "documents":
            starts = jnp.arange(0, T + 1, DOCUMENT)
            tiles = {"block_sizes": tuple(blocks)} if blocks else {}
            return flywheel.flash_attn_varlen_func(q, k, v, starts, starts, DOCUMENT, DOCUMENT, causal=True, **tiles)
        window = (LEFT[mask], 0) if mask in LEFT else (-1, -1)
        build = functools.partial(
            flywheel.get_kernel, heads, heads, T, T, mask != "full", window, False, 0.0, D, D, 0,
            q_scale=flywheel.fused_q_scale(D**-0.5, 0.0), blocks_override=tuple(blocks) or None,
        )  # fmt: skip
        return flywheel.attn_with_vjp(
            q, k, v, build_kernel=build, softmax_scale=D**-0.5, causal=mask != "full", causal_offset=0,
            interpret=False, bwd_unsupported="", token_major=False, head_dim=None,
        )  # fmt: skip

    def called(q: Any, k: Any, v: Any) -> Any:
        return of_heads(*(x[0].swapaxes(0, 1) for x in (q, k, v))).swapaxes(0, 1)[None]

    return called


def bodies(blocks: Sequence[int], mask: str, T: int) -> tuple[int, int, list[float]]:
    """How many rows of tiles and tiles a head has forward, and how many of them take each body that is in a branch."""
    from flywheel_tpu.pallas import loop_schedule

    tiles = _tiles(blocks, mask, T)
    q, k = tiles.block_q, tiles.block_kv
    if mask == "documents":  # rows do not cross documents, and a tile that is not inside of one takes the masked body
        rows = [(i, j) for i in range(DOCUMENT // q) for j in range(min(DOCUMENT // k, ((i + 1) * q - 1) // k + 1))]
        masked = sum((j + 1) * k > i * q or (j + 1) * k >= DOCUMENT for i, j in rows)
        n = T // DOCUMENT
        return DOCUMENT // q * n, len(rows) * n, [float((len(rows) - masked) * n), float(masked * n)]
    left, right = LEFT.get(mask), None if mask == "full" else 0
    params = loop_schedule.dense_fwd_params(
        num_q_heads=1, head_fold=1, q_heads_per_kv_head=1, seqlen_q=T, seqlen_kv=T, bq=q, bkv=k, left=left,
        right=right, offset=0,
    )  # fmt: skip
    if mask == "full":  # its body is in no branch, but that which computes a tile again is
        return T // q, T // q * (T // k), [0.0]
    plans = loop_schedule.window_fragment_plans(
        bq=q, bkv=k, bq_compute=tiles.block_q_compute, bkv_compute=tiles.block_kv_compute, left=left, right=right,
        causal_offset=0,
    )  # fmt: skip
    count: Counter[int | None] = Counter()
    for row in range(T // q):
        first, last = loop_schedule.dense_row_bounds(row, params)
        offsets = [column * k - row * q for column in range(first, last + 1)]
        count.update(offset if offset in plans else None for offset in offsets)
    return T // q, count.total(), [float(count[None]), *(float(count[offset]) for offset in plans)]


def backward_bodies(blocks: Sequence[int], mask: str, T: int) -> tuple[int, int, list[float]]:
    """The same of the backward kernel, whose rows are of keys."""
    from flywheel_tpu.pallas import loop_schedule
    from flywheel_tpu.pallas.bwd_pipeline import default_bwd_block

    q, k = blocks[:2] if blocks else (default_bwd_block(T), default_bwd_block(T))
    if mask == "full":
        return T // k, T // q * (T // k), []
    params = loop_schedule.dense_bwd_params(
        num_heads=1, num_q_blocks=T // q, num_kv_blocks=T // k, bq=q, bkv=k, causal=True, offset=0
    )
    tiles = [(i, j) for j in range(T // k) for i in range(loop_schedule.first_visible_q_block(j, params), T // q)]
    masked = sum(i * q < j * k + k - 1 for i, j in tiles)
    return T // k, len(tiles), [float(len(tiles) - masked), float(masked)]


def counted(job: Any, outline: Outline) -> dict[str, float]:
    """The bundles of a `KernelJob` for a head, by part, as of `tpu_contenders.bundles_per_head`."""
    count = backward_bodies if job.backward else bodies
    documents = job.mask == "documents" and not job.blocks
    return bundles(outline, *count(job.blocks, job.mask, job.T), FOLD.get(job.generation, 1) if documents else 1)


def bundles(
    outline: Outline, rows: int, tiles: int, runs: Sequence[float], fold: int = 1, loads: int | None = None
) -> dict[str, float]:
    """The bundles of a kernel for a head, by part; ``once`` is for all heads.

    Args:
        outline: the schedule.
        rows: rows of tiles of a head.
        tiles: tiles of a head.
        runs: how many tiles of a head take each body.
        fold: heads that a body computes.
        loads: how often the regions before the bodies run; None for once a row.
    """
    in_loop = [x for x in outline.spans if x[2] == 3]
    outer = _outermost(in_loop)
    long = [x for x in outer if x[1] - x[0] >= _BODY]
    if len(long) != len(runs):
        raise LookupError(
            f"flywheel's kernel has {len(long)} bodies, of {long}, but {len(runs)} are expected: it changed"
        )
    again = sorted((x for x in in_loop if x not in outer and x[1] - x[0] >= _BODY), key=lambda x: -x[1])

    def size(x: tuple[int, int, int]) -> int:
        end = x[1]
        for y in again:  # what computes a tile of a head again ends the body
            if x[0] <= y[0] and 0 <= end - y[1] <= 4:
                end = y[0]
        return end - x[0]

    by_depth = Counter({0: 0, 1: 0, 2: 0, 3: 0})
    for depth, n in outline.depths:
        by_depth[min(depth, 3)] += n
    others = [x for x in outer if x not in long]
    step = by_depth[3] - sum(x[1] - x[0] for x in outer)
    # The first region after the bodies ends a row; a later one is for tokens of no sequence.
    last = max((x[1] for x in long), default=others[-1][0])
    after = [x for x in others if x[0] >= last][:1]
    before = [x[1] - x[0] for x in others if x[0] < last]
    # Of two regions of a size, the first starts transfers that no tile before has started: once a kernel.
    before = [n for i, n in enumerate(before) if not any(abs(n - later) <= 3 for later in before[i + 1 :])]
    a_row, loads = sum(x[1] - x[0] for x in after), rows if loads is None else loads
    of_rows = rows * (by_depth[2] + a_row) + loads * sum(before) + by_depth[1]
    total = {"once": float(by_depth[0]), "steps": float(tiles * step), "rows": float(of_rows)}
    for i, (x, n) in enumerate(zip(long, runs, strict=True)):
        total["FULL" if i == 0 else f"PARTIAL {i}"] = n * size(x)
    return {part: n if part == "once" else n / fold for part, n in total.items()}


def _outermost(spans: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The spans that no other one contains."""
    return [x for x in spans if not any(y != x and y[0] <= x[0] and x[1] <= y[1] for y in spans)]
