"""Figures of attnops-cpu's kernels on one core: causal attention beside native `flash`, jax.nn and torch.

Processor time of one pinned core, so that other work on the machine counts little; contenders take turns in one
process, and the best of several rounds is reported, as a share of what ``--peak`` says that the core can do. A pass's
operations are those of the scores that a causal mask allows: 4 · D each forward, 10 · D backward.

Run ``python benchmarks/cpu_kernels.py``; torch takes part if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_cpu.library import library

Run = Callable[[], object]
BATCH, HEADS = 1, 8
# GFLOP/s of a core of AMD EPYC, family 25 model 17 (Zen 4): 512-bit FMA and VDPBF16PS, each one a cycle at 3.3 GHz.
PEAK = {"float32": 106.0, "bfloat16": 211.0}


def of_jax(attend: Callable[..., jax.Array], arrays: list[np.ndarray], dtype: str) -> tuple[Run, Run]:
    """Forward, and forward with backward."""
    query, key, value, d_out = (jnp.asarray(x, dtype) for x in arrays)
    forward = jax.jit(attend)
    both = jax.jit(lambda q, k, v, d: jax.vjp(attend, q, k, v)[1](d))
    return (
        lambda: jax.block_until_ready(forward(query, key, value)),
        lambda: jax.block_until_ready(both(query, key, value, d_out)),
    )


def of_operation(name: str, arrays: list[np.ndarray], dtype: str) -> tuple[Run, Run]:
    """An operation of attnops."""
    operation: Any = OperationRegistry.create(name, OperationMetadata(mode="train", on_unsupported="error"))
    return of_jax(lambda q, k, v: operation(q, k, v, mask=Causal()).attention_outputs, arrays, dtype)


def of_torch(arrays: list[np.ndarray], dtype: str) -> tuple[Run, Run]:
    """PyTorch's fused attention, heads before length."""
    import torch

    torch.set_num_threads(1)
    given = [torch.from_numpy(x).to(getattr(torch, dtype)).transpose(1, 2).contiguous() for x in arrays]
    *qkv, d_out = given
    for x in qkv:
        x.requires_grad_()

    def attend() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)

    def forward() -> Any:
        with torch.no_grad():
            return attend()

    return forward, lambda: torch.autograd.grad(attend(), qkv, d_out)


def contenders(arrays: list[np.ndarray], dtype: str) -> dict[str, tuple[Run, Run]]:
    """Each contender's passes, by name."""
    found = {name: of_operation(name, arrays, dtype) for name in ("attnops-cpu:flash", "attnops:flash")}
    found["jax.nn"] = of_jax(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), arrays, dtype
    )  # fmt: skip
    if importlib.util.find_spec("torch"):
        found["torch"] = of_torch(arrays, dtype)
    return found


def seconds(runs: dict[str, tuple[Run, Run]], rounds: int) -> dict[str, tuple[float, float]]:
    """The least processor time of each contender: forward, and backward alone."""
    best = {name: [float("inf"), float("inf")] for name in runs}
    for pair in runs.values():
        for run in pair:
            run()
    for _ in range(rounds):
        for name, pair in runs.items():
            for i, run in enumerate(pair):
                run()  # the caches are its own, and what the contender before still had to free is freed
                start = time.process_time()
                run()
                best[name][i] = min(best[name][i], time.process_time() - start)
    return {name: (forward, both - forward) for name, (forward, both) in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=list(PEAK), choices=list(PEAK))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--core", type=int, default=0, help="the core to which this process is pinned, on Linux")
    parser.add_argument("--peak", type=float, nargs=2, default=[*PEAK.values()], help="GFLOP/s, float32 and bfloat16")
    given = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {given.core})
    peaks = dict(zip(PEAK, given.peak, strict=True))
    table = Table(title=f"Causal, B{BATCH} H{HEADS}, {library().isa}: ms of a core's time, and share of its peak")
    for column in ("dtype", "D", "T", "contender", "forward", "of peak", "backward", "of peak"):
        table.add_column(column, justify="left" if column in ("dtype", "contender") else "right")
    for dtype in given.dtypes:
        for D in given.head_dims:
            for T in given.lengths:
                arrays = [
                    np.random.default_rng(i).normal(size=(BATCH, T, HEADS, D)).astype(np.float32) for i in range(4)
                ]
                work = 4 * D * BATCH * HEADS * T * (T + 1) / 2
                for name, passes in seconds(contenders(arrays, dtype), given.rounds).items():
                    cells = []
                    for each, factor in zip(passes, (1.0, 2.5), strict=True):
                        cells += [f"{each * 1e3:,.1f}", f"{work * factor / each / 1e9 / peaks[dtype]:.0%}"]
                    table.add_row(dtype, str(D), f"{T:,}", name, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
