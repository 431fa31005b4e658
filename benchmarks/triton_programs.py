"""The number of programs that attnops-triton compiles for ten lengths and three kinds of masks, and the seconds that
this needs: in one process, and in a second one that finds them on disk. No GPU is needed. The time of the assembler,
which jaxlib runs, is not included::

    python benchmarks/triton_programs.py
    python benchmarks/triton_programs.py --arch sm_100 --head-dim 64

Needs ``pip install attnops-triton typer``. Forward and backward, bfloat16, batches of 1 to 3.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from typing import Annotated, Any, Final

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import typer

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Segments, SlidingWindow
from attnops_triton.aot import kernels
from attnops_triton.language.build import build, counts
from attnops_triton.language.store import VARIABLE

LENGTHS: Final = (17, 100, 128, 192, 256, 777, 1024, 1500, 2048, 4096)
MASKS: Final = {
    "causal": lambda n: Causal(),
    "window": lambda n: Causal() & SlidingWindow(255, 0),
    "documents": lambda n: Causal() & Segments(np.arange(n) // max(1, n // 4)),
}


def compile_all(arch: str, head_dim: int) -> None:
    """Compile or read the programs of all calls, and print how many there were."""
    operation: Any = OperationRegistry.create(
        "attnops-triton:flash", OperationMetadata(platform="cuda", on_unsupported="error")
    )
    launches = 0
    start = time.perf_counter()
    for mask in MASKS.values():
        for n in LENGTHS:

            def both(*qkv: jax.Array, seen: Any) -> Any:
                out, pull_back = jax.vjp(lambda *inputs: operation(*inputs, mask=seen).attention_outputs, *qkv)
                return pull_back(out)

            x = jax.ShapeDtypeStruct((1 + n % 3, n, 8, head_dim), jnp.bfloat16)
            for launched in kernels(functools.partial(both, seen=mask(n)), (x, x, x), arch):
                build(launched.recipe)
                launches += 1
    tracing = time.perf_counter() - start - counts.seconds
    print(
        f"{launches} launches: {counts.compiled} programs compiled and {counts.read} read in {counts.seconds:.2f} s, "
        f"calls traced in {tracing:.1f} s"
    )


def main(
    arch: Annotated[str, typer.Option(help="The architecture, such as sm_90.")] = "sm_90",
    head_dim: Annotated[int, typer.Option()] = 64,
    here: Annotated[bool, typer.Option(help="Compile in this process, with the programs on disk.")] = False,
) -> None:
    """Run two processes that share a folder of programs."""
    if here:
        return compile_all(arch, head_dim)
    command = [sys.executable, __file__, "--here", "--arch", arch, "--head-dim", str(head_dim)]
    with tempfile.TemporaryDirectory() as folder:
        for order in ("first", "second"):
            print(f"{order} process: ", end="", flush=True)
            subprocess.run(command, check=True, env=os.environ | {VARIABLE: folder})


if __name__ == "__main__":
    typer.run(main)
