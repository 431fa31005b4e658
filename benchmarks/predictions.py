"""Writes the times that counts of the compilers predict, which `attnops prove` prints beside measured ones::

    python benchmarks/tpu_kernels.py --json out.json --only attnops-tpu
    python benchmarks/predictions.py out.json

TPUs: the bundles of `tpu_kernels.py` at the clock of the published peak, times the constant that `tpu_model.py` finds
for each generation, and the bytes that the program moves outside of its kernels at the published bandwidth; the range
is that of the model's errors. Hopper: the model of `triton_time.py`, fitted to an H200, ± 6 % forward; its error over
both passes is larger and not predicted here. Needs what `tpu_kernels.py` and `triton_time.py` need.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from tpu_contenders import HEADS, KernelJob
from tpu_kernels import BYTES_A_CYCLE, bundles
from tpu_model import CLOCK
from triton_time import CLOCK as HOPPER_CLOCK
from triton_time import MULTIPROCESSORS, POINTS, Measured, counts, fitted, terms

FILE: Final = Path(__file__).parents[1] / "plugins/attnops_testing/src/attnops_testing/prove/predictions.json"
# The constant of `tpu_model.py`, and the smallest and the largest of its errors.
MODEL: Final = {"v6e": (1.03, 0.98, 1.02), "tpu7x": (1.26, 0.93, 1.11)}
DEVICES: Final = {"v6e": ["TPU v6 lite", "TPU v6e"], "tpu7x": ["TPU7x", "TPU 7x"]}
HOPPER: Final = ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
MASKS: Final = {"causal": "Causal()", "full": "", "window": "Causal() & SlidingWindow(1023, 0)"}
HEAD_DIM: Final = 128


def call(T: int, mask: str, backward: bool) -> dict[str, Any]:
    """The fields of a measurement that a prediction is for."""
    return {"length": T, "head_dim": HEAD_DIM, "dtype": "bfloat16", "mask": MASKS[mask], "backward": backward}


def of_tpus(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of TPUs; a pass forward and backward has both kernels."""
    # The newest result of each job, which is the last.
    newest = {}
    for key, result in results.items():
        if "error" not in result:
            job = KernelJob(*json.loads(key)[0])
            newest[job._replace(blocks=tuple(job.blocks))] = result
    rows = []
    for job, result in newest.items():
        other = newest.get(job._replace(backward=False))
        if job.name != "attnops-tpu" or job.head_dim != HEAD_DIM or job.mask not in MASKS or other is None:
            continue
        kernels = sum(bundles(job, result).values()) + (sum(bundles(job, other).values()) if job.backward else 0)
        # The bytes of a backward job are those of both passes, for all heads.
        outside = result["outside"] / BYTES_A_CYCLE[job.generation] / HEADS
        factor, *errors = MODEL[job.generation]
        ms = [(kernels * factor * error + outside) / CLOCK[job.generation] / 1e6 for error in (errors[0], 1, errors[1])]
        rows.append(
            {
                "devices": DEVICES[job.generation], "operations": ["attnops-tpu:flash"],
                "call": call(job.T, job.mask, job.backward), "ms_per_head": [round(x, 6) for x in ms],
            }
        )  # fmt: skip
    return rows


def of_hopper() -> list[dict[str, Any]]:
    """Rows of Hopper's forward kernels."""
    counted = {D: counts(D) for D in (64, 128, 256)}
    constants = fitted([*POINTS], counted)
    rows = []
    for T, causal in ((4096, True), (4096, False), (8192, True)):
        point = Measured(HEAD_DIM, T, causal, 0, 0)
        start, waits, cycles = terms(point, counted[HEAD_DIM]["forward"])
        total = start * constants[0] + waits * constants[1] + cycles
        heads = 16384 // T * 2048 // HEAD_DIM
        ms = float(total) / MULTIPROCESSORS / HOPPER_CLOCK * 1e3 / heads
        rows.append(
            {
                "devices": HOPPER, "operations": ["attnops-triton:flash"],
                "call": call(T, "causal" if causal else "full", False),
                "ms_per_head": [round(ms * x, 6) for x in (0.94, 1, 1.06)],
            }
        )  # fmt: skip
    return rows


def main(results: Annotated[Path, typer.Argument(help="The file of tpu_kernels.py --json.")]) -> None:
    """Write the file of attnops-testing."""
    rows = of_tpus(json.loads(results.read_text())) + of_hopper()
    lines = ",\n ".join(json.dumps(row) for row in rows)
    FILE.write_text(f'{{"rows": [\n {lines}\n]}}\n')
    print(f"{len(rows)} predictions in {FILE}")


if __name__ == "__main__":
    typer.run(main)
