"""A transformer block compiled for a TPU, without a TPU: attnops-tpu compared with JAX's splash attention.

The block has RMS norms, projections, causal attention and a gated MLP; forward and backward, with `jax.checkpoint`::

    python benchmarks/tpu_block.py --generation v6e --json out.json

"temporaries" is the memory of the program's temporaries, in HBM. "estimate" is XLA's estimate of all instructions
outside of the kernels, in thousands of cycles; XLA has no estimate of kernels, which `tpu_kernels.py` counts. Needs
Linux on x86 and ``pip install attnops-tpu[aot] rich typer``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from attnops_tpu.aot import TOPOLOGIES, devices, environment
from attnops_tpu.collectives import KERNEL, computations, scheduled
from attnops_tpu.generations import target
from attnops_tpu.memory import outside_bytes

# Splash's block sizes with the fewest bundles for a causal mask, forward and backward (from `tpu_kernels.py`).
SPLASH_BLOCKS: Final = (1024, 1024, 512), (1024, 1024, 1024)
# The largest number of 64 bits stands for no estimate.
_UNKNOWN: Final = (1 << 63) - 1
_CYCLES: Final = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_cycles(program: str) -> int:
    """XLA's estimate of the cycles of all instructions of a compiled program that are no kernels.

    Loops count once, and what it does not estimate not at all.
    """
    lines = (line for lines in computations(program).values() for line in lines if KERNEL not in line)
    return sum(n for line in lines for n in map(int, _CYCLES.findall(line)) if n < _UNKNOWN)


def attnops(T: int, heads: int, head_dim: int) -> Callable[..., Any]:
    from attnops import OperationMetadata, OperationRegistry
    from attnops.masks import Causal

    flash = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", on_unsupported="error"))
    return lambda q, k, v: flash(q, k, v, mask=Causal()).attention_outputs


def splash(T: int, heads: int, head_dim: int) -> Callable[..., Any]:
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    (q, k, compute), (q_back, k_back, compute_back) = SPLASH_BLOCKS
    sizes = kernels.BlockSizes(
        block_q=q, block_kv=k, block_kv_compute=compute, block_q_dkv=q_back, block_kv_dkv=k_back,
        block_kv_dkv_compute=compute_back, use_fused_bwd_kernel=True,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * heads)
    kernel = jax.vmap(kernels.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return kernel(*(x.swapaxes(1, 2) for x in (q * head_dim**-0.5, k, v))).swapaxes(1, 2)

    return attend


CONTENDERS: Final[dict[str, Callable[[int, int, int], Callable[..., Any]]]] = {"attnops-tpu": attnops, "splash": splash}


def block(attend: Callable[..., Any], heads: int, head_dim: int) -> Callable[..., Any]:
    """The block as a function of its parameters and x [B, T, width]."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, scale: Any) -> Any:
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt((y**2).mean(axis=-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale

    def apply(p: dict[str, Any], x: Any) -> Any:
        y = norm(x, p["norm0"])
        q, k, v = ((y @ p[name]).reshape(*y.shape[:2], heads, head_dim) for name in ("q", "k", "v"))
        x = x + attend(q, k, v).reshape(*y.shape[:2], heads * head_dim) @ p["out"]
        y = norm(x, p["norm1"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    return apply


def figures(name: str, generation: str, B: int, T: int, heads: int, head_dim: int) -> dict[str, Any]:
    """The figures of one program."""
    import jax
    import jax.numpy as jnp

    width, inner = heads * head_dim, 4 * heads * head_dim
    shapes = dict.fromkeys(("q", "k", "v", "out"), (width, width)) | {
        "norm0": (width,), "norm1": (width,), "gate": (width, inner), "up": (width, inner), "down": (inner, width),
    }  # fmt: skip
    place = jax.sharding.SingleDeviceSharding(devices(generation)[0])
    p = {key: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for key, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((B, T, width), jnp.bfloat16, sharding=place)
    function = jax.checkpoint(block(CONTENDERS[name](T, heads, head_dim), heads, head_dim))

    def gradients(p: Any, x: Any, d: Any) -> Any:
        out, pull_back = jax.vjp(function, p, x)
        return out, pull_back(d)

    with target(generation):
        lowered = jax.jit(gradients).trace(p, x, x).lower(lowering_platforms=("tpu",))
    compiled, program = scheduled(lowered, generation)
    lines = [line for lines in computations(program).values() for line in lines]
    return {
        "generation": generation, "name": name, "B": B, "T": T, "heads": heads, "head_dim": head_dim,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes, "outside": outside_bytes(program),
        "estimate": estimated_cycles(program),
        "kernels": sum(KERNEL in line for line in lines),
    }  # fmt: skip


# A parameter for each option of the command line, which typer reads from the signature.
def main(
    generation: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(TOPOLOGIES)}; may be repeated.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens per sequence; a multiple of 1,024.")] = 4096,
    heads: Annotated[int, typer.Option()] = 8,
    head_dim: Annotated[int, typer.Option()] = 128,
    output: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
) -> None:
    """Compile a transformer block for TPUs, with no TPU."""
    if not set(generation or []) <= set(TOPOLOGIES):
        raise typer.BadParameter(f"--generation is {', '.join(generation or [])}; use some of {', '.join(TOPOLOGIES)}")
    os.environ.update(environment())
    rows = [
        figures(name, each, batch, tokens, heads, head_dim) for each in generation or ["v6e"] for name in CONTENDERS
    ]
    shown = Table(title=f"A transformer block, {batch} × {tokens} tokens, {heads} heads of {head_dim}, bfloat16")
    for column in ("TPU", "attention", "temporaries MB", "outside of kernels MB", "estimate, thousand cycles"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row["generation"], row["name"], f"{row['temporaries'] / 1e6:.1f}", f"{row['outside'] / 1e6:.1f}",
            f"{row['estimate'] / 1e3:.0f}",
        )  # fmt: skip
    if output:
        output.write_text(json.dumps(rows, indent=1))
    console = Console(width=max(Console().width, 120))
    console.print(shown)


if __name__ == "__main__":
    typer.run(main)
