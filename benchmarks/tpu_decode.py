"""The static schedule of the TPU kernel over caches, without a TPU, for one token per row over pages. R is the number
of bundles that the loop needs for a tile of keys, divided by the cycles that HBM needs for the tile's useful bytes::

    python benchmarks/tpu_decode.py                                       # v5e, v6e and tpu7x
    python benchmarks/tpu_decode.py --generation v6e --page 16 --kv-heads 1 --json out.json
    python benchmarks/tpu_decode.py --codec int8 --page 128
    python benchmarks/tpu_decode.py --latent --kv-heads 1 --groups 128   # keys of 576 features, values of 512 of them
    python benchmarks/tpu_decode.py --peers                               # R of other libraries' kernels too
    python benchmarks/tpu_decode.py --peer "RPA v3"                       # R of one of them
    python benchmarks/tpu_decode.py --whole --peers --json out.json       # every figure of the READMEs
    python benchmarks/tpu_decode.py --bytes                               # transfers, and the bytes that they move

With ``--json`` each line is kept, and a run with the same file continues where the last one ended: remove the file when
the code has changed.

A bundle is an instruction word, which needs one cycle if nothing stalls. The loop is the one over complete, unmasked
tiles; issuing transfers and the loop's control are included. If R is below 1, the kernel is not bound by computation.
Nothing ran on a TPU. Useful bytes are those of keys, values and their scales; transfers also move the zeros that
`PagedCache.create`'s ``width`` adds. Besides the loop, each row of the cache costs the bundles around it ("a row") and
at least one masked tile ("masked").

Needs Linux on x86 and ``pip install attnops-tpu[aot] rich typer``. Compiling takes about ten seconds per line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from tpu_decode_peers import PEERS, PeerCase, bundles_a_byte

from attnops_tpu.aot import compile_for
from attnops_tpu.schedule import Schedule, Span, measure

# HBM bytes per cycle and core.
BYTES: Final = {"v4": 651, "v5e": 546, "v5p": 790, "v6e": 937, "tpu7x": 1682}
SLOTS: Final = 1 << 17  # per row
ROWS: Final = 8  # of the cache
KERNEL: Final = "attnops_ragged"


class Case(NamedTuple):
    """A call that is compiled.

    Attributes:
        page: slots per page.
        kv_heads: K.
        groups: query heads per kv head.
        head_dim: the head dim of queries and keys.
        codec: what the cache is quantised to; empty for bfloat16.
        latent: whether the cache is latent (MLA).
        queries: tokens per row.
    """

    page: int
    kv_heads: int
    groups: int
    head_dim: int = 128
    codec: str = ""
    latent: bool = False
    queries: int = 1

    @property
    def value_head_dim(self) -> int:
        """The head dim of values."""
        return 512 if self.latent else self.head_dim

    @property
    def width(self) -> int:
        """Features of a token and kv head as they are stored, padding included."""
        return -(-self.features // 128) * 128

    @property
    def features(self) -> int:
        """Features of a token and kv head without padding."""
        return self.head_dim if self.latent else 2 * self.head_dim

    def token_bytes(self, features: int) -> int:
        """Bytes of a token and its scales, with this many features per kv head."""
        scales = (1 if self.latent else 2) * 4 if self.codec else 0
        return self.kv_heads * (features * (1 if self.codec else 2) + scales)


def child(case: Case, generation: str) -> None:
    """In a separate process: compile, and print the keys per tile and the number of buffers."""
    import jax
    import jax.numpy as jnp

    from attnops import OperationMetadata, OperationRegistry
    from attnops.kernels import FlashCall
    from attnops.masks import Causal
    from attnops_caches import Cache, PagedCache, Quantized
    from attnops_tpu.caches.attention import make_plan
    from attnops_tpu.generations import target

    page, K, G, D, codec, latent, T = case
    # Larger than VMEM, so that the compiler can't keep the cache there.
    cache = jax.eval_shape(
        lambda: PagedCache.create(batch=ROWS, pages=ROWS * SLOTS // page, page_size=page, max_pages=SLOTS // page,
                                  kv_heads=K, head_dim=D, latent=512 if latent else None,
                                  codec=Quantized(codec) if codec else None, width=case.width)
    )  # fmt: skip
    metadata = OperationMetadata(platform="tpu", on_unsupported="error")
    operation = OperationRegistry.create("attnops-tpu:flash", metadata)
    query = jax.ShapeDtypeStruct((ROWS, T, K * G, D), jnp.bfloat16)

    def run(query: jax.Array, cache: Cache) -> jax.Array:
        return operation(query, cache, mask=Causal()).attention_outputs

    compile_for(run, (query, cache), generation)
    keys, values = (jax.ShapeDtypeStruct((ROWS, SLOTS, K, d), jnp.bfloat16) for d in (D, case.value_head_dim))
    with target(generation):
        plan = make_plan(FlashCall(metadata, query, keys, values), cache, False)
    transfers = plan.units * plan.sources
    print(json.dumps({"keys": plan.bk, "transfers": transfers, "buffers": plan.buffers,
                      "pieces": plan.units / plan.piece}))  # fmt: skip


def loop(schedule: Schedule, tile_pieces: float) -> tuple[float, int, int]:
    """The bundles of the parts of a kernel.

    Args:
        schedule: the schedule of the kernel.
        tile_pieces: pieces of the table per tile.

    Returns:
        The bundles of an unmasked tile in the loop, whose transfers and computation are straight-line code; of a masked
        tile, or of one chunk of it if it has several; and of a row of the cache without its tiles.
    """
    # The bodies of tiles are the longest spans. The body of masked tiles is last, directly after an unmasked one.
    inner = [span for span in schedule.spans if span.depth == 2]
    pairs = [(x, y) for x in inner for y in inner if x.stop == y.start]
    longest = max(x.stop - x.start for x, _ in pairs)
    plain, masked = max((x, y) for x, y in pairs if 2 * (x.stop - x.start) > longest)
    around = min(
        (x for x in schedule.spans if x.depth == 1 and x.start < plain.start and masked.stop <= x.stop),
        key=lambda span: span.stop - span.start,
    )
    # Before the unmasked body are the bundles that load a piece of the table, and the other unmasked body if there are
    # two.
    before = [x for x in outermost(inner) if around.start < x.start and x.stop <= plain.start]
    lengths = [x.stop - x.start for x in before]
    piece = sum(n for n in lengths if 2 * n < plain.stop - plain.start)
    plain_tile = (masked.start - around.start) - sum(lengths) + (around.stop - masked.stop) + tile_pieces * piece
    grid = max((x for x in schedule.spans if x.depth == 1), key=lambda span: span.stop - span.start)
    # What is done only for the first row comes before the loop.
    first = max((x.stop - x.start for x in schedule.spans if x.depth == 1 and x.stop <= around.start), default=0)
    outside = (grid.stop - grid.start) - (around.stop - around.start) - first
    return plain_tile, masked.stop - masked.start, outside


def outermost(spans: list[Span]) -> list[Span]:
    """The spans that no other span contains."""
    return [x for x in spans if not any(y != x and y.start <= x.start and x.stop <= y.stop for y in spans)]


def figures(case: Case, generation: str) -> dict[str, Any]:
    """A line of the table."""
    command = [str(Path(__file__).resolve()), "child", json.dumps(case), generation]
    schedule, printed = measure(command, KERNEL, f"{KERNEL}.1")
    tile = json.loads(printed.strip().splitlines()[-1])
    bundles, masked, outside = loop(schedule, tile["pieces"])
    useful, moved = (tile["keys"] * case.token_bytes(n) for n in (case.features, case.width))
    token_head = 4 * case.kv_heads if case.codec else case.token_bytes(case.width)
    return {
        "TPU": generation, **case._asdict(), "keys": tile["keys"], "bundles": bundles,
        "R": bundles / (useful / BYTES[generation]), "a token": bundles / tile["keys"],
        "transfers": tile["transfers"], "smallest": case.page * token_head,
        "in flight": (tile["buffers"] - 1) * moved, "moved": (moved + 4 * tile["keys"] // case.page) / useful,
        "a row": outside, "masked": masked,
    }  # fmt: skip


def peers(case: Case, generation: str, names: Iterable[str]) -> dict[str, str]:
    """R of other kernels, which have one scale for the whole cache; a dash where one refuses the case."""
    peer_case = PeerCase(case.page, case.kv_heads, case.groups, case.head_dim, case.codec or "bfloat16")
    ratios = {name: bundles_a_byte(name, peer_case, generation) for name in names}
    return {name: "–" if x is None else f"{x * BYTES[generation]:.2f}" for name, x in ratios.items()}


def readme_cases() -> list[Case]:
    """The cases of the READMEs."""
    plain = [Case(page, K, 4) for K in (8, 1) for page in (16, 32, 64, 128, 256)]
    plain += [Case(page, 2, 4) for page in (16, 64, 256)]
    plain += [Case(page, K, G) for K in (8, 1) for G in (1, 8, 16) for page in (16, 256)]
    dims = [Case(64, 8, 4, D) for D in (64, 80, 256)]
    codecs = [Case(128, K, 4, codec=codec) for codec in ("int8", "float8_e4m3fn") for K in (8, 1)]
    latents = [Case(page, 1, 128, 576, latent=True) for page in (64, 256)]
    return [*plain, *dims, *codecs, *latents]


def line_of(case: Case, generation: str, names: Iterable[str], kept: list[dict[str, Any]]) -> dict[str, Any]:
    """A line of the table, from ``kept`` if it is there; peers have no latent caches."""
    asked = {"TPU": generation, **case._asdict()}
    line = next((x for x in kept if x.items() >= asked.items()), None)
    if line is None:
        line = figures(case, generation)
        kept.append(line)
    if not case.latent:
        line.update(peers(case, generation, [name for name in names if name not in line]))
    return line


def main(
    generation: Annotated[list[str], typer.Option()] = ["v5e", "v6e", "tpu7x"],  # noqa: B006
    page: Annotated[list[int], typer.Option()] = [16, 64, 256],  # noqa: B006
    kv_heads: Annotated[list[int], typer.Option()] = [8, 1],  # noqa: B006
    groups: Annotated[list[int], typer.Option()] = [4],  # noqa: B006
    head_dim: Annotated[list[int], typer.Option()] = [128],  # noqa: B006
    codec: Annotated[list[str], typer.Option(help="int8, float8_e4m3fn or float8_e5m2, scales by token")] = [""],  # noqa: B006
    latent: Annotated[bool, typer.Option("--latent")] = False,
    queries: Annotated[list[int], typer.Option(help="queries per row, in one tile")] = [1],  # noqa: B006
    is_whole: Annotated[bool, typer.Option("--whole", help="All cases of the READMEs; of the options above only "
                                           "--generation is used.")] = False,
    with_peers: Annotated[bool, typer.Option("--peers", help="All peers; they have no latent caches.")] = False,
    peer: Annotated[list[str], typer.Option(help=f"one of {', '.join(PEERS)}")] = [],  # noqa: B006
    json_file: Annotated[Path | None, typer.Option("--json", help="Keeps each line; a later run continues it.")] = None,
    is_bytes: Annotated[bool, typer.Option("--bytes", help="Count transfers and bytes instead; of the options above "
                                           "only --page is used.")] = False,
) -> None:  # fmt: skip
    """Print R, bundles and transfers of each case."""
    if is_bytes:
        from tpu_decode_bytes import traffic

        print_lines(list(traffic("v6e", page)))
        return
    if unknown := [name for name in peer if name not in PEERS]:
        raise typer.BadParameter(f"--peer is {unknown[0]!r}; it is one of {', '.join(PEERS)}")
    names = [name for name in PEERS if with_peers or name in peer]
    dims = [576] if latent else head_dim
    cases = [Case(p, k, g, d, c, latent, t) for t in queries for c in codec for d in dims
             for k in kv_heads for g in groups for p in page]  # fmt: skip
    kept = json.loads(json_file.read_text()) if json_file is not None and json_file.exists() else []
    lines = []
    for each in generation:
        for case in readme_cases() if is_whole else cases:
            lines.append(line_of(case, each, names, kept))
            if json_file is not None:
                json_file.write_text(json.dumps(kept, indent=1))
    print_lines(lines)


def print_lines(lines: list[dict[str, Any]]) -> None:
    """Print a table with a column for each name in a line."""
    columns = {name: None for line in lines for name in line}
    table = Table(*columns)
    for line in lines:
        table.add_row(*(f"{x:.2f}" if isinstance(x, float) else str(x) for x in (line.get(c, "–") for c in columns)))
    Console(width=190).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(Case(*json.loads(sys.argv[2])), sys.argv[3])
    else:
        typer.run(main)
