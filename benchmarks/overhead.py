"""The overhead of attnops over bare JAX: importing, creating, tracing and lowering, and calling eagerly.

Run ``python benchmarks/overhead.py`` (``--json FILE`` to keep the figures). Both sides of each comparison are
measured in turns in one run, and the best of several repetitions is reported. Imports and traces, which run on one
core, are measured in CPU time, since other work on the machine disturbs it less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_testing.bench import describe_machine, in_turns, one_line

REPETITIONS = 15


def seconds(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    function()
    return clock() - start


def import_seconds(statement: str, cache: str) -> float:
    """The seconds of an import in a new process, from bytecode in the folder `cache`, since pip installs bytecode."""
    code = f"import time; start = time.process_time(); {statement}; print(time.process_time() - start)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = cache
    command = [sys.executable, "-c", code]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def imports() -> dict[str, float]:
    """The seconds to import jax alone, with attnops, and with all public names of attnops, which otherwise are imported
    at their first use.
    """
    statements = {
        "jax": "import jax",
        "attnops": "import jax, attnops",
        "all its names": "import jax; from attnops import *",
    }
    with tempfile.TemporaryDirectory() as cache:
        sides = {side: lambda s=statement: import_seconds(s, cache) for side, statement in statements.items()}
        for measure in sides.values():
            measure()  # writes the bytecode
        return best(sides)


def best(sides: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The best time of each side."""
    return {side: min(times) for side, times in in_turns(sides, REPETITIONS).items()}


def trace_and_lower(function: Callable[..., object], causal: bool) -> float:
    x = jax.ShapeDtypeStruct((1, 128, 8, 64), jnp.float32)
    jax.clear_caches()
    # The first trace is not measured: it includes JAX's one-time initialisation.
    jax.jit(lambda q: jnp.exp(q) @ q.swapaxes(-1, -2)).trace(x).lower()
    return seconds(lambda: jax.jit(lambda q, k, v: function(q, k, v, causal)).trace(x, x, x).lower(), time.process_time)


def attend(name: str) -> Callable[..., object]:
    operation = OperationRegistry.create(name, OperationMetadata())
    return lambda q, k, v, causal: operation(q, k, v, mask=Causal() if causal else None).attention_outputs


def bare(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal)


def eager(function: Callable[..., object]) -> float:
    x = jnp.ones((1, 16, 2, 8))
    return statistics.median(seconds(lambda: jax.block_until_ready(function(x, x, x, True))) for _ in range(10))


def create(name: str) -> float:
    metadata = OperationMetadata()
    return min(seconds(lambda: [OperationRegistry.create(name, metadata) for _ in range(200)]) / 200 for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    json_path = parser.parse_args().json

    sides = {"jax.nn": bare, "vanilla": attend("vanilla"), "sdpa": attend("sdpa"), "auto": attend("auto")}
    figures = {
        "import": imports(),
        "create, after the first": {name: create(name) for name in ("vanilla", "sdpa", "auto")},
    }
    for name, causal in (("full", False), ("causal", True)):
        figures[f"trace and lower, {name}"] = best(
            {side: lambda f=f, c=causal: trace_and_lower(f, c) for side, f in sides.items()}
        )
    figures["eager call, causal"] = best({side: lambda f=f: eager(f) for side, f in sides.items()})

    machine = describe_machine()
    table = Table(title=f"Overhead: {one_line(machine)}")
    for column in ("what", "side", "time", "× the first"):
        table.add_column(column, justify="left" if column in ("what", "side") else "right")
    for what, times in figures.items():
        first = next(iter(times.values()))
        for side, value in times.items():
            table.add_row(what, side, f"{value * 1e6:,.0f} µs", f"{value / first:.2f}")
    Console().print(table)
    if json_path:
        json_path.write_text(json.dumps({"machine": machine, "seconds": figures}))


if __name__ == "__main__":
    main()
