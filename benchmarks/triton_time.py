"""A model of the time of Hopper's kernels, from their machine code, beside times that an H200 showed; no GPU::

    python benchmarks/triton_time.py

128 × 128 scores need ``max(tensor, special) + WAITS · issue`` cycles of a multiprocessor, and each program START cycles
besides: `triton_static.cycles` counts the three. The two constants are fitted here to forward passes (least squares of
relative errors), and printed with the error of each; "left out" is the error if the constants are fitted to the other
head dims alone. Both passes are predicted by the same constants, and were not fitted.
`triton_time_others.py` predicts others' kernels by these constants.

Then it prints what persistent programs might save at D 64 with a causal mask: as many programs as multiprocessors, each
of which computes several tiles of queries (or of keys) and loads the next one's rows meanwhile. HIDDEN cycles of START
are saved for each tile but a program's first. "As launched" the next tile goes to the first program that is free, as a
GPU does with the programs of today, and as persistent programs do by a counter in memory. "In turn" the tiles are
divided beforehand, the i-th to program i modulo their number.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from triton_static import cycles

from attnops import OperationMetadata, OperationRegistry
from attnops_triton.aot import compile_for, kernels
from attnops_triton.flash.launch import _CACHE
from attnops_triton.flash.order import unordered

CLOCK, MULTIPROCESSORS = 1.8e9, 132
# Cycles of a program's START that the tiles before it may hide: an estimate, see "Programs are not persistent" in
# plugins/attnops_triton/NOTES.md.
HIDDEN = 3000


class Measured(NamedTuple):
    """TFLOP/s of a row of `benchmarks/README.md`, "On an H200": 16k tokens a call, 2,048 features of all heads."""

    D: int
    T: int
    causal: bool
    forward: float
    both: float


POINTS = (
    Measured(128, 4096, True, 491, 418), Measured(128, 4096, False, 576, 458), Measured(128, 16384, True, 559, 470),
    Measured(128, 1024, True, 375, 313), Measured(128, 1024, False, 465, 404), Measured(64, 4096, True, 368, 348),
    Measured(64, 4096, False, 395, 375), Measured(64, 1024, True, 242, 242), Measured(64, 16384, True, 404, 384),
    Measured(256, 4096, True, 532, 258), Measured(256, 4096, False, 596, 284),
)  # fmt: skip


def counts(D: int, adds_dq: bool = False) -> dict[str, dict[str, float]]:
    """The cycles of each kernel of both passes."""
    flash: Any = OperationRegistry.create("attnops-triton:flash", OperationMetadata(platform="cuda"))

    def both(*qkv: jax.Array) -> Any:
        out, pull_back = jax.vjp(lambda *x: flash(*x).attention_outputs, *qkv)
        return out, pull_back(out)

    x = jax.ShapeDtypeStruct((1, 4096, 2048 // D, D), jnp.bfloat16)
    with unordered() if adds_dq else contextlib.nullcontext():
        return {
            each.recipe.kernel.name[14:]: cycles("sm_90", str(D), "bfloat16", each, compile_for(each, "sm_90"))
            for each in kernels(both, (x, x, x), "sm_90")
        }


def squares(point: Measured) -> tuple[int, int]:
    """Programs of a kernel, and 128 × 128 scores that they compute, diagonal ones included."""
    rows = point.T // 128
    heads = 16384 // point.T * 2048 // point.D
    return heads * rows, heads * (rows * (rows + 1) // 2 if point.causal else rows * rows)


def measured_cycles(point: Measured, passes: str) -> float:
    """The cycles that all multiprocessors together had."""
    operations = 4 * 16384 * point.T * 2048 / (2 if point.causal else 1) * (3.5 if passes == "both" else 1)
    return float(operations / (getattr(point, passes) * 1e12) * CLOCK * MULTIPROCESSORS)


def terms(point: Measured, kernel: dict[str, float]) -> tuple[float, float, float]:
    """What START and WAITS are multiplied by, and what is added."""
    programs, number = squares(point)
    return programs, number * kernel["issue"], number * max(kernel["tensor"], kernel["special"])


def fitted(points: list[Measured], counted: dict[int, Any]) -> np.ndarray:
    """START and WAITS of these points."""
    rows = np.array([terms(x, counted[x.D]["forward"]) for x in points])
    cycles = np.array([measured_cycles(x, "forward") for x in points])
    return np.linalg.lstsq(rows[:, :2] / cycles[:, None], 1 - rows[:, 2] / cycles, rcond=None)[0]


def error(point: Measured, constants: np.ndarray, used: list[dict[str, float]], passes: str) -> float:
    """The predicted time over the measured one, less 1."""
    total = np.sum([terms(point, kernel) for kernel in used], axis=0)
    return float((total[:2] @ constants + total[2]) / measured_cycles(point, passes) - 1)


def squares_in_order(T: int) -> list[int]:
    """Squares of 128 × 128 scores of each program at D 64, causal, in the order of `kernels.tokens.locate`."""
    rows, heads = T // 128, 16384 // T * 32
    together = max(1, _CACHE // (T * 2 * 64 * 2))
    groups = [min(together, heads - first) for first in range(0, heads, together)]
    return [rows - row for group in groups for row in range(rows) for _ in range(group)]


def as_launched(squares: list[int], cost: Callable[[int], float]) -> float:
    """The cycles until all programs have ended, if the next one starts where the first one ended."""
    free = [0.0] * MULTIPROCESSORS
    for n in squares:
        heapq.heappush(free, heapq.heappop(free) + cost(n))
    return max(free)


def in_turn(squares: list[int], cost: Callable[[int], float]) -> float:
    """The cycles until all programs have ended, if the i-th runs on multiprocessor i modulo their number."""
    return max(sum(map(cost, squares[i::MULTIPROCESSORS])) for i in range(MULTIPROCESSORS))


def persistent(constants: np.ndarray, counted: dict[str, dict[str, float]]) -> None:
    """Print what persistent programs save at D 64, as a share of the time of the programs of today."""
    start, waits = (float(x) for x in constants)
    print(f"Saved by persistent programs, D 64, causal, if {HIDDEN} of {start:.0f} cycles are hidden")
    print(f"{'kernel':16}{'T':>6}{'outside':>9}{'as launched':>13}{'in turn':>9}")
    for name, kernel in counted.items():
        tile = max(kernel["tensor"], kernel["special"]) + waits * kernel["issue"]
        for T in (2048, 4096, 8192):
            each = squares_in_order(T)
            now = as_launched(each, lambda n, tile=tile: start + n * tile)
            saved = [
                1 - (order(each, lambda n, tile=tile: start - HIDDEN + n * tile) + HIDDEN) / now
                for order in (as_launched, in_turn)
            ]
            outside = start * len(each) / (start * len(each) + tile * sum(each))
            print(f"{name:16}{T:6}{outside:9.1%}{saved[0]:+13.1%}{saved[1]:+9.1%}")


def main() -> None:
    """Print the constants, and the errors of all points."""
    counted = {D: counts(D) for D in (64, 128, 256)}
    for D, of_kernels in counted.items():
        print(D, of_kernels)
    constants = fitted([*POINTS], counted)
    print(f"START {constants[0]:.0f} cycles, WAITS {constants[1]:.2f}, fitted to {len(POINTS)} forward passes")
    print(f"{'D':>4}{'T':>7}  {'mask':8}{'forward':>9}{'left out':>10}{'both':>8}")
    for point in POINTS:
        used = counted[point.D]
        others = fitted([x for x in POINTS if x.D != point.D], counted)
        found = [
            error(point, constants, [used["forward"]], "forward"), error(point, others, [used["forward"]], "forward"),
            error(point, constants, [*used.values()], "both"),
        ]  # fmt: skip
        mask = "causal" if point.causal else "full"
        print(f"{point.D:4}{point.T:7}  {mask:8}" + "".join(f"{x:+9.0%}" for x in found))
    persistent(constants, counted[64] | {"with dq": counts(64, adds_dq=True)["backward"]})


if __name__ == "__main__":
    main()
