"""The bundles of a training step's linear attention on TPUs, counted without a TPU: the forward pass that keeps what
the backward one needs, and the backward one.

attnops-tpu's gated delta rule, with decays by head, is compared with tokamax's ``kda``, the only one of the peers'
kernels with a backward pass: flywheel-tpu 0.3 and tokamax's ``causal_conv1d_gated_delta_rule`` have none. ``kda`` has
decays by channel, which need more products and exponentials than decays by head::

    python benchmarks/tpu_linear_backward.py --generation v6e

A row of 4,096 tokens, 16 heads of 128, bfloat16. tokamax keeps states in bfloat16, attnops-tpu in float32. Both passes
of ``kda`` consist of several kernels, each with the tiles of `TILES`; the convolution, the gates' activations and
normalised keys are in neither. "MB" is what a pass moves to and from main memory: operands and results of its kernels,
without padding, and what XLA moves outside of them for the layouts that each library takes. "memory" is the cycles of
both at the published bandwidth. Needs Linux on x86, Python 3.12 and ``pip install -r benchmarks/requirements-tpu.txt``.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import tpu_flywheel
import typer
from rich.console import Console
from rich.table import Table
from tpu_kernels import BYTES_A_CYCLE, PEAK
from tpu_linear import TOKENS, D, H

from attnops_tpu.aot import compile_for
from attnops_tpu.memory import kernel_bytes, outside_bytes
from attnops_tpu.schedule import Schedule, measure

CHUNKS: Final = TOKENS // 64
NAMES: Final = ("attnops-tpu", "attnops-tpu, precision=default", "tokamax")
# Chunks of heads, of all H · CHUNKS, in a grid step of each of tokamax's kernels, by pass: the best of 8 and 16
# forward, of 1, 2, 4, 8 and 16 for the backward kernel with a state, and of 8, 16, 32, 64 and 128 for those without.
# tokamax itself takes 16 and 32. The first one does not fit tpu7x's vector memory with 128.
TILES: Final = {
    False: {"pallas_kda_fwd_intra_fused": 16, "chunk_kda_fwd_h_o_varlen": 16},
    True: {
        "fused_recompute_w_u_vnew_from_h_pallas": 128, "chunk_kda_bwd_dAv_kernel": 128,
        "_fused_dhu_wy_intra_cumsum_pallas_jit": 16,
    },
}  # fmt: skip
SMALLER: Final = {("tpu7x", "fused_recompute_w_u_vnew_from_h_pallas"): 64}
# Operations of the products of all tokens. Forward has three of D · Dv with the state and four of C · D; backward has
# seven with the state or its gradient (K S, K dS', dO Sᵀ, Z Sᵀ, U dS'ᵀ, Qᵀ dO, Kᵀ Z), and eleven of C · D: four of them
# forward's again.
FLOPS: Final = {False: 2 * TOKENS * H * (3 * D * D + 4 * 64 * D), True: 2 * TOKENS * H * (7 * D * D + 11 * 64 * D)}


class Job(NamedTuple):
    """A pass to compile, and the tile of a kernel of tokamax if it is not that of `TILES`."""

    generation: str
    name: str
    backward: bool
    kernel: str = ""
    tile: int = 0


def program(job: Job) -> tuple[Callable[..., Any], list[Any]]:
    """A function, and the shapes of its arguments."""
    if job.name == "tokamax":
        return peer(job)
    from attnops import OperationMetadata
    from attnops_tpu.linear.forward import forward_with_states

    precision: Any = "default" if "default" in job.name else None
    metadata = OperationMetadata(platform="tpu", precision=precision, on_unsupported="error", mode="train")
    arrays = arguments()
    if job.backward:
        return gradients(metadata), [kept(metadata, job.generation, arrays), arrays[2], arrays[-1], *arrays]

    def run(query: Any, key: Any, value: Any, decay: Any, beta: Any, state: Any) -> Any:
        options = {"decay": decay, "beta": beta, "initial_state": state}
        return forward_with_states(metadata, query, key, value, return_state=True, **options)

    return run, arrays


def arguments() -> list[Any]:
    """The shapes of queries, keys, values, decays, betas and the first state of a prompt."""
    import jax
    import jax.numpy as jnp

    tokens, gate = (
        jax.ShapeDtypeStruct((1, TOKENS, H, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, TOKENS, H), jnp.float32),
    )
    return [*[tokens] * 3, gate, gate, jax.ShapeDtypeStruct((1, H, D, D), jnp.float32)]


def gradients(metadata: Any) -> Callable[..., Any]:
    """The gradients of all arrays, from what the forward kernel keeps."""
    from attnops_linear import LinearOutput
    from attnops_tpu.linear.backward import backward

    def run(kept: Any, d: Any, d_last: Any, q: Any, k: Any, v: Any, decay: Any, beta: Any, first: Any) -> Any:
        d = LinearOutput(d, d_last)
        return backward(metadata, kept, d, q, k, v, decay=decay, beta=beta, initial_state=first)

    return run


def kept(metadata: Any, generation: str, arrays: list[Any]) -> Any:
    """The shapes of what the forward kernel keeps."""
    import jax

    from attnops_tpu.generations import target
    from attnops_tpu.linear.forward import forward_with_states

    def run(q: Any, k: Any, v: Any, decay: Any, beta: Any, first: Any) -> Any:
        return forward_with_states(metadata, q, k, v, decay=decay, beta=beta, initial_state=first)[1]

    with target(generation):
        return jax.eval_shape(run, *arrays)


def peer(job: Job) -> tuple[Callable[..., Any], list[Any]]:
    """The passes of tokamax's ``kda`` behind its public function, which asks the device what it is."""
    tpu_flywheel.pretend(job.generation)
    import jax
    import jax.numpy as jnp
    from tokamax._src.ops.kda import pallas_mosaic_tpu_bwd_kernel as second
    from tokamax._src.ops.kda import pallas_mosaic_tpu_fwd_kernel as first

    for module, backward in ((first, False), (second, True)):
        for name in TILES[backward]:
            setattr(module, name, functools.partial(getattr(module, name), mini_batch=tile(job, name)))

    def of(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def forward(query: Any, key: Any, value: Any, gate: Any, beta: Any, state: Any) -> Any:
        return first.chunk_kda_fwd_custom(
            query, key, value, gate, beta, scale=D**-0.5, initial_state=state, output_final_state=True,
            return_residuals=True, chunk_size=64,
        )  # fmt: skip

    tokens, state = of(H, 1, TOKENS, D, dtype=jnp.bfloat16), of(1, H, D, D)
    arrays = [*[tokens] * 3, of(H, 1, TOKENS, D), of(H, 1, TOKENS), state]
    if not job.backward:
        return forward, arrays
    leaves, tree = jax.tree.flatten(jax.eval_shape(forward, *arrays)[1])

    def backward(d_outputs: Any, d_state: Any, *leaves: Any) -> Any:
        residuals = jax.tree.unflatten(tree, leaves)
        static = D**-0.5, False, False, None, True, None, 64, None, True
        return second.chunk_kda_bwd_custom(*static, residuals, (d_outputs, d_state))

    return backward, [tokens, state, *leaves]


def tile(job: Job, kernel: str) -> int:
    """The tile of a kernel of tokamax."""
    default = SMALLER.get((job.generation, kernel), (TILES[False] | TILES[True])[kernel])
    return job.tile if kernel == job.kernel else default


def total(job: Job, kernel: str, schedule: Schedule) -> float:
    """The bundles of a kernel. Regions without products load a first state or store a last one, once."""
    size = tile(job, kernel) if job.name == "tokamax" else H
    regions, steps = schedule.regions, H * CHUNKS / size
    return (
        regions.once
        + steps * regions.step
        + sum(region.bundles * (steps if region.uses["MATMUL"] else H / size) for region in regions.skipped)
    )


def count(job: Job) -> dict[str, float]:
    """The bundles of all kernels of a pass, and the bytes that it moves."""
    own = "linear_attention" + "_backward" * job.backward
    names = [own] if job.name != "tokamax" else [job.kernel] if job.kernel else list(TILES[job.backward])
    bundles, found = 0.0, {}
    for name in names:
        schedule, printed = measure([str(Path(__file__).resolve()), "child", json.dumps(job)], None, f"{name}.1")
        bundles += total(job, name, schedule)
        found = json.loads(printed.splitlines()[-1])
    return found | {"bundles": bundles}


def main(generation: Annotated[list[str] | None, typer.Option(help="v6e, tpu7x, …")] = None) -> None:
    """Print a table."""
    shown = Table(title="Thousands of bundles, and of cycles of main memory; ÷ tokamax forward, backward and both")
    columns = "TPU", "kernels", "forward", "MB", "backward", "MB", "both", "÷ tokamax", "memory"
    for column in columns:
        shown.add_column(column, no_wrap=True)
    for chip in generation or ["v6e", "tpu7x"]:
        found = {name: [count(Job(chip, name, backward)) for backward in (False, True)] for name in NAMES}
        for name, passes in found.items():
            texts = []
            for each in passes:
                texts += [f"{each['bundles'] / 1e3:.1f}", f"{each['bytes'] / 1e6:.0f}"]
            both = sum(each["bundles"] for each in passes)
            ratios = [x["bundles"] / y["bundles"] for x, y in zip(passes, found["tokamax"], strict=True)]
            ratios.append(both / sum(each["bundles"] for each in found["tokamax"]))
            memory = sum(each["bytes"] for each in passes) / BYTES_A_CYCLE[chip]
            ratio = ", ".join(f"{x:.2f}" for x in ratios)
            shown.add_row(chip, name, *texts, f"{both / 1e3:.1f}", ratio, f"{memory / 1e3:.1f}")
        floors = [FLOPS[backward] / PEAK[chip] / 1e3 for backward in (False, True)]
        shown.add_row(chip, "floor", f"{floors[0]:.1f}", "", f"{floors[1]:.1f}", "", f"{sum(floors):.1f}")
    Console(width=160).print(shown)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        given = Job(*json.loads(sys.argv[2]))
        text = compile_for(*program(given), given.generation).as_text()
        print(json.dumps({"bytes": sum(kernel_bytes(text).values()) + outside_bytes(text)}))
    else:
        typer.run(main)
