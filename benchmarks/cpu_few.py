"""Figures of attnops-cpu's `flash` with few queries over arrays, compared with native `flash`.

Run ``taskset -c 0 python benchmarks/cpu_few.py``, or ``--clock`` without taskset for the clock on all cores.
Causal, B 1, D 128; both are checked against each other and timed in turns, and the best of each is reported.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_cpu import CpuFlashAttention

D: Final = 128
SECONDS: Final = 0.4  # of each case
# Query heads and kv heads.
HEADS: Final = ((8, 8), (32, 8), (8, 1))


def compare(H: int, K: int, T: int, S: int, dtype: str, clock: Any) -> tuple[float, float]:
    """The best seconds of attnops-cpu, and of native `flash`."""
    rng = np.random.default_rng(0)
    shapes = (1, T, H, D), (1, S, K, D), (1, S, K, D)
    arrays = [jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype) for shape in shapes]
    runs: list[Any] = []
    for name in ("attnops-cpu:flash", "attnops:flash"):
        op: Any = OperationRegistry.create(name, OperationMetadata(on_unsupported="error"))
        runs.append(
            jax.jit(lambda q, k, v, op=op: op(q, k, v, mask=Causal()).attention_outputs).lower(*arrays).compile()
        )
    found, expected = (np.asarray(run(*arrays), np.float32) for run in runs)
    assert np.abs(found - expected).max() < (1e-5 if dtype == "float32" else 2e-2) * np.abs(expected).max()
    best, start = [float("inf")] * 2, time.perf_counter()
    while time.perf_counter() - start < SECONDS or best[0] == float("inf"):
        for i, run in enumerate(runs):
            jax.block_until_ready(run(*arrays))  # the caches are its own
            begin = clock()
            for _ in range(4):
                jax.block_until_ready(run(*arrays))
            best[i] = min(best[i], (clock() - begin) / 4)
    return best[0], best[1]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clock", action="store_true", help="the time by the clock, not the processor's")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 2048, 8192, 32768])
    given = parser.parse_args()
    OperationRegistry.register(CpuFlashAttention, override=True)
    clock = time.perf_counter if given.clock else time.process_time
    print("| dtype | H | K | T | S | ms | native over it |\n|---|--:|--:|--:|--:|--:|--:|")
    for dtype in given.dtypes:
        for H, K in HEADS:
            for S in given.lengths:
                for rows in (1, 4, 16, 32, 64):
                    if T := rows // (H // K):
                        mine, native = compare(H, K, T, S, dtype, clock)
                        cells = f"{dtype} | {H} | {K} | {T} | {S:,} | {mine * 1e3:.2f} | {native / mine:.2f}"
                        print(f"| {cells} × |", flush=True)


if __name__ == "__main__":
    main()
