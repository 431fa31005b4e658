"""attnops-ring compared with the ``ringattention`` package and tokamax's ring: errors, bytes sent, time.

Run ``python benchmarks/ring_peers.py`` (``--devices 8``, ``--length 4096``, ``--rounds 5``, ``--json FILE``) on a host
with a few GB of memory. Times are those of the host's CPU devices, which share its cores: they show how much is
computed, not how well transfers are hidden. Bytes are counted in each library's traced program, times the iterations of
its loops. If a peer is not installed, or does not run on a CPU, its row says so. Needs
``pip install attnops-testing attnops-ring``, and for the peers ``ringattention`` and ``tokamax``.
"""

from __future__ import annotations

import functools
import json as json_module
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from attnops_testing.bench import in_turns

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
AXIS = "sp"
Attention = Callable[[Any, Any, Any], Any]


def attnops(mesh: Mesh, length: int, order: str) -> Attention:
    """attnops-ring for tokens in this order. Reordering is not included, since a model does it once."""
    from attnops import OperationMetadata, OperationRegistry
    from attnops.masks import Causal

    ring: Any = OperationRegistry.create("ring", OperationMetadata(mesh=mesh))
    return lambda q, k, v: ring(q, k, v, mask=Causal(), order=order).attention_outputs


def attnops_in_map(mesh: Mesh, length: int, order: str) -> Attention:
    """attnops-ring inside a `jax.shard_map` of the caller, as `ringattention` is called."""
    from attnops import OperationRegistry
    from attnops.masks import Causal

    ring: Any = OperationRegistry.create("ring")
    spec = PartitionSpec(None, AXIS)
    return jax.shard_map(
        lambda q, k, v: ring(q, k, v, mask=Causal(), order=order).attention_outputs,
        mesh=mesh, in_specs=spec, out_specs=spec,
    )  # fmt: skip


def ringattention(mesh: Mesh, length: int, order: str) -> Attention:
    """The `ringattention` package by Liu (Apache-2.0), in plain JAX; it needs as many kv heads as query heads."""
    import jax.lib

    if not hasattr(jax.lib, "xla_bridge"):
        # The package asks this function, which newer JAX no longer has, for the platform.
        from jax.extend import backend

        jax.lib.xla_bridge = backend
    from ringattention import ringattention_jax

    chunk = min(512, length // mesh.size)
    options = {
        "causal_block_size": 1, "deterministic": True, "dropout_rng": None, "attn_pdrop": 0.0,
        "query_chunk_size": chunk, "key_chunk_size": chunk, "dtype": jnp.float32,
        "policy": jax.checkpoint_policies.nothing_saveable, "precision": None, "prevent_cse": True,
    }  # fmt: skip

    def part(q: Any, k: Any, v: Any) -> Any:
        return ringattention_jax(q, k, v, None, None, None, AXIS, True, options)

    spec = PartitionSpec(None, AXIS)
    inside = jax.shard_map(part, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    return lambda q, k, v: inside(q, *(jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v)))


def tokamax(mesh: Mesh, length: int, order: str) -> Attention:
    """Tokamax's experimental ring over splash attention, for TPUs: traced, not run. Its mask is an array [T, T]."""
    from tokamax._src.ops.experimental.tpu.splash_attention import ring_attention_kernel, splash_attention_mask

    kernel = ring_attention_kernel.make_ring_attention(
        splash_attention_mask.make_causal_mask((length, length)), is_mqa=False, ring_axis=AXIS,
        q_seq_shards=mesh.size, kv_seq_shards=mesh.size,
    )  # fmt: skip
    spec = PartitionSpec(None, AXIS)
    inside = jax.shard_map(
        lambda kernel, q, k, v: kernel(q, k, v, None), mesh=mesh, out_specs=spec, check_vma=False,
        in_specs=(kernel.manual_sharding_spec(), spec, spec, spec),
    )  # fmt: skip

    def run(q: Any, k: Any, v: Any) -> Any:
        k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
        return inside(kernel, *(x[0].swapaxes(0, 1) for x in (q, k, v))).swapaxes(0, 1)[None]

    return run


CONTENDERS = {
    "attnops-ring, zigzag": (attnops, "zigzag"),
    "attnops-ring, contiguous": (attnops, "contiguous"),
    "attnops-ring, zigzag, in a shard_map": (attnops_in_map, "zigzag"),
    "attnops-ring, contiguous, in a shard_map": (attnops_in_map, "contiguous"),
    "ringattention": (ringattention, "contiguous"),
    "tokamax": (tokamax, "contiguous"),
}


def bytes_sent(jaxpr: Any, times: int = 1) -> int:
    """Bytes that a device sends to its neighbour, over all iterations of loops; for branches, the largest."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ppermute":
            total += times * sum(math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in equation.invars)
            continue
        rounds = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        inner = [bytes_sent(getattr(x, "jaxpr", x), rounds) for x in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ) if hasattr(getattr(x, "jaxpr", x), "eqns")]  # fmt: skip
        total += max(inner, default=0) if equation.primitive.name == "cond" else sum(inner)
    return total


def timings(timed: dict[str, Any], rounds: int) -> dict[tuple[str, int], float]:
    """The median milliseconds of each contender's programs, which are timed in turns."""

    def seconds(program: Any, arguments: Any) -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        return time.perf_counter() - start

    calls = {
        (name, i): functools.partial(seconds, *call) for name, programs in timed.items()
        for i, call in enumerate(programs)
    }  # fmt: skip
    # The first round compiles.
    return {key: statistics.median(times[1:]) * 1e3 for key, times in in_turns(calls, rounds + 1).items()}


def print_rows(rows: list[dict[str, Any]], length: int, devices: int) -> None:
    """Print the figures as a table."""
    table = Table(
        title=f"causal, {length} tokens on {devices} host devices, {HEADS} heads over {KV_HEADS} of {HEAD_DIM}, "
        "float32; sent: times a device's K and V"
    )
    columns = ["ring", "K and V sent forward", "both ways", "largest error", "forward, ms", "forward and backward, ms",
               "note"]  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in ("ring", "note") else "right")
    for row in rows:
        cells = (row.get(column, "") for column in columns)
        table.add_row(*(f"{x:.3g}" if isinstance(x, float) and x < 1e-3 else f"{x:,.1f}" if isinstance(x, float) else x
                        for x in cells))  # fmt: skip
    Console(width=160).print(table)


def main(
    devices: Annotated[int, typer.Option(help="Devices along the sequence.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens.")] = 4096,
    rounds: Annotated[int, typer.Option(help="Timings of each; the median is reported.")] = 5,
    json: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
) -> None:
    """Check, count, time, and print."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    from attnops import OperationRegistry
    from attnops.masks import Causal
    from attnops_ring import reorder, restore

    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(1, length, n, HEAD_DIM)), jnp.float32)
             for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]  # fmt: skip
    flash: Any = OperationRegistry.create("flash")

    def both(attention: Attention) -> Callable[..., Any]:
        def run(q: Any, k: Any, v: Any, d_out: Any) -> Any:
            out, pull_back = jax.vjp(attention, q, k, v)
            return out, *pull_back(d_out)

        return run

    exact = jax.jit(both(lambda q, k, v: flash(q, k, v, mask=Causal()).attention_outputs))(*arrays)
    place = NamedSharding(mesh, PartitionSpec(None, AXIS))
    kv_bytes = 2 * (length // devices) * KV_HEADS * HEAD_DIM * 4
    rows, timed = [], {}
    for name, (make, order) in CONTENDERS.items():
        row: dict[str, Any] = {"ring": name}
        rows.append(row)
        try:
            attention = make(mesh, length, order)
            sent = bytes_sent(jax.make_jaxpr(attention)(*arrays[:3]).jaxpr)
            row["K and V sent forward"] = sent / kv_bytes
            row["both ways"] = bytes_sent(jax.make_jaxpr(both(attention))(*arrays).jaxpr) / kv_bytes
            arguments = [jax.device_put(reorder(x, devices, order), place) for x in arrays]  # type: ignore[arg-type]
            forward, backward = jax.jit(attention), jax.jit(both(attention))
            results = [restore(x, devices, order) for x in backward(*arguments)]  # type: ignore[arg-type]
            row["largest error"] = max(
                float(abs(x - y).max() / abs(y).max()) for x, y in zip(results, exact, strict=True)
            )  # fmt: skip
            timed[name] = [(forward, arguments[:3]), (backward, arguments)]
        except Exception as error:
            row["note"] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    milliseconds = timings(timed, rounds)
    for row in rows:
        for i, column in enumerate(("forward, ms", "forward and backward, ms")):
            if (row["ring"], i) in milliseconds:
                row[column] = milliseconds[row["ring"], i]
    print_rows(rows, length, devices)
    if json:
        json.write_text(json_module.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
