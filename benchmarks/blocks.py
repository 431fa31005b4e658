"""The cost of chosen blocks on a CPU: one block of keys in eight for each block of queries, and full attention.

Run ``python benchmarks/blocks.py`` (``--json FILE`` to keep the figures). All sides are measured in turns in one run,
in CPU time, and the best of several repetitions is reported, divided by an eighth of full attention's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Blocks
from attnops_testing.bench import describe_machine

B, T, H, D = 1, 16384, 2, 64
SIZES = (1024, 512, 256, 128, 64)
SHARE, REPETITIONS = 8, 3


def choice(block: int) -> Blocks:
    """Indices of the chosen blocks, at random; they are traced."""
    n, rng = T // block, np.random.default_rng(block)
    chosen = np.stack([rng.permutation(n)[: n // SHARE] for _ in range(n)])[None, None]
    return Blocks(jnp.asarray(chosen, jnp.int32), block, block)


def sides(backward: bool) -> dict[str, Callable[[], Any]]:
    """The compiled calls, by the size of blocks."""
    operation = OperationRegistry.create("flash", OperationMetadata(platform="cpu"))
    query, key, value = (jax.random.normal(jax.random.key(i), (B, T, H, D)) for i in range(3))

    def out(query: jax.Array, key: jax.Array, value: jax.Array, mask: Blocks | None) -> jax.Array:
        return operation(query, key, value, mask=mask).attention_outputs

    called = jax.jit(jax.grad(lambda *x: out(*x).sum(), (0, 1, 2)) if backward else out)
    masks: dict[str, Blocks | None] = {"full": None} | {str(block): choice(block) for block in SIZES}
    return {name: lambda mask=mask: jax.block_until_ready(called(query, key, value, mask))
            for name, mask in masks.items()}  # fmt: skip


def seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    figures: dict[str, Any] = {"machine": describe_machine(), "shape": [B, T, H, D]}
    for name, backward in (("forward", False), ("forward and backward", True)):
        calls = sides(backward)
        for call in calls.values():
            call()
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(REPETITIONS):
            for side, call in calls.items():
                best[side] = min(best[side], seconds(call))
        figures[name] = best
        print(f"{name}: full {best['full']:.3f} s")
        for side in map(str, SIZES):
            print(f"  blocks of {side}: {best[side]:.3f} s, {best[side] * SHARE / best['full']:.2f} of an eighth")
    if path is not None:
        path.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
