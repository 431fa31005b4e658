"""attnops-triton compared with cuDNN, torch, FlexAttention, tokamax and ejkernel on one GPU; TFLOP/s, in one run.

Every output and gradient is compared with the float64 oracle before anything is timed; all are timed in turns::

    python benchmarks/gpu.py --json gpu.json            # D 64, 128, 256; full, causal, documents; 1k to 16k tokens
    python benchmarks/gpu.py --head-dim 128 --length 4096
    python benchmarks/gpu.py --dry                      # anywhere: small cases, Triton interpreted, nothing timed

16k tokens in all: the batch grows as the length shrinks. Documents are packed, four a sequence, and causal; there a
peer without segments has a dense mask. Needs JAX for CUDA and ``pip install attnops-triton 'attnops[cli]' torch``.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import jax
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from attnops import OperationMetadata, OperationRegistry, UnsupportedError
from attnops.bench.case import Case, Refused
from attnops.bench.measure import Measurement, measure
from attnops.bench.peers import PEERS
from attnops.bench.program import RESULTS, Contender, Ready, compile_jax
from attnops.masks import Causal, Mask, Segments

TOKENS: Final = 16384
WIDTH: Final = 2048  # heads times head dim
MASKS: Final[dict[str, Callable[[int], Mask | None]]] = {
    "full": lambda length: None,
    "causal": lambda length: Causal(),
    "documents": lambda length: Causal() & Segments(np.arange(length) // max(1, length // 4)),
}


def triton(interpret: bool) -> Contender:
    """attnops-triton, refused rather than replaced by the native forward."""

    def prepare(case: Case) -> Ready:
        metadata = OperationMetadata(platform="cuda", on_unsupported="error", interpret=interpret)
        operation: Any = OperationRegistry.create("attnops-triton:flash", metadata)
        try:
            return compile_jax(
                case, lambda q, k, v, _: operation(q, k, v, mask=case.mask).attention_outputs, None,
                "attnops-triton:flash" + (", interpreted" if interpret else ""),
            )  # fmt: skip
        except UnsupportedError as error:
            raise Refused("; ".join(map(str, error.reasons))) from None

    return Contender("attnops-triton", prepare)


def _cudnn(case: Case) -> Ready:
    if jax.default_backend() != "gpu":
        raise Refused("cuDNN needs a GPU")
    causal = isinstance(case.mask, Causal)
    dense = None if causal or case.mask is None else case.dense(case.mask)

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=causal, implementation="cudnn")

    return compile_jax(case, attend, dense, "jax.nn.dot_product_attention, cudnn")


def _flex(case: Case) -> Ready:
    """FlexAttention of torch, compiled, with a block mask."""
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
        from torch.nn.attention import flex_attention as flex  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise Refused("torch is not installed: pip install torch") from None
    if not torch.cuda.is_available():
        raise Refused("torch sees no GPU")

    def tensor(x: Any) -> Any:
        moved = torch.from_numpy(x.astype("float32")).to("cuda", getattr(torch, case.dtype))
        return moved.transpose(1, 2).contiguous()

    inputs = [tensor(x).requires_grad_(case.backward) for x in case.inputs]
    ids = torch.arange(case.length, device="cuda") // max(1, case.length // 4)
    block_mask = None
    if case.mask is not None:
        causal_only = isinstance(case.mask, Causal)

        def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return q >= kv if causal_only else (q >= kv) & (ids[q] == ids[kv])

        block_mask = flex.create_block_mask(seen, None, None, case.length, case.length, device="cuda")
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def run(d_out: Any) -> Any:
        with torch.set_grad_enabled(case.backward):
            out = compiled(*inputs, block_mask=block_mask)
            return (out, *torch.autograd.grad(out, inputs, d_out)) if case.backward else (out,)

    def wait(outputs: Any) -> Any:
        torch.cuda.synchronize()
        return outputs

    def results(d_out: Any) -> dict[str, Any]:
        found = [x.detach().transpose(1, 2).float().cpu().numpy() for x in wait(run(tensor(d_out)))]
        return dict(zip(RESULTS, found, strict=False))

    d_out = tensor(case.d_out)
    return Ready(run=lambda: run(d_out), wait=wait, results=results, what=f"FlexAttention of torch {torch.__version__}")


def contenders(dry: bool) -> list[Contender]:
    """The contenders; a peer that is not installed is shown as refused."""
    own = [triton(dry), Contender("cuDNN", _cudnn, is_peer=True), Contender("FlexAttention", _flex, is_peer=True)]
    return own + [PEERS[name].contender for name in ("torch", "tokamax", "ejkernel")]


def teraflops(measurement: Measurement, mask: str) -> float | None:
    """By the products of what is seen: 2 of them forward, 5 backward, 7 in a call that does both."""
    if measurement.best is None:
        return None
    case, share = measurement.case, {"full": 1.0, "causal": 0.5, "documents": 0.125}[mask]
    products = 7 if case.backward else 2
    flops = 2 * products * case.batch * case.heads * case.length**2 * case.head_dim * share
    return flops / measurement.best / 1e12


def main(
    head_dim: Annotated[list[int] | None, typer.Option(help="May repeat.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="In tokens; may repeat.")] = None,
    mask: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MASKS)}; may repeat.")] = None,
    rounds: Annotated[int, typer.Option(help="Timings of each.")] = 5,
    dry: Annotated[bool, typer.Option(help="Small cases, Triton interpreted: checked, not timed.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write all figures there.")] = None,
) -> None:
    """Check, time and print."""
    if jax.default_backend() != "gpu" and not dry:
        raise typer.BadParameter("JAX sees no GPU; --dry runs anywhere")
    rows: list[dict[str, Any]] = []
    table = Table(title="nothing is timed in a dry run" if dry else f"TFLOP/s on {jax.devices()[0].device_kind}")
    for name in ("D", "T", "mask", "pass", *(c.name for c in contenders(dry))):
        table.add_column(name, justify="left" if name in ("mask", "pass") else "right")
    for D in head_dim or ((16,) if dry else (64, 128, 256)):
        for T in length or ((48,) if dry else (1024, 2048, 4096, 8192, 16384)):
            for name in mask or MASKS:
                for backward in (False, True):
                    case = Case(
                        length=T, batch=1 if dry else max(1, TOKENS // T), heads=2 if dry else WIDTH // D, head_dim=D,
                        dtype="float32" if dry else "bfloat16", mask=MASKS[name](T), backward=backward,
                    )  # fmt: skip
                    found = measure([(case, c) for c in contenders(dry)], rounds=0 if dry else rounds)
                    rows += [m.to_json() | {"teraflops": teraflops(m, name)} for m in found]
                    cells = [m.status if (f := teraflops(m, name)) is None else f"{f:.0f}" for m in found]
                    table.add_row(str(D), str(T), name, "both" if backward else "forward", *cells)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for reason in dict.fromkeys(f"{r['name']}: {r['status']}: {r['reason']}" for r in rows if r["status"] != "ok"):
        console.print(reason)
    if json:
        json.write_text(json_module.dumps(rows, indent=1) + "\n")
    raise typer.Exit(int(any(row["status"] == "wrong" for row in rows)))


if __name__ == "__main__":
    typer.run(main)
