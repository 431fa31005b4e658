"""Forward mode and Hessian-vector products on a CPU, compared with `jax.nn.dot_product_attention`.

Run ``python benchmarks/derivatives.py`` (``--json FILE`` keeps the figures, ``--long`` adds a Hessian-vector product of
65,536 tokens, some minutes). All sides are measured in turns in one run, and the best of several repetitions is
reported: forward; forward and backward; a tangent with its primal; and a Hessian-vector product, the tangent of a
gradient.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_testing.bench import describe_machine

H, D, LENGTHS, REPETITIONS = 4, 64, (1024, 4096), 4
FLASH = OperationRegistry.create("flash", OperationMetadata(platform="cpu"))

ATTENTION: dict[str, Callable[..., jax.Array]] = {
    "flash": lambda q, k, v: FLASH(q, k, v, mask=Causal()).attention_outputs,
    "jax.nn": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
}


def derivatives(attend: Callable[..., jax.Array], d_out: jax.Array) -> dict[str, Callable[..., Any]]:
    """What is measured, by name, as functions of query, key, value and their tangents."""

    def gradient(*qkv: jax.Array) -> Any:
        return jax.value_and_grad(lambda *x: (attend(*x) * d_out).sum(), (0, 1, 2))(*qkv)

    return {
        "forward": lambda x, _: attend(*x),
        "forward and backward": lambda x, _: gradient(*x),
        "jvp": lambda x, t: jax.jvp(attend, x, t),
        "HVP": lambda x, t: jax.jvp(gradient, x, t)[1],
    }


def inputs(T: int, heads: int) -> Any:
    arrays = [jax.random.normal(jax.random.key(i), (1, T, heads, D)) for i in range(7)]
    return tuple(arrays[:3]), tuple(arrays[3:6]), arrays[6]


def measure(T: int) -> dict[str, dict[str, list[float]]]:
    """By side and derivative, seconds and megabytes of temporaries."""
    x, t, d_out = inputs(T, H)
    compiled = {
        (side, name): jax.jit(function).lower(x, t).compile()
        for side, attend in ATTENTION.items()
        for name, function in derivatives(attend, d_out).items()
    }
    best = dict.fromkeys(compiled, float("inf"))
    for _ in range(REPETITIONS):
        for key, function in compiled.items():
            start = time.process_time()
            jax.block_until_ready(function(x, t))
            best[key] = min(best[key], time.process_time() - start)
    figures: dict[str, dict[str, list[float]]] = {side: {} for side in ATTENTION}
    for (side, name), seconds in best.items():
        memory = compiled[side, name].memory_analysis().temp_size_in_bytes / 1e6
        figures[side][name] = [round(seconds, 5), round(memory, 1)]
    return figures


def long(T: int = 65536) -> dict[str, float]:
    """A Hessian-vector product of one head: seconds, and the largest memory of this process in GB."""
    x, t, d_out = inputs(T, 1)
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(derivatives(ATTENTION["flash"], d_out)["HVP"])(x, t))
    seconds = time.perf_counter() - start
    return {"T": T, "seconds": round(seconds, 1), "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--long", action="store_true")
    given = parser.parse_args()
    figures: dict[str, Any] = {"machine": describe_machine(), "shape": [1, "T", H, D]}
    if given.long:  # first, since memory is that of the whole process
        figures["long"] = long()
        print(figures["long"])
    for T in LENGTHS:
        figures[str(T)] = measured = measure(T)
        for side, row in measured.items():
            jvp, hvp = row["jvp"][0] / row["forward"][0], row["HVP"][0] / row["forward and backward"][0]
            listed = ", ".join(f"{name} {1e3 * s:.1f} ms ({mb:.0f} MB)" for name, (s, mb) in row.items())
            print(f"T {T}, {side}: {listed}; jvp {jvp:.2f} x forward, HVP {hvp:.2f} x forward and backward")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
