"""Figures of attnops-triton's compiled linear attention, without a GPU: registers, spills, instructions::

    python benchmarks/triton_linear.py --arch sm_90
    python benchmarks/triton_linear.py --fla ~/fla/lib/python3.11/site-packages    # with flash-linear-attention's

The gated delta rule: a row of 4,096 tokens, its gradients (``pass`` is backward; without the forward pass that keeps
what they need), and a token of each of 8 rows, 16 heads of D = Dv = 128, bfloat16, float32 states. ``instructions`` are
of a warp for 64 tokens (decode: one token) of a head, summed over warps and programs: each loop's, times how often it
runs. On AMD, whose loops are not told apart, they are those of the code, and no sum.
``bytes`` are of arrays that kernels read and write, per head and 64 tokens (decode: one token), each array once a
kernel; programs that share a head read most of them from the cache again.

``--fla`` names the folder of an installed flash-linear-attention (``pip install --no-deps fla-core``), which needs no
PyTorch here. Its kernels are compiled with one choice of those that its tuning has.
"""

from __future__ import annotations

import importlib.metadata
import json as json_module
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["ATTNOPS_TRITON_CACHE"] = ""

import jax
import jax.numpy as jnp
import triton_linear_peers as peers
import typer
from rich.console import Console
from rich.table import Table

from attnops import OperationMetadata
from attnops_triton.aot import Binary, compile_for, kernels
from attnops_triton.linear.operation import TritonLinearAttention
from attnops_triton.targets import is_amd

ARCHS: Final = ("sm_80", "sm_90", "sm_100", "gfx942")
H, D, C, ROWS, TOKENS = 16, 128, 64, 8, 4096
STATE: Final = 4 * D * D
PASSES: Final = ("forward", "backward", "decode")
# Bytes of a head's 64 tokens. Ours: keys and queries, gates with decay and beta, scores and inverse; then values and
# outputs too. Backward: more gates; then the gradients of outputs and values, and of the state; then solutions, the
# state too, and gradients.
_TILE, _SQUARE, _GATES, _STATE = 2 * C * D, 2 * C * C, 4 * C, 2 * D * D
_BYTES: Final = {
    "attnops_linear_scores": 2 * _TILE + 4 * _GATES + 2 * _SQUARE,
    "attnops_linear_chunks": 4 * _TILE + 2 * _GATES + 2 * _SQUARE,
    "attnops_linear_chunks_backward": 4 * _TILE + 2 * _GATES + 2 * _SQUARE + _STATE,
    "attnops_linear_gradients": 7 * _TILE + 8 * _GATES + 2 * _STATE,
    "attnops_linear_tokens": 2 * STATE + 4 * 2 * D,
    "chunk_local_cumsum_scalar_kernel": 2 * _GATES,
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": _TILE + 2 * _GATES + _SQUARE,
    "recompute_w_u_fwd_kernel": 4 * _TILE + 2 * _GATES + _SQUARE,
    # w, u and k; the changed values and the state before each chunk, bfloat16.
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": 4 * _TILE + _GATES + _STATE,
    "chunk_fwd_kernel_o": 4 * _TILE + _GATES + _STATE,
    "chunk_bwd_kernel_dv_local": 4 * _TILE + _GATES,
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": 6 * _TILE + _GATES + _STATE,
    "chunk_bwd_kernel_dqkwg": 8 * _TILE + 2 * _GATES + 2 * _STATE,
    "prepare_wy_repr_bwd_kernel": 6 * _TILE + 4 * _GATES + _SQUARE,
    "fused_recurrent_gated_delta_rule_fwd_kernel": 2 * STATE + 4 * 2 * D,
}


def ours(arch: str, precision: str | None, kind: str, batch: int) -> list[dict[str, Any]]:
    """A row for each kernel of attnops-triton, of one of `PASSES`."""
    metadata = OperationMetadata(platform="cuda", on_unsupported="error", precision=precision)  # type: ignore[arg-type]
    operation = TritonLinearAttention(metadata)
    B, T = (ROWS, 1) if kind == "decode" else (batch, TOKENS)
    x = jax.ShapeDtypeStruct((B, T, H, D), jnp.bfloat16)
    gate, state = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((B, T, H), (B, H, D, D)))

    def run(x: Any, gate: Any, state: Any) -> Any:
        return operation(x, x, x, decay=gate, beta=gate, initial_state=state, return_state=True, mode="prefill")

    def gradients(x: Any, gate: Any, state: Any) -> Any:
        results, pull_back = jax.vjp(run, x, gate, state)
        return pull_back(results)

    launched = kernels(gradients if kind == "backward" else run, (x, gate, state), arch)
    rows = []
    for each in launched[2:] if kind == "backward" else launched:
        name, warps = each.recipe.kernel.name, each.recipe.warps
        of_chunk = name.endswith(("scores", "gradients"))
        programs = each.programs // (B * H * (TOKENS // C if of_chunk else 1))
        binary = compile_for(each, arch)
        # The loops of the kernel of scores substitute, in 15 turns each; those of the kernel of gradients are over
        # columns of values.
        turns = 15 if name.endswith("scores") else D // each.tiles.columns if name.endswith("gradients") else 1
        moved = _BYTES[name]
        if name.endswith("scores") and kind == "backward":
            moved += 4 * _GATES
        if precision is None and name.endswith(("scores", "chunks", "chunks_backward")):
            moved += (1 + (kind == "backward")) * _SQUARE  # the inverse is float32, backward scores too
        library = f"attnops-triton{', default' if precision else ''}"
        rows.append(figures(arch, library, kind, name, binary, warps, programs, [turns] * len(binary.loops),
                            "chunks" in name, moved))  # fmt: skip
    return rows


def figures(
    arch: str, library: str, kind: str, name: str, binary: Binary, warps: int, programs: int, trips: list[int],
    of_loop: bool, moved: int,
) -> dict[str, Any]:  # fmt: skip
    """A row of the table.

    Args:
        arch: the architecture.
        library: whose kernel it is.
        kind: one of `PASSES`.
        name: of the kernel.
        binary: the kernel.
        warps: of a program.
        programs: of a head's chunk.
        trips: how often each innermost loop runs.
        of_loop: whether a program has all chunks, one in each turn of its only loop.
        moved: bytes that it reads and writes.
    """
    if is_amd(arch):
        instructions = sum(binary.instructions.values())
    elif of_loop:
        instructions = sum(binary.loops[0].values()) * warps * programs
    else:
        instructions = sum(peers.executed(binary, dict(enumerate(trips))).values()) * warps * programs
    spills = binary.spilled if is_amd(arch) else binary.count("LDL", "STL")
    return {
        "arch": arch, "library": library, "pass": kind, "kernel": name, "warps": warps, "programs": programs,
        "registers": binary.registers, "spills": spills, "shared": binary.shared, "instructions": instructions,
        "bytes": moved,
    }  # fmt: skip


def theirs(arch: str, folder: Path, kind: str) -> list[dict[str, Any]]:
    """A row for each kernel of flash-linear-attention, of one of `PASSES`."""
    rows = []
    for peer in {"forward": peers.PROMPT, "backward": peers.BACKWARD, "decode": (peers.DECODE,)}[kind]:
        binary = peers.compiled(peer, folder, arch, H, H, D)
        columns = peer.options.get("BV", D)
        of_loop = peer.name.endswith("blockdim64")
        is_whole = peer.name.startswith(
            ("chunk_local", "chunk_gated_delta_rule_fwd_kkt", "recompute", "prepare_wy_repr")
        )
        programs = 1 if is_whole else D // columns
        trips = {"chunk_gated_delta_rule_fwd_kkt_solve_kernel": [D // 64, 14, 14, 14, 14],
                 "recompute_w_u_fwd_kernel": [2, 2], "chunk_fwd_kernel_o": [2],
                 "prepare_wy_repr_bwd_kernel": [2, 2, 2]}.get(peer.name, [1])  # fmt: skip
        rows.append(figures(arch, "flash-linear-attention", kind, peer.name, binary, peer.warps, programs, trips,
                            of_loop, _BYTES[peer.name]))  # fmt: skip
    return rows


def main(
    arch: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(ARCHS)}; may repeat.")] = None,
    fla: Annotated[Path | None, typer.Option(help="The folder of an installed flash-linear-attention.")] = None,
    batch: Annotated[int, typer.Option(help="Rows of 4,096 tokens; of many, our programs have more columns.")] = 1,
    json: Annotated[Path | None, typer.Option(help="File for all figures.")] = None,
) -> None:
    """Compile the kernels, and print their figures."""
    rows = []
    for architecture in arch or ARCHS:
        for kind in PASSES:
            for precision in (None, "default")[: 1 if kind == "decode" else 2]:
                rows += ours(architecture, precision, kind, batch)
            rows += [] if fla is None else theirs(architecture, fla, kind)
    table = Table(title=f"triton {importlib.metadata.version('triton')}, {H} heads of {D}, bfloat16")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(str(x) for x in row.values()))
    Console(width=200 if not sys.stdout.isatty() else None).print(table)
    if json:
        json.write_text(json_module.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
