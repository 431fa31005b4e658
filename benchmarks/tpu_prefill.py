"""The static schedule of the TPU kernel over caches for prompts and for mixed batches, without a TPU, over pages::

    python benchmarks/tpu_prefill.py                                   # bundles for 512 × 512 scores
    python benchmarks/tpu_prefill.py --page 128 --length 8192 --peers  # other libraries' kernels too
    python benchmarks/tpu_prefill.py --generation v6e --page 128 --queries 512 --codec int8
    python benchmarks/tpu_prefill.py --mixed                           # whole batches

Bundles are counted as in `tpu_decode.py`: "bundles" is the loop over unmasked tiles of keys, with the issue of
transfers, for 512 × 512 scores of a query head; "whole" is all of a row's prompt at the end of ``--length`` tokens,
with its masked tiles and what is around the loop, for 512 × 512 visible scores; "reads" how often keys are read; "of
peak" the products of visible scores as a share of the published peak; "code" the bundles of all code.

A mixed batch is packed: rows that decode a token at a length of 4,096, and one with a chunk of a prompt at the end of
as many tokens, or of its own, new tokens included. Its kernels are added up item by item, of `attnops-tpu` part by
part. "with memory" simulates the transfers of keys and values: they follow one another, that of a tile starts when the
tile that is ``buffers - 1`` before it is computed, and a tile is computed when it has arrived; what is not simulated
is the latency of memory. Peers decode and prefill in two kernels: the first needs the cycles of its keys and values,
since all peers' R in `tpu_decode.py` is below 1, and that of `tpu_prefill_peers` the larger of its bundles and of such
cycles. The writes of the prompt's new tokens are in both: of attnops-tpu, whose first step makes them, "writes" is the
larger of the bundles of their chunks and of the cycles of each token read and written once, and is added; of peers,
which write while they compute, such cycles are added to those of keys. "outside" are the cycles of what the program
moves outside of the kernels, such as new tokens; of peers, what the prompt's program does, whose "temporaries" are
theirs. "ours" is of all together. "XLA" is what the compiler itself estimates for all outside of the kernels: it
counts some 2,000 cycles for each operation, however small. Of `attnops-tpu` most are of the rows' lengths and tables,
which layers share if their caches have the same arrays for these. Needs Linux on x86 and ``pip install attnops-
tpu[aot] rich typer``.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from tpu_block import estimated_cycles
from tpu_decode import BYTES, KERNEL, loop, outermost, print_lines
from tpu_kernels import PEAK, run
from tpu_prefill_peers import Prompt, Shape, Tile, program, prompts

from attnops_tpu.aot import devices
from attnops_tpu.schedule import Schedule, Span, measure

HEADS, KV_HEADS = 32, 8
LENGTH: Final = 4096
SLOTS: Final = 1 << 15  # of the cache, which is larger than vector memory
# Decoding rows, and queries of the prompt.
MIXED: Final = ((31, 512), (255, 2048), (8, 8192))


class Batch(NamedTuple):
    """A call that is compiled.

    Attributes:
        page: slots per page.
        queries: of the row with a prompt.
        decoding: rows with one query; packed with the prompt unless there are none.
        codec: what the cache is quantised to; empty for bfloat16.
        head_dim: D.
    """

    page: int
    queries: int
    decoding: int = 0
    codec: str = ""
    head_dim: int = 128


class Parts(NamedTuple):
    """Items of a kernel: their tiles, and the bundles of their parts.

    Attributes:
        bq: queries per tile.
        bk: keys per tile.
        chunk: keys per chunk of a masked tile.
        buffers: tiles of keys in vector memory.
        plain: bundles of a tile that nothing is masked of.
        masked: of a chunk of a masked tile.
        outside: of an item, or of each part of one, around its loop.
        begin: of an item in parts besides, before its first tile.
        end: the same after its last.
    """

    bq: int
    bk: int
    chunk: int
    buffers: int
    plain: float
    masked: float
    outside: float
    begin: float = 0
    end: float = 0

    def items(self, queries: int, length: int = LENGTH) -> list[list[tuple[float, int]]]:
        """The tiles of each item of a row with so many queries at the end of so many tokens: bundles, and keys."""
        result = []
        for first in range(length - queries, length, self.bq):
            last = min(first + self.bq, length)
            full = (first + 1) // self.bk
            tiles = [(self.plain, self.bk)] * full
            for start in range(full * self.bk, last, self.bk):
                keys = min(last - start, self.bk)
                tiles.append((-(-keys // self.chunk) * self.masked, keys))
            tiles[0] = tiles[0][0] + self.begin, tiles[0][1]
            tiles[-1] = tiles[-1][0] + self.end, tiles[-1][1]
            result.append(self._of_step(tiles))
        return result

    def parts(self, items: list[list[tuple[float, int]]], most: int) -> list[list[tuple[float, int]]]:
        """These items in at most so many parts each, which are grid steps of their own."""
        result = []
        for (bundles, keys), *others in items:
            tiles = [(bundles - self.outside, keys), *others]
            count = min(most, len(tiles))
            ends = [len(tiles) * i // count for i in range(count + 1)]
            result += [self._of_step(tiles[i:j]) for i, j in itertools.pairwise(ends)]
        return result

    def _of_step(self, tiles: list[tuple[float, int]]) -> list[tuple[float, int]]:
        return [(tiles[0][0] + self.outside, tiles[0][1]), *tiles[1:]]

    def bundles(self, queries: int, length: int = LENGTH) -> float:
        """The bundles of these items."""
        return sum(bundles for item in self.items(queries, length) for bundles, _ in item)

    def keys(self, queries: int, length: int = LENGTH) -> int:
        """The tokens that these items read."""
        return sum(keys for item in self.items(queries, length) for _, keys in item)


def cycles(tiles: list[tuple[float, int]], buffers: int, a_key: float) -> float:
    """The cycles of a kernel with these tiles: bundles, and keys, each of which takes ``a_key`` cycles of memory."""
    begun: list[float] = []
    arrived = done = 0.0
    for i, (bundles, keys) in enumerate(tiles):
        arrived = max(arrived, begun[i - buffers + 1] if i >= buffers - 1 else 0.0) + keys * a_key
        begun.append(max(arrived, done))
        done = begun[-1] + bundles
    return done


def child(batch: Batch, generation: str) -> None:
    """In a separate process: compile, and print the kernels' names and tiles, and what is moved outside of them."""
    import jax
    import jax.numpy as jnp

    from attnops import OperationMetadata, OperationRegistry
    from attnops.masks import Causal
    from attnops_caches import Cache, PagedCache, Quantized, Rows
    from attnops_tpu.caches import attention
    from attnops_tpu.caches.mixed import MixedPlan
    from attnops_tpu.caches.prompts import sizes
    from attnops_tpu.collectives import KERNEL as CALL
    from attnops_tpu.collectives import scheduled
    from attnops_tpu.generations import target
    from attnops_tpu.memory import outside_bytes

    plans: list[dict[str, float]] = []
    chunks: list[int] = []
    parts: list[int] = []

    def told(run: Any) -> Any:
        def call(plan: Any, *given: Any) -> Any:
            if isinstance(plan, MixedPlan):
                parts.append(plan.parts)
            for x in plan[:2] if isinstance(plan, MixedPlan) else (plan,):
                plans.append({"bq": x.bq, "bk": x.bk, "chunk": x.masked_chunk, "buffers": x.buffers,
                              "pieces": x.units / x.piece})  # fmt: skip
            chunks.append(sizes(x, given[0].sources).chunk)
            return run(plan, *given)

        return call

    attention._run, attention.run_mixed = told(attention._run), told(attention.run_mixed)
    # Whole registers of queries, as those of peers' prompts are.
    rows, N = batch.decoding + 1, -(-(batch.decoding + batch.queries) // 16) * 16
    slots = max(SLOTS // rows, 2 * LENGTH)
    cache = jax.eval_shape(
        lambda: PagedCache.create(batch=rows, pages=rows * slots // batch.page, page_size=batch.page,
                                  max_pages=slots // batch.page, kv_heads=KV_HEADS, head_dim=batch.head_dim,
                                  codec=Quantized(batch.codec) if batch.codec else None, width=2 * batch.head_dim)
    )  # fmt: skip
    metadata = OperationMetadata(platform="tpu", on_unsupported="error")
    operation = OperationRegistry.create("attnops-tpu:flash", metadata)

    def call(query: jax.Array, key: jax.Array, cache: Cache, starts: jax.Array) -> tuple[jax.Array, Cache]:
        if not batch.decoding:
            return operation(query, cache, mask=Causal()).attention_outputs, cache
        given = Rows(starts, jnp.arange(rows))
        output, cache = operation.step(query, key, key, cache, mask=Causal(), rows=given)
        return output.attention_outputs, cache

    place = jax.sharding.SingleDeviceSharding(devices(generation)[0])
    shapes = (
        ((1, N, HEADS, batch.head_dim), jnp.bfloat16),
        ((1, N, KV_HEADS, batch.head_dim), jnp.bfloat16),
        ((rows + 1,), jnp.int32),
    )
    query, key, starts = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (query, key, cache, starts))
    with target(generation):
        lowered = jax.jit(call, donate_argnums=2).trace(*placed).lower(lowering_platforms=("tpu",))
    compiled, program = scheduled(lowered, generation)
    names = re.findall(rf"%({KERNEL}[\w.\-]*) = [^\n]*" + re.escape(CALL), program)
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    print(json.dumps({"names": names, "plans": plans, "parts": parts, "chunk": chunks[0],
                      "outside": outside_bytes(program), "estimate": estimated_cycles(program),
                      "temporaries": temporaries}))  # fmt: skip


def measured(batch: Batch, generation: str) -> tuple[list[list[Parts]], dict[str, Any]]:
    """The items of each kernel of a call, the small ones first, and what `child` prints, with the bundles of a chunk
    of new tokens.
    """
    command = [str(Path(__file__).resolve()), "child", json.dumps(batch), generation]
    told: dict[str, Any] = run(command) if batch.decoding else {"names": [f"{KERNEL}.1"]}
    result = []
    for number, name in enumerate(told["names"]):
        schedule, printed = measure(command, KERNEL, name, has_sources=True)
        told |= json.loads(printed.strip().splitlines()[-1])
        together = len(told["plans"]) > len(told["names"])
        plans, bodies, steps, once = told["plans"], [schedule], [0], [(0, 0)]
        if together:
            bodies, steps, once, told["a chunk"] = kinds(schedule)
        else:
            plans, told["a chunk"] = [plans[number]], 0
        told["code"] = max(told.get("code", 0), schedule.bundles)
        result.append([
            Parts(*(plan[name] for name in ("bq", "bk", "chunk", "buffers")), plain, masked, outside - sum(ends), *ends)
            for plan, body, step, ends in zip(plans, bodies, steps, once, strict=True)
            for plain, masked, around in [loop(body, plan["pieces"])]
            for outside in [around + step]
        ])  # fmt: skip
    return result, told


def kinds(schedule: Schedule) -> tuple[list[Schedule], list[int], list[tuple[int, int]], int]:
    """The parts of a kernel of small and large items, which are branches of a grid step.

    Returns:
        For both kinds of items their schedules, the bundles of a step outside of these, and of those that only the
        first part of an item has, and the last; and the bundles of a chunk of new tokens of all heads.
    """
    from attnops_tpu.caches.kernel import Kernel
    from attnops_tpu.caches.mixed import _run_item
    from attnops_tpu.caches.write_prompts import write_prompts

    branches = [branch(schedule, _run_item, f"pl.when({condition})") for condition in ("~is_large", "is_large")]
    bodies = [
        dataclasses.replace(schedule, spans=tuple(x for x in schedule.spans if y.start <= x.start and x.stop <= y.stop))
        for y in branches
    ]
    ends = [branch(schedule, Kernel.run, f"pl.when(part.{name})") for name in ("is_first", "is_last")]
    # So that what remains of a large item's spans is that of a small one's.
    bodies[1] = dataclasses.replace(
        bodies[1], spans=tuple(x for x in bodies[1].spans if not any(y.start <= x.start < y.stop for y in ends))
    )
    first = branch(schedule, write_prompts, "pl.when(")
    depths = schedule.depths[first.start : first.stop]
    # Before all that, blocks of an array that XLA keeps in vector memory are copied; a large item's is the largest.
    copies = [x for x in schedule.spans if x.depth == 1 and x.stop <= first.start]
    copies = [x for x in copies if not any(y != x and x.start <= y.start and y.stop <= x.stop for y in copies)]
    lengths = sorted(x.stop - x.start for x in copies)
    step = sum(map(bool, schedule.depths)) - sum(x.stop - x.start for x in (*branches, first, *copies))
    begin, end = (x.stop - x.start for x in ends)
    steps = [step + sum(lengths[:-1]), step + sum(lengths[-1:])]
    return bodies, steps, [(0, 0), (begin, end)], depths.count(2) + KV_HEADS * depths.count(3)


def branch(schedule: Schedule, function: Callable[..., Any], begin: str) -> Span:
    """What is run if the condition of a line of a function holds; ``begin``: the line's first characters."""
    lines, first = inspect.getsourcelines(function)
    (number,) = (first + i for i, line in enumerate(lines) if line.strip().startswith(begin))
    source = f"{Path(function.__code__.co_filename).name}:{number}"
    found = outermost([x for x in schedule.spans if x.source == source])
    if len(found) != 1:
        raise LookupError(f"{source} makes {len(found)} branches of the kernel, but 1 is expected")
    return found[0]


def prefill(batch: Batch, generation: str, lengths: list[int], with_peers: bool) -> Iterator[dict[str, Any]]:
    """Lines of the table of prompts."""
    (((parts,),), told) = measured(batch, generation)
    n = batch.queries
    for length in (x for x in lengths if x >= n):
        tile = Tile(parts.bq, parts.bk, parts.chunk)
        steady = parts.plain * 512**2 / (HEADS * parts.bq * parts.bk)
        kernels = {"attnops-tpu": Prompt(tile, parts.bundles(n, length), parts.keys(n, length), steady)}
        if with_peers and not batch.codec:
            kernels |= prompts(generation, n, length, Shape(HEADS, KV_HEADS, batch.head_dim))
        visible = HEADS * (n * (length - n) + n * (n + 1) / 2)
        for name, x in kernels.items():
            yield {
                "TPU": generation, **batch._asdict(), "length": length, "kernel": name,
                "tile": f"{x.tile.bq} × {x.tile.bk}", "bundles": x.steady, "whole": x.bundles * 512**2 / visible,
                "of peak": 4 * batch.head_dim * visible / x.bundles / PEAK[generation], "reads": x.reads / length,
                "ours": kernels["attnops-tpu"].bundles / x.bundles,
            } | ({"code": told["code"]} if name == "attnops-tpu" else {})  # fmt: skip


def mixed(batch: Batch, generation: str, with_peers: bool) -> Iterator[dict[str, Any]]:
    """Lines of the table of mixed batches, in thousands of bundles or cycles."""
    kernels, told = measured(batch, generation)
    a_key = (1 if batch.codec else 2) * 2 * KV_HEADS * batch.head_dim / BYTES[generation]
    length = max(LENGTH, batch.queries)
    small, large = (parts for kernel in kernels for parts in kernel)
    by_kind = small.items(1) * batch.decoding, large.items(batch.queries, length)
    orders = list(by_kind)
    if len(kernels) == 1:
        most = min(-(-batch.decoding // len(by_kind[1])), told["parts"][0])
        orders = [evenly(by_kind[0], large.parts(by_kind[1], most))]
    tiles = [[tile for item in order for tile in item] for order in orders]
    bundles, keys = (sum(tile[i] for each in tiles for tile in each) for i in range(2))
    of_decoding = batch.decoding * LENGTH * a_key
    total = sum(cycles(each, kernel[0].buffers, a_key) for each, kernel in zip(tiles, kernels, strict=True))
    moved = 2 * batch.queries * a_key
    writes = max(moved, -(-batch.queries // told["chunk"]) * told["a chunk"])
    total += writes
    lines: list[dict[str, Any]] = [{
        "kernel": "attnops-tpu", "tiles": ", ".join(f"{x.bq} × {x.bk}" for x in (small, large)),
        "code": told["code"], "bundles": bundles / 1e3, "memory": keys * a_key / 1e3, "writes": writes / 1e3,
        "with memory": total / 1e3, "outside": told["outside"] / BYTES[generation] / 1e3,
        "XLA": told["estimate"] / 1e3, "temporaries MB": told["temporaries"] / 1e6, "ours": 1.0,
    }]  # fmt: skip
    shape = Shape(HEADS, KV_HEADS, batch.head_dim)
    for name, x in prompts(generation, batch.queries, length, shape).items() if with_peers else ():
        memory = x.reads * a_key + moved
        with_memory = of_decoding + max(x.bundles, memory)
        outside, estimate, temporaries = program(name, generation, batch.queries, shape)
        lines.append({
            "kernel": name, "tiles": f"{x.tile.bq} × {x.tile.bk}", "memory": (of_decoding + memory) / 1e3,
            "with memory": with_memory / 1e3, "outside": outside / BYTES[generation] / 1e3, "XLA": estimate / 1e3,
            "temporaries MB": temporaries / 1e6,
            "ours": (total + told["outside"] / BYTES[generation]) / (with_memory + outside / BYTES[generation]),
        })  # fmt: skip
    yield from ({"TPU": generation, **batch._asdict(), **line} for line in lines)


def evenly(small: list[Any], large: list[Any]) -> list[Any]:
    """Items in the order of one kernel: large ones evenly among small ones."""
    apart = len(small) / len(large)
    at = [*((float(i), x) for i, x in enumerate(small)), *((i * apart - 0.5, x) for i, x in enumerate(large))]
    return [x for _, x in sorted(at, key=lambda x: x[0])]


def main(
    generation: Annotated[list[str], typer.Option()] = ["v6e", "tpu7x"],  # noqa: B006
    page: Annotated[list[int], typer.Option()] = [16, 64, 128, 256],  # noqa: B006
    queries: Annotated[list[int], typer.Option(help="512 and 2,048, and all mixed batches.")] = [],  # noqa: B006
    length: Annotated[list[int], typer.Option(help="Tokens at whose end the prompt is.")] = [LENGTH],  # noqa: B006
    codec: Annotated[list[str], typer.Option(help="int8, float8_e4m3fn or float8_e5m2, scales by token")] = [""],  # noqa: B006
    head_dim: Annotated[int, typer.Option()] = 128,
    is_mixed: Annotated[bool, typer.Option("--mixed", help="Mixed batches, in pages of 128.")] = False,
    with_peers: Annotated[bool, typer.Option("--peers", help="Other libraries' kernels too, in pages of 128.")] = False,
) -> None:  # fmt: skip
    """Print bundles of prompts, or of mixed batches."""
    if is_mixed:
        batches = [mixed(Batch(128, q, n, head_dim=head_dim), each, with_peers) for each in generation for n, q in MIXED
                   if not queries or q in queries]  # fmt: skip
    else:
        batches = [prefill(Batch(p, q, 0, c, head_dim), each, length, with_peers) for each in generation for c in codec
                   for q in queries or [512, 2048] for p in page]  # fmt: skip
    print_lines([line for lines in batches for line in lines])


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(Batch(*json.loads(sys.argv[2])), sys.argv[3])
    else:
        typer.run(main)
