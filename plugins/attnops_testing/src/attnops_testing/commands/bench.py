"""`attnops bench`: operations and peers side by side, each checked before it is timed."""

from __future__ import annotations

import functools
import json as json_module
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnops.errors import PluginWarning, UnknownOperationError
from attnops.masks import Full, Mask
from attnops_cli.noise import find_devices
from attnops_cli.output import fail, print_text
from attnops_cli.show import mask_with_values, needs_matplotlib
from attnops_testing.bench import (
    CacheCase,
    Case,
    Contender,
    Measurement,
    default_memory_limit,
    describe_machine,
    find,
    measure,
    missing_peers,
    packed_documents,
)
from attnops_testing.commands.bench_caches import (
    CacheOptions,
    Codec,
    Latent,
    PageSize,
    Scales,
    Storage,
    describe_cache_case,
    print_cache_measurements,
)
from attnops_testing.commands.bench_tables import print_measurements


# A parameter for each option of the command line, which typer reads from the signature.
def command(
    operations: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of operations, and of peers: jax.nn, flax.nnx, torch, tokamax, ejkernel.",
            show_default="all installed",
        ),
    ] = None,
    batch: Annotated[int, typer.Option("-B", "--batch", help="B", min=1)] = 1,
    lengths: Annotated[
        str, typer.Option("-T", "--lengths", help="T = S, in tokens, or the slots S of a cache; separated by commas.")
    ] = "1024,2048",
    heads: Annotated[int, typer.Option("-H", "--heads", help="H", min=1)] = 8,
    kv_heads: Annotated[
        int | None, typer.Option("-K", "--kv-heads", help="K, a divisor of H.", show_default="H", min=1)
    ] = None,
    head_dim: Annotated[int, typer.Option("-D", "--head-dim", help="D", min=1)] = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; several, separated by commas.")] = "float32",
    mask: Annotated[str, typer.Option(help='An expression of attnops.masks; "Full()" for none.')] = "Causal()",
    documents: Annotated[
        int | None,
        typer.Option(help="Pack this many documents of random lengths; segments are known only at run time.", min=1),
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward/--forward", help="Time forward and backward together, or forward only.")
    ] = False,
    cache: Storage = None,
    page_size: PageSize = None,
    codec: Codec = None,
    scales: Scales = None,
    latent: Latent = None,
    queries: Annotated[
        int | None, typer.Option(help="T over a cache: 1 to decode, or the chunk of a prompt.", show_default="1", min=1)
    ] = None,
    used: Annotated[
        int | None, typer.Option(help="Tokens of a row in the cache, its queries included.", show_default="S", min=1)
    ] = None,
    ragged: Annotated[bool, typer.Option("--ragged", help="Rows differ in tokens and queries.")] = False,
    packed: Annotated[bool, typer.Option("--packed", help="The queries of all rows are packed.")] = False,
    repeats: Annotated[int, typer.Option(help="Rounds; each round times every contender once.", min=1)] = 5,
    most_seconds: Annotated[float, typer.Option(help="Seconds for each contender at each length.", min=0)] = 5.0,
    memory_limit: Annotated[
        float | None, typer.Option(help="GB that a contender may use.", show_default="half the device's")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file; - prints it.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time and memory over length: .png, .svg or .pdf.")] = None,
) -> None:
    """Time operations and other libraries' attention side by side. Their outputs and gradients are first compared with
    the float64 oracle; what is wrong is not timed.

    With --cache, time attention over a cache: in bytes per second of the tokens that are seen, and as a share of the
    speed at which the same run reads as many bytes once. Peers attend to plain arrays of the same tokens.

    Exits with 1 if one is wrong or failed, with 2 if the call is invalid or the operation is unknown.
    """
    if plot is not None:
        needs_matplotlib("the plot")
    find_devices()
    try:
        limit = default_memory_limit() if memory_limit is None else _bytes(memory_limit)
        cache_options = CacheOptions(
            storage=cache, page_size=page_size, codec=codec, scales=scales, latent=latent, queries=queries, used=used,
            ragged=ragged, packed=packed,
        )  # fmt: skip
        cache_options.check(backward=backward, documents=documents)
        make: Any = functools.partial(Case, backward=backward) if cache is None else cache_options.case
        cases = [
            make(
                length=length, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=name,
                mask=_mask(mask, documents, length), memory_limit=limit,
            )
            for name in _names("dtype", dtype)
            for length in _lengths(lengths)
        ]  # fmt: skip
        contenders = cache_options.contenders(find(operations or None))
    except (ValueError, UnknownOperationError) as error:
        fail(error, 2)
    machine = describe_machine()
    # An operation's row shows what is wrong with it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        measurements = list(_measure_all(cases, contenders, repeats, most_seconds))
    title = f"{_title(cases[0], mask, documents)}; {_where(machine)}"
    if json is None or str(json) != "-":
        (print_measurements if cache is None else print_cache_measurements)(measurements, title)
        if operations is None and (missing := [peer.package for peer in missing_peers()]):
            print_text(f"\nNot installed, and left out: {', '.join(missing)}")
    written = json_module.dumps({"machine": machine, "measurements": [m.to_json() for m in measurements]}, indent=2)
    if json is not None and str(json) == "-":
        typer.echo(written)
    try:
        if json is not None and str(json) != "-":
            json.write_text(written + "\n")
        if plot is not None:
            from attnops_testing.bench.plot import plot as draw

            draw(measurements, plot, title)
    except (OSError, ValueError) as error:  # matplotlib raises ValueError for an unknown suffix
        fail(error, 2)
    raise typer.Exit(int(any(m.status in ("wrong", "failed") for m in measurements)))


def _measure_all(
    cases: Sequence[Case | CacheCase], contenders: Sequence[Contender], repeats: int, most_seconds: float
) -> Iterator[Measurement]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(cases) * len(contenders) * (repeats + 1))
        for case in cases:

            def step(what: str, steps: int, case: Case | CacheCase = case) -> None:
                progress.update(task, advance=steps, description=f"{case.label} {what}")

            entries = [(case, contender) for contender in contenders]
            # Over a cache each timing is one call: the calls of other contenders in between replace the contents of the
            # processor's caches, as other layers of a model do.
            shortest = {"shortest": 0.0} if isinstance(case, CacheCase) else {}
            yield from measure(entries, rounds=repeats, most_seconds=most_seconds, progress=step, **shortest)


def _mask(text: str, documents: int | None, length: int) -> Mask | None:
    mask = mask_with_values(text)
    if documents is not None:
        segments = packed_documents(documents, length)
        return segments if isinstance(mask, Full) else mask & segments
    return None if isinstance(mask, Full) else mask


def _bytes(gigabytes: float) -> int:
    if not (math.isfinite(gigabytes) and gigabytes > 0):
        raise ValueError(f"memory_limit={gigabytes} must be positive and finite; leave it out for half the device's")
    return int(gigabytes * 1e9)


def _names(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{option}={text!r} is empty; separate several by commas")
    return names


def _lengths(text: str) -> list[int]:
    names = _names("lengths", text)
    if not all(name.isdecimal() and int(name) for name in names):
        raise ValueError(f"lengths={text!r} must be positive numbers separated by commas, such as 1024,2048")
    return [int(name) for name in names]


def _title(case: Case | CacheCase, mask: str, documents: int | None) -> str:
    if isinstance(case, CacheCase):
        return describe_cache_case(case, mask)
    what = "forward and backward" if case.backward else "forward"
    shape = f"B{case.batch} H{case.heads} K{case.K} D{case.head_dim}"
    packed = "" if documents is None else f", {documents} documents"
    return f"{what}, {shape}, {mask}{packed}"


def _where(machine: dict[str, Any]) -> str:
    where = machine["processor"] if machine["devices"] == ["cpu"] else ", ".join(machine["devices"])
    return f"{where}, {machine['cores']} cores, JAX {machine['versions']['jax']}"
