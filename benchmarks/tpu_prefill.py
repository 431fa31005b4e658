"""The static schedule of the TPU kernel over caches for prompts and for mixed batches, without a TPU, over pages::

    python benchmarks/tpu_prefill.py                                   # bundles for 512 × 512 scores
    python benchmarks/tpu_prefill.py --page 128 --length 8192 --peers  # other libraries' kernels too
    python benchmarks/tpu_prefill.py --generation v6e --page 128 --queries 512 --codec int8
    python benchmarks/tpu_prefill.py --mixed                           # whole batches

Bundles are counted as in `tpu_decode.py`: "bundles" is the loop over unmasked tiles of keys, with the issue of
transfers, for 512 × 512 scores of a query head; "whole" is all of a row's prompt at the end of ``--length`` tokens,
with its masked tiles and what is around the loop, for 512 × 512 visible scores; "reads" how often keys are read; "of
peak" the products of visible scores as a share of the published peak.

A mixed batch is packed: rows that decode a token at a length of 4,096, and one with a chunk of a prompt at the end of
as many tokens, or of its own, new tokens included. Peers decode and prefill in two kernels, of `tpu_decode_peers` and
`tpu_prefill_peers`. Its kernels are added up item by item. "with memory" takes for each kernel the
larger of its bundles and of the cycles that its keys and values need; "outside" are the cycles of what the program
moves outside of the kernels, such as gathered queries, without the writes of a prompt's tokens. Needs Linux on x86 and
``pip install attnops-tpu[aot] rich typer``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from tpu_decode import BYTES, KERNEL, loop, print_lines
from tpu_decode_peers import PeerCase, bundles_a_byte
from tpu_kernels import PEAK, run
from tpu_prefill_peers import PEERS, Prompt, Tile, prompt

from attnops_tpu.aot import devices
from attnops_tpu.schedule import measure

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
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
    """

    page: int
    queries: int
    decoding: int = 0
    codec: str = ""


class Parts(NamedTuple):
    """A kernel: its tiles, and the bundles of its parts.

    Attributes:
        bq: queries per tile.
        bk: keys per tile.
        chunk: keys per chunk of a masked tile.
        plain: bundles of a tile that nothing is masked of.
        masked: of a chunk of a masked tile.
        outside: of an item, around its loop.
    """

    bq: int
    bk: int
    chunk: int
    plain: float
    masked: float
    outside: float

    def bundles(self, queries: int, length: int = LENGTH) -> float:
        """The bundles of the items of a row with so many queries at the end of so many tokens."""
        total = 0.0
        for first in range(length - queries, length, self.bq):
            last = min(first + self.bq, length)
            full = (first + 1) // self.bk
            total += self.outside + full * self.plain + -(-(last - full * self.bk) // self.chunk) * self.masked
        return total

    def keys(self, queries: int, length: int = LENGTH) -> int:
        """The tokens that these items read."""
        return sum(min(first + self.bq, length) for first in range(length - queries, length, self.bq))


def child(batch: Batch, generation: str) -> None:
    """In a separate process: compile, and print the kernels' names and tiles, and what is moved outside of them."""
    import jax
    import jax.numpy as jnp

    from attnops import OperationMetadata, OperationRegistry
    from attnops.kernels import FlashCall
    from attnops.masks import Causal
    from attnops_caches import Cache, PagedCache, Quantized, Rows
    from attnops_tpu.caches.attention import make_plan
    from attnops_tpu.caches.tile_sizes import Heads, packed_queries_a_tile
    from attnops_tpu.collectives import KERNEL as CALL
    from attnops_tpu.collectives import scheduled
    from attnops_tpu.generations import GENERATIONS, target
    from attnops_tpu.memory import outside_bytes

    rows, N = batch.decoding + 1, batch.decoding + batch.queries
    slots = max(SLOTS // rows, 2 * LENGTH)
    cache = jax.eval_shape(
        lambda: PagedCache.create(batch=rows, pages=rows * slots // batch.page, page_size=batch.page,
                                  max_pages=slots // batch.page, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
                                  codec=Quantized(batch.codec) if batch.codec else None, width=2 * HEAD_DIM)
    )  # fmt: skip
    metadata = OperationMetadata(platform="tpu", on_unsupported="error")
    operation = OperationRegistry.create("attnops-tpu:flash", metadata)

    def call(query: jax.Array, key: jax.Array, cache: Cache, starts: jax.Array) -> tuple[jax.Array, Cache]:
        if not batch.decoding:
            return operation(query, cache, mask=Causal()).attention_outputs, cache
        given = Rows(starts, jnp.arange(rows))
        output, cache = operation.step(query, key, key, cache, mask=Causal(), rows=given)
        return output.attention_outputs, cache

    def attend(query: jax.Array, key: jax.Array, cache: Cache, starts: jax.Array) -> jax.Array:
        rows_of = {"rows": Rows(starts, jnp.arange(rows))} if batch.decoding else {}
        return operation(query, cache, mask=Causal(), **rows_of).attention_outputs

    place = jax.sharding.SingleDeviceSharding(devices(generation)[0])
    shapes = (
        ((1, N, HEADS, HEAD_DIM), jnp.bfloat16),
        ((1, N, KV_HEADS, HEAD_DIM), jnp.bfloat16),
        ((rows + 1,), jnp.int32),
    )
    query, key, starts = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (query, key, cache, starts))
    with target(generation):
        lowered, of_attend = (jax.jit(f, donate_argnums=donated).trace(*placed).lower(lowering_platforms=("tpu",))
                              for f, donated in ((call, 2), (attend, ())))  # fmt: skip
    _, program = scheduled(lowered, generation)
    # A loop that writes a cache where it is counts as if it moved all of it.
    outside = outside_bytes(scheduled(of_attend, generation)[1]) if batch.decoding else 0
    tiles: tuple[int | None, ...] = (batch.queries,)
    if batch.decoding:
        heads = Heads(HEADS, KV_HEADS, True, False)
        tiles = packed_queries_a_tile(GENERATIONS[generation], None, N, rows, heads)
    plans = []
    keys = jax.ShapeDtypeStruct((rows, slots, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    for bq in tiles:
        if bq is not None:
            of_tile = jax.ShapeDtypeStruct((1, bq, HEADS, HEAD_DIM), jnp.bfloat16)
            with target(generation):
                plan = make_plan(FlashCall(metadata, of_tile, keys, keys), cache, False, bool(batch.decoding))
            plans.append({"bq": plan.bq, "bk": plan.bk, "chunk": plan.masked_chunk, "pieces": plan.units / plan.piece})
    names = re.findall(rf"%({KERNEL}[\w.\-]*) = [^\n]*" + re.escape(CALL), program)
    assert len(names) == len(plans), names
    print(json.dumps({"kernels": dict(zip(names, plans, strict=True)), "outside": outside}))


def measured(batch: Batch, generation: str) -> tuple[list[Parts], float]:
    """The kernels of a call, the one for small tiles first, and the bytes that its program moves outside of them."""
    command = [str(Path(__file__).resolve()), "child", json.dumps(batch), generation]
    told: dict[str, Any] = run(command) if batch.decoding else {"kernels": {f"{KERNEL}.1": None}}
    result = []
    for name in told["kernels"]:
        schedule, printed = measure(command, KERNEL, name)
        told = json.loads(printed.strip().splitlines()[-1])
        plan = told["kernels"][name]
        plain, masked, around = loop(schedule, plan["pieces"])
        result.append(Parts(plan["bq"], plan["bk"], plan["chunk"], plain, masked, around))
    return result, told["outside"]


def prefill(batch: Batch, generation: str, lengths: list[int], with_peers: bool) -> Iterator[dict[str, Any]]:
    """Lines of the table of prompts."""
    ((parts,), _) = measured(batch, generation)
    n = batch.queries
    for length in (x for x in lengths if x >= n):
        tile = Tile(parts.bq, parts.bk, parts.chunk)
        steady = parts.plain * 512**2 / (HEADS * parts.bq * parts.bk)
        kernels = {"attnops-tpu": Prompt(tile, parts.bundles(n, length), parts.keys(n, length), steady)}
        if with_peers and not batch.codec:
            kernels |= {name: prompt(name, generation, n, length) for name in PEERS}
        visible = HEADS * (n * (length - n) + n * (n + 1) / 2)
        for name, x in kernels.items():
            yield {
                "TPU": generation, **batch._asdict(), "length": length, "kernel": name,
                "tile": f"{x.tile.bq} × {x.tile.bk}", "bundles": x.steady, "whole": x.bundles * 512**2 / visible,
                "of peak": 4 * HEAD_DIM * visible / x.bundles / PEAK[generation], "reads": x.reads / length,
                "ours": kernels["attnops-tpu"].bundles / x.bundles,
            }  # fmt: skip


def mixed(batch: Batch, generation: str, with_peers: bool) -> Iterator[dict[str, Any]]:
    """Lines of the table of mixed batches, in thousands of bundles or cycles."""
    kernels, outside = measured(batch, generation)
    a_token = (1 if batch.codec else 2) * 2 * KV_HEADS * HEAD_DIM / BYTES[generation]
    rows = [(batch.decoding, 1, LENGTH), (1, batch.queries, max(LENGTH, batch.queries))]
    by_kernel = [[row] for row in rows] if len(kernels) > 1 else [rows]
    bundles = [sum(n * x.bundles(*q) for n, *q in given) for x, given in zip(kernels, by_kernel, strict=True)]
    memory = [sum(n * x.keys(*q) * a_token for n, *q in given) for x, given in zip(kernels, by_kernel, strict=True)]
    tiles = ", ".join(f"{x.bq} × {x.bk}" for x in kernels)
    batches = [("attnops-tpu", tiles, bundles, memory, outside / BYTES[generation])]
    for name in PEERS if with_peers else ():
        case = PeerCase(batch.page, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, "bfloat16")
        decoding = batch.decoding * LENGTH * a_token
        of_prompt = prompt(name, generation, batch.queries, rows[1][2])
        a_cycle = (bundles_a_byte(name, case, generation) or float("nan")) * BYTES[generation]
        batches.append((name, f"{of_prompt.tile.bq} × {of_prompt.tile.bk}", [decoding * a_cycle, of_prompt.bundles],
                        [decoding, of_prompt.reads * a_token], 0.0))  # fmt: skip
    sums = [sum(map(max, bundles, memory, strict=True)) for _, _, bundles, memory, _ in batches]
    for (name, tiles, bundles, memory, outside), total in zip(batches, sums, strict=True):
        yield {
            "TPU": generation, **batch._asdict(), "kernel": name, "tiles": tiles, "bundles": sum(bundles) / 1e3,
            "memory": sum(memory) / 1e3, "outside": outside / 1e3, "with memory": total / 1e3, "ours": sums[0] / total,
        }  # fmt: skip


def main(
    generation: Annotated[list[str], typer.Option()] = ["v6e", "tpu7x"],  # noqa: B006
    page: Annotated[list[int], typer.Option()] = [16, 64, 128, 256],  # noqa: B006
    queries: Annotated[list[int], typer.Option(help="512 and 2,048, and all mixed batches.")] = [],  # noqa: B006
    length: Annotated[list[int], typer.Option(help="Tokens at whose end the prompt is.")] = [LENGTH],  # noqa: B006
    codec: Annotated[list[str], typer.Option(help="int8, float8_e4m3fn or float8_e5m2, scales by token")] = [""],  # noqa: B006
    is_mixed: Annotated[bool, typer.Option("--mixed", help="Mixed batches, in pages of 128.")] = False,
    with_peers: Annotated[bool, typer.Option("--peers", help="Other libraries' kernels too, in pages of 128.")] = False,
) -> None:  # fmt: skip
    """Print bundles of prompts, or of mixed batches."""
    if is_mixed:
        batches = [mixed(Batch(128, q, n), each, with_peers) for each in generation for n, q in MIXED
                   if not queries or q in queries]  # fmt: skip
    else:
        batches = [prefill(Batch(p, q, codec=c), each, length, with_peers) for each in generation for c in codec
                   for q in queries or [512, 2048] for p in page]  # fmt: skip
    print_lines([line for lines in batches for line in lines])


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(Batch(*json.loads(sys.argv[2])), sys.argv[3])
    else:
        typer.run(main)
