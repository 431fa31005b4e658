"""`python demo.py [OPERATION ...]`: decode over every kind of cache, and with every installed operation.

The first operation decodes over every cache, the others over the last one. Works as a script, loaded by its path, and
as a module of its package.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from attnops_caches import Cache, DenseCache, PagedCache, PagePool, Quantized, WindowCache
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import attnops
from attnops.masks import Causal, SlidingWindow

if __package__:
    from . import model
else:  # by its path, so without a package to import the siblings from
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from decoding import model

B, P, N, CHUNK, WINDOW, PAGE = 2, 48, 80, 16, 32, 16  # rows, prompt, tokens generated, and sizes of the caches
S = P + N
LENGTHS = np.array([48, 29], np.int32)  # of the prompts
METADATA = attnops.OperationMetadata(on_unsupported="error")
REFUSALS = (attnops.UnsupportedError, attnops.PluginError, attnops.AmbiguousOperationError)

# The largest difference of a logit after the prompt; logits are about 1. Without a codec it is rounding, some 1e-6, and
# the generated tokens must be equal too; int8 gives 0.01, e4m3 0.05, another window or position more than 1.
TOLERANCE = {"": 1e-4, "int8": 0.05, "float8_e4m3fn": 0.25}


class Result(NamedTuple):
    """What one operation did over one cache."""

    operation: str
    cache: str
    nbytes: int  # of all layers
    same: int  # tokens that are those of the computation without a cache
    max_difference: float  # of the logits after the prompt
    tokens_per_second: float
    agrees: bool


def make_caches() -> dict[str, Callable[[], Cache]]:
    """Functions that make an empty cache of one layer, by name."""
    sizes = {"batch": B, "kv_heads": model.K, "head_dim": model.D, "dtype": jnp.float32}
    pages = B * S // PAGE

    def paged(codec: Quantized | None) -> Cache:
        pool = PagePool.create(pages=pages, page_size=PAGE, rows=B, max_pages=S // PAGE).reserve(LENGTHS + N)
        cache = PagedCache.create(pages=pages, page_size=PAGE, max_pages=S // PAGE, codec=codec, **sizes)
        return cache.with_table(pool.table)

    return {
        "dense": functools.partial(DenseCache.create, length=S, **sizes),
        "dense, e4m3": functools.partial(DenseCache.create, length=S, codec=Quantized("float8_e4m3fn"), **sizes),
        f"window of {WINDOW}": functools.partial(WindowCache.create, window=WINDOW, max_append=CHUNK, **sizes),
        f"pages of {PAGE}": lambda: paged(None),
        f"pages of {PAGE}, int8": lambda: paged(Quantized("int8")),
    }


def run(console: Console | None = None, operations: Sequence[str] | None = None) -> int:
    """Run the demonstration and return an exit status.

    Args:
        console: where to print. None: standard output.
        operations: names of operations. None: all that are installed.

    Returns:
        0 if at least one operation ran, all that ran agree with the computation without a cache, and none failed;
        otherwise 1. One that refuses is no failure, unless `operations` names it.

    Raises:
        UnknownOperationError: `operations` has a name that no installed distribution has.
    """
    console = Console() if console is None else console
    names = attnops.OperationRegistry.list_implementations() if operations is None else list(operations)
    params = model.init()
    prompt = jnp.asarray(np.random.default_rng(1).integers(0, model.V, (B, P)), jnp.int32)
    _compile(names, params, prompt)
    references, seconds = _references(params, prompt)
    console.print(
        f"A transformer of {model.L} layers with random weights decodes {N} tokens for {B} prompts of "
        f"{' and '.join(map(str, LENGTHS))} tokens, float32"
    )
    caches = make_caches()
    results: list[Result] = []
    failed = False
    for name in names:
        chosen = caches if not results else {label: caches[label] for label in list(caches)[-1:]}
        try:
            op = attnops.OperationRegistry.create(name, METADATA)
            for label, make in chosen.items():
                results.append(_measure(name, label, op, make, params, prompt, references))
        except attnops.UnknownOperationError:
            raise
        except REFUSALS as error:
            failed |= operations is not None
            console.print(f"{escape(name)} [yellow]did not run:[/] {escape(str(error))}")
        except Exception as error:  # one broken operation must not hide the others; it is shown, and is exit 1
            failed = True
            console.print(f"{escape(name)} [bold red]failed:[/] {escape(f'{type(error).__name__}: {error}')}")
    console.print(_table(results, seconds))
    return int(failed or not results or not all(result.agrees for result in results))


def _compile(names: Sequence[str], params: model.Params, prompt: jax.Array) -> None:
    """Compile what will be measured, several programs at once: each takes one core. What fails here will fail there."""
    caches = make_caches()
    makes = [(name, make) for name in names[:1] for make in caches.values()]
    makes += [(name, list(caches.values())[-1]) for name in names[1:]]

    def once(name: str, make: Callable[[], Cache]) -> None:
        with contextlib.suppress(Exception):
            _generate(attnops.OperationRegistry.create(name, METADATA), make, params, prompt)

    with futures.ThreadPoolExecutor() as pool:
        tuple(pool.map(lambda arguments: once(*arguments), makes))


def _generate(
    op: attnops.OperationImpl, make: Callable[[], Cache], params: model.Params, prompt: jax.Array
) -> tuple[model.Generated, tuple[Cache, ...], float]:
    """What is generated over fresh caches, the caches, and the seconds that it takes."""
    caches = jax.block_until_ready(tuple(make() for _ in range(model.L)))
    start = time.perf_counter()
    found, caches = model.generate(params, caches, prompt, jnp.asarray(LENGTHS), op=op, count=N, chunk=CHUNK)
    jax.block_until_ready(found)
    return found, caches, time.perf_counter() - start


def _references(params: model.Params, prompt: jax.Array) -> tuple[dict[bool, model.Generated], float]:
    """What is generated without a cache, by whether there is a window; and the seconds that it takes."""
    op = attnops.OperationRegistry.create("attnops:vanilla", attnops.OperationMetadata(mode="prefill"))
    masks = {False: Causal(), True: Causal() & SlidingWindow(WINDOW - 1, 0)}
    lengths = jnp.asarray(LENGTHS)
    results, times = {}, []
    for windowed, mask in masks.items():
        one = functools.partial(model.generate_uncached, params, prompt, lengths, op=op, mask=mask, count=N)
        results[windowed] = jax.block_until_ready(one())
        start = time.perf_counter()
        jax.block_until_ready(one())
        times.append(time.perf_counter() - start)
    return results, times[0]


def _measure(
    name: str,
    label: str,
    op: attnops.OperationImpl,
    make: Callable[[], Cache],
    params: model.Params,
    prompt: jax.Array,
    references: dict[bool, model.Generated],
) -> Result:
    _generate(op, make, params, prompt)  # compiles, unless the program is there
    found, caches, seconds = _generate(op, make, params, prompt)
    reference = references[isinstance(caches[0], WindowCache)]
    same = int((found.tokens == reference.tokens).sum())
    difference = float(jnp.abs(found.logits - reference.logits).max())
    codec = caches[0].codec
    agrees = difference <= TOLERANCE[codec.dtype if codec else ""] and (codec is not None or same == B * N)
    agrees &= not found.overflowed.any()
    nbytes = sum(x.nbytes for x in jax.tree.leaves(caches))
    return Result(name, label, nbytes, same, difference, B * N / seconds, bool(agrees))


def _table(results: Sequence[Result], seconds: float) -> Table:
    table = Table(
        title="Decoding",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption=f"It agrees if no logit after the prompt differs from the computation without a cache by more than "
        f"{TOLERANCE['']:g} ({TOLERANCE['int8']:g} in int8, {TOLERANCE['float8_e4m3fn']:g} in e4m3) and, without a "
        f"codec, all tokens are the same. kB are of the caches of all layers.",
        caption_justify="left",
    )
    for header in ("operation", "cache", "agrees"):
        table.add_column(header)
    for header in ("same tokens", "max |diff|", "kB", "tokens/s"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_row("vanilla", "none", "", "", "", "", f"{B * N / seconds:,.0f}")
    for r in results:
        table.add_row(
            escape(r.operation), r.cache, "[green]yes[/]" if r.agrees else "[bold red]no[/]", f"{r.same}/{B * N}",
            f"{r.max_difference:.1e}", f"{r.nbytes / 1e3:.0f}", f"{r.tokens_per_second:,.0f}",
        )  # fmt: skip
    return table


def main() -> int:
    """Run the script and return its exit status: `run`'s, or 2 with one line for what only the user can mend."""
    try:
        return run(operations=sys.argv[1:] or None)
    except attnops.UnknownOperationError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
