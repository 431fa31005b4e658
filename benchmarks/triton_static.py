"""Figures of attnops-triton's compiled kernels, without a GPU: registers, spills, shared memory, the instructions of
the step over one tile, and the seconds that a first call takes to compile, for every architecture of the table::

    python benchmarks/triton_static.py                              # bfloat16, all head dims and architectures
    python benchmarks/triton_static.py --arch sm_90 --head-dim 128 --json out.json
    python benchmarks/triton_static.py --arch sm_90 --head-dim 128 --tiles 64,128,8,2   # others than the table's

Needs ``pip install attnops-triton``. A kernel takes about a second. Use `attnops_triton.aot` for the figures
of other programs.
"""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["ATTNOPS_TRITON_CACHE"] = ""  # else nothing is compiled in a second run

import jax
import jax.numpy as jnp
import typer
from attnops_triton.aot import compile_for, kernels
from attnops_triton.flash import tile_sizes
from attnops_triton.flash.plan import Tiles
from attnops_triton.language.build import build
from attnops_triton.targets import SHARED_MEMORY
from rich.console import Console
from rich.table import Table

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal

HEAD_DIMS = ("64", "80", "96", "128", "192/128", "256", "576/512")
# What is shown of the step over one tile.
SHOWN = ("HGMMA", "HMMA", "UTCHMMA", "FFMA", "FMUL", "FADD", "FSEL", "MUFU", "LDGSTS", "BAR", "LDL", "STL")
LENGTH, HEADS = 4096, 8


def measure(arch: str, head_dim: str, dtype: str, masked: bool) -> list[dict[str, Any]]:
    """A row for each kernel of forward and backward."""
    D, Dv = (int(x) for x in (head_dim.split("/") * 2)[:2])
    operation = OperationRegistry.create(
        "attnops-triton:flash", OperationMetadata(platform="cuda", on_unsupported="error")
    )

    def both(*qkv: jax.Array) -> Any:
        mask = Causal() if masked else None
        out, pull_back = jax.vjp(lambda *x: operation(*x, mask=mask).attention_outputs, *qkv)
        return out, pull_back(out)

    q, v = (jax.ShapeDtypeStruct((1, LENGTH, HEADS, d), jnp.dtype(dtype)) for d in (D, Dv))
    rows = []
    for launched in kernels(both, (q, q, v), arch):
        start = time.perf_counter()
        build(launched.recipe)
        seconds = round(time.perf_counter() - start, 1)
        found = compile_for(launched, arch)
        rows.append(
            {"arch": arch, "head_dim": head_dim, "dtype": dtype, "kernel": launched.recipe.kernel.name[14:]}
            | dataclasses.asdict(launched.tiles)
            | {"registers": found.registers, "spilled": found.spilled, "shared": found.shared}
            | {"compile_s": seconds, "shared_limit": SHARED_MEMORY[arch], "step": sum(found.loop.values())}
            | {name: found.loop[name] for name in SHOWN}
        )
    return rows


def main(
    arch: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SHARED_MEMORY)}; may repeat.")] = None,
    head_dim: Annotated[list[str] | None, typer.Option(help="D, or D/Dv; may repeat.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    tiles: Annotated[str, typer.Option(help="bq,bk,warps,stages for all kernels, instead of the table's.")] = "",
    masked: Annotated[bool, typer.Option(help="Causal; else nothing is masked.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write all figures there.")] = None,
) -> None:
    """Compile, and print what came out."""
    if tiles:
        given = Tiles(*(int(x) for x in tiles.split(",")))
        for by_size in tile_sizes.TABLE.values():
            for by_dim in by_size.values():
                for limit in by_dim:
                    by_dim[limit] = (given,) * 4
    rows = []
    for one in arch or SHARED_MEMORY:
        for dim in head_dim or HEAD_DIMS:
            rows += measure(one, dim, dtype, masked)
    table = Table(
        title=f"{dtype}, {LENGTH} tokens, {'causal' if masked else 'no mask'}; the step is over one FULL tile"
    )
    shown = [name for name in rows[0] if name not in ("dtype", "shared_limit") and any(row[name] for row in rows)]
    for name in shown:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        bad = row["shared"] > row["shared_limit"] or row["spilled"]
        table.add_row(*(str(row[name]) for name in shown), style="red" if bad else None)
    Console(width=200 if not sys.stdout.isatty() else None).print(table)
    if json:
        json.write_text(json_module.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
