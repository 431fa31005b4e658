"""The work and the transfers of attnops-ring, counted and not timed: tiles of the busiest device, hops, bytes.

Run ``python benchmarks/ring.py`` anywhere (``--devices 8``, ``--length 32768``, ``--json FILE``). Tiles are 128 × 128
scores that the mask does not leave empty; bytes are those that a device sends per hop, read from the lowered program.
Needs ``pip install attnops-ring rich typer``.
"""

from __future__ import annotations

import json as json_module
import re
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

TILE = 128
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def counted(mask: Any, length: int, devices: int, order: str) -> dict[str, Any]:
    """For a mask and an order: the tiles of the busiest device divided by the mean, and bytes per hop."""
    from attnops import OperationMetadata, OperationRegistry
    from attnops.masks import block_map
    from attnops.sharding import create_mesh
    from attnops_ring import positions

    tokens = positions(length, devices, order)  # type: ignore[arg-type]
    # A tile has tokens that are neighbours on a device.
    reordered = mask.at(tokens, tokens) if order != "contiguous" else mask
    coverage = np.asarray(block_map(reordered, (1, 1, length, length), TILE, TILE).coverage)[0, 0] > 0
    by_device = coverage.sum(axis=1).reshape(devices, -1).sum(axis=1)

    mesh = create_mesh((devices,), ("sp",), devices=jax.devices()[:devices])
    ring: Any = OperationRegistry.create("ring", OperationMetadata(mesh=mesh))
    q = jax.ShapeDtypeStruct((1, length, HEADS, HEAD_DIM), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((1, length, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    program = jax.jit(lambda q, k, v: ring(q, k, v, mask=mask, order=order).attention_outputs)
    text = program.lower(q, kv, kv).as_text()
    sent = [np.prod([int(x) for x in shape.split("x")[:-1]]) * 2 for shape in
            re.findall(r"collective_permute.*?-> tensor<([^>]*)>", text)]  # fmt: skip
    return {"busiest over mean": by_device.max() / by_device.mean(), "bytes a hop": int(sum(sent))}


def main(
    devices: Annotated[int, typer.Option(help="Devices along the sequence.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens.")] = 32768,
    json: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
) -> None:
    """Count tiles, hops and bytes, and print them."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    from attnops import OperationMetadata
    from attnops.masks import Causal, Segments, SlidingWindow
    from attnops_ring.block import Inner
    from attnops_ring.operation import needed_hops

    local = length // devices
    masks = {
        "causal": Causal(),
        f"causal window of {local}": Causal() & SlidingWindow(local - 1, 0),
        f"causal window of {local // 4}": Causal() & SlidingWindow(local // 4 - 1, 0),
        "8 documents, causal": Causal() & Segments(np.arange(length) * 8 // length),
    }
    kv_bytes = 2 * local * KV_HEADS * HEAD_DIM * 2
    rows = []
    for name, mask in masks.items():
        for order in ("contiguous", "zigzag", "striped"):
            figures = counted(mask, length, devices, order)
            inner = Inner(OperationMetadata(), None, None, length, length, order, devices, False)
            bound = mask.bind(1, HEADS, length, length)
            hops = devices if order == "striped" else needed_hops(bound, inner, (1, length, HEADS, 1), length, length)
            rows.append(
                {"mask": name, "order": order}
                | figures
                | {"hops": hops - 1, "of K and V": figures["bytes a hop"] / kv_bytes}
            )
    table = Table(
        title=f"{length} tokens on {devices} devices, {HEADS} heads over {KV_HEADS} kv heads of {HEAD_DIM}, bfloat16"
    )
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("mask", "order") else "right")
    for row in rows:
        table.add_row(
            *(f"{x:,.2f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else str(x) for x in row.values())
        )
    Console(width=140).print(table)
    if json:
        json.write_text(json_module.dumps(rows, indent=1, default=float) + "\n")


if __name__ == "__main__":
    typer.run(main)
