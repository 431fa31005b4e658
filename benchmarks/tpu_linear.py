"""The bundles of whole linear-attention kernels for TPUs, counted without a TPU: gated delta rule, forward and
decode, and forward with decays by channel (KDA); `tpu_linear_backward.py` has the backward pass.

attnops-tpu is compared with flywheel-tpu's ``fused_conv1d_gdn`` and tokamax's ``causal_conv1d_gated_delta_rule``, and
by channel with flywheel's ``fused_conv1d_kda`` and tokamax's two kernels of ``kda``::

    python benchmarks/tpu_linear.py --generation v6e

A row of 4,096 tokens, and a token of each of 8 rows; 16 heads of 128, bfloat16, float32 states. The peers' kernels also
have the convolution before it and the gates' activations, which attnops has outside. Their matrix products round to
bfloat16, states included, which attnops-tpu does with ``precision="default"``; without it, states have the precision
of float32. tokamax's ``kda`` has neither convolution nor activations, and products for states in float32. By channel,
attnops-tpu's body for mild decays is counted, see its NOTES.md. Loops over transfers inside a step are counted as run
once, and branches of the peers' decode kernels as taken. "floor" is, of a prompt, what the products in chunks of 64
tokens need at the published peak of the matrix units; of a token, what reading and writing states needs at the
published bandwidth of main memory. Needs Linux on x86, Python 3.12 and
``pip install -r benchmarks/requirements-tpu.txt``.
"""

from __future__ import annotations

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

from attnops_tpu.aot import compile_for
from attnops_tpu.schedule import Schedule, measure

H: Final = 16
D: Final = 128
TOKENS: Final = 4096
ROWS: Final = 8
WIDTH: Final = 4
NAMES: Final = ("attnops-tpu", "attnops-tpu, precision=default", "flywheel", "tokamax")
# Operations of three products of D · Dv and four of C · D for each token and head; bytes of states read and written.
PRODUCTS: Final = 2 * TOKENS * H * (3 * D * D + 4 * 64 * D)
BYTES: Final = 2 * 4 * ROWS * H * D * D
# Tokens of a tile of a prompt, and rows of a tile of a decoding step, which the peers choose for these sizes.
TILES: Final = {("flywheel", False): 128, ("tokamax", False): 128, ("flywheel", True): 4, ("tokamax", True): 2}


class Job(NamedTuple):
    """A kernel to compile."""

    generation: str
    name: str
    decode: bool
    channel: bool = False


def total(job: Job, schedule: Schedule) -> float:
    """The bundles of a kernel for the whole problem."""
    in_loop, regions = sum(1 for depth in schedule.depths if depth), schedule.regions
    outside = schedule.bundles - in_loop
    if job.channel and not job.decode and job.name != "flywheel":
        # attnops-tpu's body is the longest region; the one with a loop is for strong decays, others run once a head.
        body = max((x.bundles for x in regions.skipped if not x.loops), default=0)
        body = body if job.name.startswith("attnops") else 0
        return regions.once + TOKENS // 64 * (regions.step + body) + sum(x.bundles for x in regions.skipped) - body
    if job.name.startswith("attnops"):
        if job.decode:
            return regions.once + ROWS * (regions.step + sum(x.bundles for x in regions.skipped))
        return regions.once + TOKENS // 64 * regions.step + sum(x.bundles for x in regions.skipped)
    if job.name == "flywheel" and not job.decode:
        # Two bodies: of a full tile, and of the last tokens, which is skipped; a full tile skips its part for a state
        # of fewer tokens.
        full, tail = sorted((x for x in schedule.spans if x.depth == 1), key=lambda x: x.start - x.stop)[:2]
        inside = max((x.stop - x.start for x in schedule.spans if full.start < x.start < x.stop < full.stop), default=0)
        in_loop -= tail.stop - tail.start + inside
    return outside + (ROWS if job.decode else TOKENS) // TILES[job.name, job.decode] * in_loop


def program(job: Job) -> tuple[Callable[..., Any], list[Any], tuple[int, ...]]:
    """A function, the shapes of its arguments, and which of them are donated."""
    import jax
    import jax.numpy as jnp

    def of(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    rows, length = (ROWS, 1) if job.decode else (1, TOKENS)
    if job.name.startswith("attnops"):
        from attnops import OperationMetadata
        from attnops_tpu.linear.operation import TPULinearAttention

        precision: Any = "default" if "default" in job.name else None
        metadata = OperationMetadata(platform="tpu", precision=precision, on_unsupported="error", mode="prefill")
        linear = TPULinearAttention(metadata)

        def own(state: Any, query: Any, key: Any, value: Any, decay: Any, beta: Any) -> Any:
            return linear(query, key, value, decay=decay, beta=beta, initial_state=state, return_state=True)

        arrays = [of(rows, length, H, D, dtype=jnp.bfloat16)] * 3
        decays = of(rows, length, H, *[D] * job.channel)
        return own, [of(rows, H, D, D), *arrays, decays, of(rows, length, H)], (0,)
    tpu_flywheel.pretend(job.generation)
    if job.channel:
        return by_channel(job)
    if job.name == "flywheel":
        from flywheel_tpu.linear_attention.gdn.wrapper import fused_conv1d_gdn

        gates = jnp.float32
    else:
        from tokamax._src.ops.causal_conv1d_gated_delta_rule.wrapper import fused_conv1d_gdn

        gates = jnp.bfloat16

    def peer(conv: Any, state: Any, qkv: Any, b: Any, a: Any, weight: Any, a_log: Any, bias: Any, *indices: Any) -> Any:
        starts, slots, distribution, lengths = indices
        more = {"read_state_indices": slots} if job.name == "flywheel" else {}
        return fused_conv1d_gdn(
            qkv, b, a, conv, state, weight, None, a_log, bias, starts, slots, distribution, lengths,
            n_kq=H, n_v=H, d_k=D, d_v=D, kernel_size=WIDTH, **more,
        )  # fmt: skip

    features, tokens = 3 * H * D, rows * length
    shapes = [
        of(ROWS + 1, WIDTH - 1, features), of(ROWS + 1, H, D, D), of(tokens, features, dtype=jnp.bfloat16),
        of(tokens, H, dtype=gates), of(tokens, H, dtype=gates), of(features, 1, WIDTH), of(H), of(H),
        *(of(n, dtype=jnp.int32) for n in (ROWS + 1, ROWS, 3, ROWS)),
    ]  # fmt: skip
    return peer, shapes, (0, 1)


def by_channel(job: Job) -> tuple[Callable[..., Any], list[Any], tuple[int, ...]]:
    """A prompt with decays by channel, by a peer; see `program`."""
    import jax
    import jax.numpy as jnp

    def of(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    if job.name == "tokamax":
        from tokamax._src.ops.kda.pallas_mosaic_tpu_fwd_kernel import chunk_kda_fwd_custom

        def kda(q: Any, k: Any, v: Any, gate: Any, beta: Any, state: Any) -> Any:
            options = {"scale": D**-0.5, "initial_state": state, "output_final_state": True, "disable_recompute": False}
            return chunk_kda_fwd_custom(q, k, v, gate, beta, **options)[0]

        arrays = [of(H, 1, TOKENS, D, dtype=jnp.bfloat16)] * 3
        return kda, [*arrays, of(H, 1, TOKENS, D), of(H, 1, TOKENS), of(1, H, D, D)], ()
    from flywheel_tpu.linear_attention.kda.wrapper import fused_conv1d_kda

    def fused(
        conv: Any, state: Any, qkv: Any, b: Any, g: Any, weight: Any, a_log: Any, bias: Any, *indices: Any
    ) -> Any:
        starts, slots, distribution, lengths = indices
        return fused_conv1d_kda(
            qkv, b, g, conv, state, weight, None, a_log, bias, starts, slots, distribution, lengths, slots,
            n_kq=H, n_v=H, d_k=D, d_v=D, kernel_size=WIDTH,
        )  # fmt: skip

    features = 3 * H * D
    shapes = [
        of(ROWS + 1, WIDTH - 1, features), of(ROWS + 1, H, D, D), of(TOKENS, features, dtype=jnp.bfloat16),
        of(TOKENS, H), of(TOKENS, H * D, dtype=jnp.bfloat16), of(features, 1, WIDTH), of(H), of(H * D),
        *(of(n, dtype=jnp.int32) for n in (ROWS + 1, ROWS, 3, ROWS)),
    ]  # fmt: skip
    return fused, shapes, (0, 1)


def count(job: Job) -> dict[str, Any]:
    """The bundles of a job, and of its code."""
    own = "linear_attention" + "_decode" * job.decode
    names = [own if job.name.startswith("attnops") else "batched" if job.decode else "per_seq"]
    if job.channel and job.name.startswith("attnops"):
        names = ["linear_attention_channels"]
    elif job.channel and job.name == "tokamax":
        names = ["pallas_kda_fwd_intra_fused", "chunk_kda_fwd_h_o_varlen"]
    command = [str(Path(__file__).resolve()), "child", json.dumps(job)]
    found = [measure(command, name)[0] for name in names]
    return {"bundles": sum(total(job, x) for x in found), "code": sum(x.bundles for x in found)}


def main(generation: Annotated[list[str] | None, typer.Option(help="v6e, tpu7x, …")] = None) -> None:
    """Print a table."""
    shown = Table(title="Thousands of bundles; in brackets attnops-tpu with precision=default relative to it")
    for column in ("TPU", "kernel", "4,096 tokens", "code", "8 rows of a token", "code", "by channel", "code"):
        shown.add_column(column, no_wrap=True)
    for chip in generation or ["v6e", "tpu7x"]:
        found = {name: [count(Job(chip, name, decode)) for decode in (False, True)] for name in NAMES}
        for name in NAMES:
            found[name].append(count(Job(chip, name, False, channel=True)))
        for name, passes in found.items():
            texts = []
            for best, each in zip(found[NAMES[1]], passes, strict=True):
                ratio = "" if name.startswith("attnops") else f" ({best['bundles'] / each['bundles']:.2f})"
                texts += [f"{each['bundles'] / 1e3:.1f}{ratio}", f"{each['code'] / 1e3:.1f}"]
            shown.add_row(chip, name, *texts)
        floors = PRODUCTS / PEAK[chip], BYTES / BYTES_A_CYCLE[chip]
        shown.add_row(chip, "floor", f"{floors[0] / 1e3:.1f}", "", f"{floors[1] / 1e3:.1f}", "")
    Console(width=140).print(shown)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        given = Job(*json.loads(sys.argv[2]))
        compile_for(*program(given)[:2], given.generation, program(given)[2])
    else:
        typer.run(main)
