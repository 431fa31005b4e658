"""Figures of attnops-triton's compiled kernels, without a GPU: registers, spills, shared memory, the instructions of
the step over one tile, and the seconds that a first call takes to compile, for every architecture of the table::

    python benchmarks/triton_static.py                              # bfloat16, all head dims and architectures
    python benchmarks/triton_static.py --arch sm_90 --head-dim 128 --json out.json
    python benchmarks/triton_static.py --arch sm_90 --head-dim 128 --tiles 64,128,8,2   # other tiles than the table's

Cycles are those of a multiprocessor for 128 × 128 scores of FULL tiles: of the tensor cores, of the schedulers that
issue instructions, and of the special function units (exponentials). ``share`` is an upper bound of the use of the
tensor cores. In specialised kernels, whose partitions overlap the three, it is tensor / max(all three). In the others,
whose warps wait for products together, it is tensor / (tensor + max(the other two)). For Hopper further rows have the
kernel that adds dq (`attnops_triton.flash.order.unordered`), the kernels of other architectures, and FlashAttention-3's
tiles; for sm_100 the kernels of other architectures, and FlashAttention-4's tiles. FlashAttention's kernels are not
compiled: their cycles are computed from the published products and exponentials per tile. ``ctas`` is the number of
multiprocessors that share operands. ``prologue``, ``between`` and ``epilogue`` are the instructions outside of
innermost loops: before the loops over tiles, between two of them, and after them, of all partitions together: upper
bounds of those that a program needs besides its tiles.

Needs ``pip install attnops-triton rich typer``. A kernel takes about a second. Use `attnops_triton.aot` for the figures
of other programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_module
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["ATTNOPS_TRITON_CACHE"] = ""  # otherwise a second run would compile nothing

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Blocks, Causal
from attnops_triton import aot
from attnops_triton.aot import Binary, compile_for, innermost_loops, kernels
from attnops_triton.flash import tile_sizes
from attnops_triton.flash.order import unordered
from attnops_triton.flash.plan import TileSizes
from attnops_triton.language.build import build
from attnops_triton.targets import SHARED_MEMORY, is_amd

HEAD_DIMS = ("64", "80", "96", "128", "192/128", "256", "576/512")
# The instructions of the step over one tile that are shown.
SHOWN = ("HGMMA", "HMMA", "UTCHMMA", "FFMA", "FMUL", "FADD", "FSEL", "MUFU", "LDGSTS", "BAR", "LDL", "STL")
LENGTH, HEADS = 4096, 8
# Blocks: one of eight blocks of 512 keys for each block of queries.
MASKS = {"causal": Causal(), "none": None, "blocks": Blocks(np.arange(8)[None, None, :, None], 512, 512)}
# Per cycle and multiprocessor: multiplications of 16-bit matrices; special functions; instructions.
MULTIPLICATIONS = {"sm_80": 1024, "sm_90": 2048, "sm_100": 4096}
SPECIAL, ISSUED = 16, 4
# Cycles for each cycle of issue that are not hidden by products, on an H200: fitted by `triton_time.py`.
WAITS = 1.49
# The products per score, as multiples of D and of Dv.
PRODUCTS = {"forward": (1, 1), "backward_query": (2, 1), "backward_key": (2, 2), "backward": (3, 2)}
# FlashAttention-3's tiles (queries, keys) by head dim: of the forward pass without a mask and causal
# (hopper/tile_size.h). The backward pass, which adds dq, has those of hopper/flash_bwd_launch_template.h.
FLASH_ATTENTION_3 = {64: ((192, 128), (192, 128)), 128: ((128, 176), (128, 128)), 256: ((128, 80), (128, 80))}
FLASH_ATTENTION_3_BACKWARD = {64: ((128, 128), (128, 128)), 128: ((80, 128), (64, 128)), 256: ((64, 80), (64, 80))}
# FlashAttention-4's tiles on sm_100 in 16 bits (github.com/Dao-AILab/flash-attention at 0251105a, flash_attn/cute:
# interface.py, flash_fwd_sm100.py, flash_bwd_sm100.py, and apply_exp2_convert in softmax.py): queries and keys per
# multiprocessor; stages of the ring, each of keys or values (backward: of queries); multiprocessors that share operands
# (forward: from CUDA 13 on); and how many of 128 exponentials are computed by polynomials. The backward pass adds dq,
# and has no polynomials.
FLASH_ATTENTION_4 = {64: ((256, 128, 10, 1, 16), (256, 128, 10, 1, 16)),
                     128: ((256, 128, 6, 2, 24), (256, 128, 3, 1, 16))}  # fmt: skip
FLASH_ATTENTION_4_BACKWARD = {64: ((128, 128, 2, 1, 0),) * 2, 128: ((128, 128, 1, 2, 0),) * 2}


def outside(arch: str, compiled: Binary) -> dict[str, int]:
    """The instructions outside of innermost loops, by the loops over tiles that precede and follow them, whatever
    branches are taken; none on AMD.
    """
    if is_amd(arch):
        return {}
    lines, loops = compiled.code.splitlines(), innermost_loops(compiled.code)
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"(\.L_x_\d+):", line.strip()))}
    inner = {line for loop in loops for line in loop}
    tiles = {
        line for loop in loops if any(name in "".join(loop) for name in (*aot.PRODUCTS, "UTMALDG")) for line in loop
    }
    # Branches back repeat what they lead to, and are left out: then each line follows those that lead to it.
    follows: list[list[int]] = []
    for i, line in enumerate(lines):
        branch = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        ends = re.search(r"\*/\s+(BRA|EXIT|RET)\b", line)
        follows.append([] if ends or i + 1 == len(lines) else [i + 1])
        if branch and labels[branch[1]] > i:
            follows[i].append(labels[branch[1]])
    after, before = ([line in tiles for line in lines] for _ in range(2))
    for i, some in enumerate(follows):
        for j in some:
            after[j] |= after[i]
    for i, some in reversed(list(enumerate(follows))):
        before[i] |= any(before[j] for j in some)
    found = dict.fromkeys(("prologue", "between", "epilogue"), 0)
    for line, *kind in zip(lines, before, after, strict=True):
        if " ;" in line and line not in inner:
            found["prologue" if not kind[1] else "between" if kind[0] else "epilogue"] += 1
    return found


def cycles(arch: str, head_dim: str, dtype: str, launched: Any, compiled: Any) -> dict[str, float]:
    """The cycles of 128 × 128 scores, and an upper bound of the use of the tensor cores; for Hopper's kernels ``time``
    too, the cycles that `triton_time` predicts.
    """
    loop = compiled.loop
    if arch not in MULTIPLICATIONS or dtype == "float32":
        return {}
    D, Dv = (int(x) for x in (head_dim.split("/") * 2)[:2])
    tiles = launched.tiles
    warps = 8 if tiles.specialised else tiles.warps
    number = 128 * 128 / (tiles.bq * tiles.bk)
    of_d, of_dv = PRODUCTS[launched.recipe.kernel.name[14:]]
    tensor = 128 * 128 * (of_d * D + of_dv * Dv) / MULTIPLICATIONS[arch]
    issue = number * sum(loop.values()) * warps / ISSUED
    if tiles.specialised and arch == "sm_100":
        # One warp issues products, and four scale sums.
        others = [(1 if x["UTCHMMA"] else 4, sum(x.values())) for x in compiled.loops if not x["MUFU"]]
        issue += number * sum(warps * instructions for warps, instructions in others) / ISSUED
    special = number * loop["MUFU"] * 32 * warps / SPECIAL
    slower = max(issue, special)
    share = tensor / (max(tensor, slower) if tiles.specialised else tensor + slower)
    found = {"tensor": round(tensor), "issue": round(issue), "special": round(special), "share": round(share, 2)}
    is_hopper = tiles.specialised and arch == "sm_90"
    return found | ({"time": round(max(tensor, special) + WAITS * issue)} if is_hopper else {})


def flash_attention(arch: str, head_dim: str, masked: bool) -> list[dict[str, Any]]:
    """Rows for FlashAttention-3's tiles on sm_90, or FlashAttention-4's on sm_100, without counts of instructions."""
    version, *passes = {
        "sm_90": (3, FLASH_ATTENTION_3, FLASH_ATTENTION_3_BACKWARD),
        "sm_100": (4, FLASH_ATTENTION_4, FLASH_ATTENTION_4_BACKWARD),
    }[arch]
    rows = []
    for name, tiles, products in zip(("forward", "backward"), passes, (2, 5), strict=True):
        if not head_dim.isdigit() or int(head_dim) not in tiles:
            continue
        bq, bk, *rest = tiles[int(head_dim)][masked]
        stages, ctas, by_polynomials = rest or ("", "", 0)
        tensor = 128 * 128 * products * int(head_dim) / MULTIPLICATIONS[arch]
        special = 128 * (128 - by_polynomials) / SPECIAL
        rows.append(
            {"arch": arch, "head_dim": head_dim, "dtype": "bfloat16", "kernel": f"FA-{version} {name}", "bq": bq,
             "bk": bk, "stages": stages, "ctas": ctas, "specialised": True, "tensor": round(tensor),
             "special": round(special), "share": round(tensor / max(tensor, special), 2)}
        )  # fmt: skip
    return rows


def measure(arch: str, head_dim: str, dtype: str, mask: str) -> list[dict[str, Any]]:
    """A row for each kernel of forward and backward."""
    D, Dv = (int(x) for x in (head_dim.split("/") * 2)[:2])
    operation = OperationRegistry.create(
        "attnops-triton:flash", OperationMetadata(platform="cuda", on_unsupported="error")
    )

    def both(*qkv: jax.Array) -> Any:
        out, pull_back = jax.vjp(lambda *x: operation(*x, mask=MASKS[mask]).attention_outputs, *qkv)
        return out, pull_back(out)

    q, v = (jax.ShapeDtypeStruct((1, LENGTH, HEADS, d), jnp.dtype(dtype)) for d in (D, Dv))
    rows = []
    for launched in kernels(both, (q, q, v), arch):
        start = time.perf_counter()
        build(launched.recipe)
        seconds = round(time.perf_counter() - start, 1)
        compiled = compile_for(launched, arch)
        rows.append(
            {"arch": arch, "head_dim": head_dim, "dtype": dtype, "kernel": launched.recipe.kernel.name[14:]}
            | dataclasses.asdict(launched.tiles)
            | {"registers": compiled.registers, "spilled": compiled.spilled, "shared": compiled.shared}
            | {"compile_s": seconds, "shared_limit": SHARED_MEMORY[arch], "step": sum(compiled.loop.values())}
            | outside(arch, compiled)
            | cycles(arch, head_dim, dtype, launched, compiled)
            | {name: compiled.loop[name] for name in SHOWN}
        )
    return rows


@contextlib.contextmanager
def without_specialised() -> Iterator[None]:
    """A context without the specialised kernels: those of all architectures serve Hopper and sm_100 too."""
    specialised = dict(tile_sizes.SPECIALISED)
    tile_sizes.SPECIALISED.clear()
    try:
        yield
    finally:
        tile_sizes.SPECIALISED.update(specialised)


def main(
    arch: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(SHARED_MEMORY)}; may repeat.")] = None,
    head_dim: Annotated[list[str] | None, typer.Option(help="D, or D/Dv; may repeat.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    tiles: Annotated[str, typer.Option(help="bq,bk,warps,stages for all kernels, instead of the table's.")] = "",
    mask: Annotated[str, typer.Option(help=f"One of {', '.join(MASKS)}.")] = "causal",
    json: Annotated[Path | None, typer.Option(help="File for all figures.")] = None,
) -> None:
    """Compile the kernels, and print their figures."""
    if tiles:
        sizes = TileSizes(*(int(x) for x in tiles.split(",")))
        tile_sizes.SPECIALISED.clear()
        for by_size in tile_sizes.TABLE.values():
            for by_dim in by_size.values():
                for limit in by_dim:
                    by_dim[limit] = (sizes,) * 4
    rows = []
    for architecture in arch or SHARED_MEMORY:
        for dim in head_dim or HEAD_DIMS:
            rows += measure(architecture, dim, dtype, mask)
            if any(row["specialised"] for row in rows[-3:]):
                if architecture == "sm_90":
                    with unordered():
                        rows += [row for row in measure(architecture, dim, dtype, mask) if row["kernel"] == "backward"]
                with without_specialised():
                    rows += measure(architecture, dim, dtype, mask)
                rows += flash_attention(architecture, dim, mask == "causal")
    table = Table(title=f"{dtype}, {LENGTH} tokens, mask: {mask}; the step is over one FULL tile")
    names = dict.fromkeys(name for row in rows for name in row if name not in ("dtype", "shared_limit"))
    shown = [name for name in names if any(row.get(name) for row in rows)]
    for name in shown:
        table.add_column(name, justify="left" if isinstance(rows[0].get(name), str) else "right")
    for row in rows:
        bad = row.get("shared", 0) > row.get("shared_limit", 0) or row.get("spilled")
        table.add_row(*(str(row.get(name, "")) for name in shown), style="red" if bad else None)
    Console(width=200 if not sys.stdout.isatty() else None).print(table)
    if json:
        json.write_text(json_module.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
