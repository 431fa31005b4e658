"""Instructions per byte of keys and values in attnops-triton's loop over a tile of keys, without a GPU::

    python benchmarks/triton_decode.py                                   # sm_90, pages of 16 and 64, every codec
    python benchmarks/triton_decode.py --arch sm_80 --page 16 --head-dim 64 --json out.json
    python benchmarks/triton_decode.py --vllm ~/vllm                     # with vLLM's kernel, compiled the same way

One token per row over a paged cache. The loop is the one over complete, unmasked tiles. Figures are warp instructions,
summed over a program's warps. They are not times; fewer instructions leave more time for memory. ``--vllm`` names a
checkout of vLLM, whose ``kernel_unified_attention`` is compiled with vLLM's tiles, warps and stages.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import json as json_module
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Annotated, Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.table import Table

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import PagedCache, Quantized
from attnops_triton import aot
from attnops_triton.targets import SHARED_MEMORY, capability

BATCH, LENGTH, KV_HEADS = 8, 32768, 8
CODECS = ("", "int8", "float8_e4m3fn", "float8_e5m2")
SHOWN = (
    "HMMA",
    "HGMMA",
    "LDSM",
    "LDGSTS",
    "LDG",
    "LDS",
    "STS",
    "PRMT",
    "F2FP",
    "I2F",
    "FMUL",
    "SHFL",
    "BAR",
    "LDL",
    "STL",
)
# By codec: Triton's dtype and `KVQuantMode` of vLLM's kernel, with scales per token and head.
_STORED = {"": ("*bf16", 0), "int8": ("*i8", 2), "float8_e4m3fn": ("*fp8e4nv", 3)}
_FOLDER = Path("vllm/v1/attention/ops")


class Case(NamedTuple):
    """A step of decoding."""

    arch: str
    head_dim: int
    groups: int
    page: int
    codec: str

    @property
    def token_bytes(self) -> int:
        """Bytes of the key and value of a token and kv head, without scales."""
        return 2 * self.head_dim * (1 if self.codec else 2)


def attnops(case: Case) -> dict[str, Any]:
    """The figures of attnops-triton's kernel."""
    operation: Any = OperationRegistry.create(
        "attnops-triton:flash", OperationMetadata(platform="cuda", on_unsupported="error")
    )
    max_pages = LENGTH // case.page
    codec = Quantized(case.codec) if case.codec else None
    cache = jax.eval_shape(lambda: PagedCache.create(
        batch=BATCH, pages=BATCH * max_pages, page_size=case.page, max_pages=max_pages, kv_heads=KV_HEADS,
        head_dim=case.head_dim, codec=codec,
    ))  # fmt: skip
    query = jax.ShapeDtypeStruct((BATCH, 1, KV_HEADS * case.groups, case.head_dim), jnp.bfloat16)
    (launched, *_) = aot.kernels(
        lambda q, c: operation(q, c, mask=Causal()).attention_outputs, (query, cache), case.arch
    )
    binary, tiles = aot.compile_for(launched, case.arch), launched.tiles
    instructions = sum(binary.loop.values()) * tiles.warps
    return case._asdict() | {
        "codec": case.codec or "none", "keys": tiles.bk, "warps": tiles.warps, "stages": tiles.stages,
        "registers": binary.registers, "spilled": binary.spilled, "shared": binary.shared,
        "a byte": round(instructions / (tiles.bk * case.token_bytes), 4),
    } | {name: binary.loop[name] for name in SHOWN}  # fmt: skip


def vllm(case: Case, checkout: Path) -> dict[str, Any]:
    """The figure of vLLM's kernel; empty if vLLM has no such case."""
    if case.codec not in _STORED or not case.arch.startswith("sm_"):
        return {}
    tile = 16  # vLLM's for 16-bit queries, with any stored dtype
    loop = sum(_loop(_kernel(checkout), case, tile).values())
    return {"vLLM's": round(loop * 4 / (tile * case.token_bytes), 4)}


def _loop(kernel: Any, case: Case, tile: int) -> Any:
    """The loop of vLLM's kernel with 4 warps and 3 stages, Triton's defaults."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    stored, mode = _STORED[case.codec]
    known: dict[str, Any] = {
        "num_query_heads": KV_HEADS * case.groups, "num_queries_per_kv": case.groups, "BLOCK_SIZE": case.page,
        "TILE_SIZE": tile, "HEAD_SIZE": case.head_dim, "HEAD_SIZE_PADDED": case.head_dim,
        "BLOCK_M": max(16, case.groups), "BLOCK_Q": max(16, case.groups) // case.groups, "NUM_SEGMENTS_PER_SEQ": 16,
        "IS_3D": True, "USE_CAUSAL": True, "KV_QUANT_MODE": mode, "stride_k_cache_3": 1, "stride_v_cache_3": 1,
    }  # fmt: skip
    types_of = {"output_ptr": "*bf16", "query_ptr": "*bf16", "key_cache_ptr": stored, "value_cache_ptr": stored,
                "block_tables_ptr": "*i32", "seq_lens_ptr": "*i32", "query_start_len_ptr": "*i32",
                "num_seqs": "i32"}  # fmt: skip
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            default = parameter.default if parameter.has_default else 0
            signature[name], constants[(i,)] = "constexpr", known.get(name, default)
            continue
        signature[name] = types_of.get(name) or (
            "*fp32" if name.endswith("_ptr") else "i64" if "stride" in name else "fp32"
        )
        if name.endswith("_ptr") or ("stride" in name and "_ks_" not in name and "_vs_" not in name):
            attributes[(i,)] = [["tt.divisibility", 16]]
    compiled: Any = triton.compile(
        ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", capability(case.arch), 32), options={"num_warps": 4, "num_stages": 3},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        loops = [collections.Counter(aot._names(x)) for x in aot.innermost_loops(aot._run("nvdisasm", "-c", str(path)))]
        return next(loop for loop in loops if loop["MUFU"])


@functools.cache
def _kernel(checkout: Path) -> Any:
    """``kernel_unified_attention``. Only its file is imported: torch and the rest of vLLM are not needed."""
    import triton
    import triton.language as tl

    class Anything(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything(name)

        def __call__(self, *given: Any, **options: Any) -> Any:
            return Anything("result")

    inner = ("envs", "logger", "platforms", "triton_utils", "v1", "v1.attention", "v1.attention.ops",
             "v1.attention.ops.triton_quant_kv", "v1.kv_cache_interface")  # fmt: skip
    for name in ("torch", "vllm", *(f"vllm.{x}" for x in inner)):
        sys.modules[name] = Anything(name)
    sys.modules["torch"].__dict__["finfo"] = lambda _: types.SimpleNamespace(min=-448.0, max=448.0)
    sys.modules["vllm.triton_utils"].__dict__.update(triton=triton, tl=tl)
    for name in ("triton_quant_kv/_helpers", "triton_attention_helpers", "triton_unified_attention"):
        full = "vllm.v1.attention.ops." + name.replace("/", ".")
        path = checkout / _FOLDER / f"{name}.py"
        if not path.exists():
            continue  # older versions have only one file
        spec = importlib.util.spec_from_file_location(full, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return module.kernel_unified_attention


def main(
    arch: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(SHARED_MEMORY)}; may repeat.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="D; may repeat.")] = None,
    page: Annotated[list[int] | None, typer.Option(help="Slots per page; may repeat.")] = None,
    groups: Annotated[int, typer.Option(help="Query heads per kv head.")] = 8,
    vllm_checkout: Annotated[Path | None, typer.Option("--vllm", help="A checkout of vLLM.")] = None,
    json: Annotated[Path | None, typer.Option(help="File for all figures.")] = None,
) -> None:
    """Compile the kernels, and print their figures."""
    rows = []
    for architecture in arch or ["sm_90"]:
        for dim in head_dim or [128]:
            cases = [Case(architecture, dim, groups, size, codec) for size in page or [16, 64] for codec in CODECS]
            rows += [attnops(case) | (vllm(case, vllm_checkout) if vllm_checkout else {}) for case in cases]
    table = Table(title=f"instructions of a warp, G {groups}, bfloat16 queries")
    shown = [name for name in rows[0] if any(row.get(name) for row in rows)]
    for name in shown:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in shown))
    Console(width=220 if not sys.stdout.isatty() else None).print(table)
    if json:
        json.write_text(json_module.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
