"""Kernels of other libraries over paged caches, whose bundles `tpu_decode.py` counts too:

- ``paged_attention`` and ``ragged_paged_attention`` of JAX;
- flywheel-tpu's ``flash_attn_with_kvcache``, which takes pages of 128 and chooses its blocks;
- tokamax's ``batched_rpa``, whose step has the tokens of several rows;
- ``ragged_paged_attention`` v3 of tpu-inference, of which only the kernels are imported: ``pip install --no-deps
  tpu-inference``. Its kernel for head dim 64 calls functions that the newest JAX no longer has; its other one pads to
  128.

Each is compiled with several block sizes, and the best is reported: the bundles of the loop over blocks of keys,
without branches of fewer than 64 bundles. Most of these branches are for first and last blocks; if one runs for every
block, the figure is too good.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from tpu_flywheel import pretend as _pretend

from attnops_tpu.aot import compile_for
from attnops_tpu.schedule import Schedule, measure

ROWS: Final = 8
# The peers keep the table in scalar memory, which can't hold more pages.
SLOTS: Final = 1 << 14
# Tokens per block times kv heads: the values that are tried. tpu-inference itself uses 32,768.
SIZES: Final = 4096, 16384, 32768
# Tokens of flywheel's blocks, and rows of a step of batched_rpa, as it chooses for 8 rows.
FLYWHEEL, BATCHED = 1024, 4
# Errors by which a kernel refuses a dtype, or the compiler a block size. Others stop the run: an interface has changed.
REFUSALS: Final = ("RESOURCE_EXHAUSTED", "xceeded", "Ran out of memory", "Register allocation failed",
                   "Expected kv quantization", "to be a floating point", "Not implemented", "not supported",
                   "must be divisible", "must be a multiple of", "Mosaic failed to compile")  # fmt: skip
# Shorter branches are not taken for every block.
_SHORT: Final = 64


class PeerCase(NamedTuple):
    """A call that is compiled.

    Attributes:
        page: slots per page.
        kv_heads: K.
        groups: query heads per kv head.
        head_dim: D.
        dtype: the dtype of keys and values.
    """

    page: int
    kv_heads: int
    groups: int
    head_dim: int
    dtype: str


class DecodePeer(NamedTuple):
    """A kernel of another library.

    Attributes:
        kernel: a part of the kernel's name.
        has_all_heads: whether a block holds the tokens of all kv heads.
        function: given the case, the generation and the tokens per block, returns the function to compile and its
            arguments.
    """

    kernel: str
    has_all_heads: bool
    function: Callable[[PeerCase, str, int], tuple[Callable[..., Any], tuple[Any, ...]]]


def sizes(case: PeerCase) -> Iterator[int]:
    """The numbers of tokens per block that are tried."""
    for tokens in sorted({min(size // case.kv_heads, SLOTS // 2) for size in SIZES}):
        if tokens % case.page == 0 and tokens // case.page <= 512:
            yield tokens


def arrays() -> tuple[Callable[..., Any], Callable[..., Any]]:
    import jax
    import jax.numpy as jnp

    def floats(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    return floats, lambda *shape: floats(*shape, dtype=jnp.int32)


def _jax_ragged(case: PeerCase, generation: str, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    _pretend(generation)
    page, K, G, D, dtype = case
    floats, ints = arrays()
    scale = None if dtype == "bfloat16" else 1.0

    def run(q: Any, pages: Any, lengths: Any, table: Any, starts: Any, rows: Any) -> Any:
        return ragged_paged_attention(
            q, pages, lengths, table, starts, rows, num_kv_pages_per_block=tokens // page, num_queries_per_block=8,
            k_scale=scale, v_scale=scale, vmem_limit_bytes=_vmem(generation),
        )  # fmt: skip

    M = SLOTS // page
    pages = floats(ROWS * M, page, 2 * K, D, dtype=dtype)
    return run, (floats(ROWS, K * G, D), pages, ints(ROWS), ints(ROWS, M), ints(ROWS + 1), ints(1))


def _jax_paged(case: PeerCase, generation: str, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    _pretend(generation)
    page, K, G, D, dtype = case
    floats, ints = arrays()

    def run(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> Any:
        return paged_attention(q, k, v, lengths, table, pages_per_compute_block=tokens // page)

    M = SLOTS // page
    pages = floats(K, ROWS * M, page, D, dtype=dtype)
    return run, (floats(ROWS, K * G, D), pages, pages, ints(ROWS), ints(ROWS, M))


def _rpa_v3(case: PeerCase, generation: str, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    page, K, G, D, dtype = case
    module = rpa_v3_module(generation)
    floats, ints = arrays()
    scale = None if dtype == "bfloat16" else 1.0

    def run(q: Any, k: Any, v: Any, pages: Any, lengths: Any, table: Any, starts: Any, distribution: Any) -> Any:
        return module.ragged_paged_attention(
            q, k, v, pages, lengths, table, starts, distribution, sm_scale=D**-0.5, k_scale=scale, v_scale=scale,
            d_block_sizes=(1, tokens, 1, tokens), vmem_limit_bytes=_vmem(generation),
        )  # fmt: skip

    M = SLOTS // page
    pages = floats(*module.get_kv_cache_shape(ROWS * M, page, K, D, dtype), dtype=dtype)
    new = floats(ROWS, K, D, dtype=dtype)
    return run, (floats(ROWS, K * G, D), new, new, pages, ints(ROWS), ints(ROWS * M), ints(ROWS + 1), ints(3))


def rpa_v3_module(generation: str) -> Any:
    """The module of RPA v3, made for a generation."""
    # The package's own initialisation needs vLLM.
    spec = importlib.util.find_spec("tpu_inference")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("pip install --no-deps tpu-inference")
    package, logger = (types.ModuleType(f"tpu_inference{each}") for each in ("", ".logger"))
    package.__path__ = list(spec.submodule_search_locations)
    logger.init_logger = logging.getLogger  # type: ignore[attr-defined]
    sys.modules |= {module.__name__: module for module in (package, logger)}
    module = importlib.import_module("tpu_inference.kernels.ragged_paged_attention.v3.kernel")
    version = {"v5e": 5, "v5p": 5, "v6e": 6, "tpu7x": 7}[generation]
    module.get_tpu_version = lambda: version  # type: ignore[attr-defined]  # it asks the device
    _pretend(generation)
    return module


def _flywheel(case: PeerCase, generation: str, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    _pretend(generation)
    from flywheel_tpu import flash_attn_with_kvcache

    page, K, G, D, _ = case
    floats, ints = arrays()

    def run(q: Any, k: Any, v: Any, pages: Any, lengths: Any, table: Any) -> Any:
        return flash_attn_with_kvcache(q, pages, None, k, v, cache_seqlens=lengths, block_table=table, causal=True)

    M = SLOTS // page
    new = floats(ROWS, 1, K, D)
    return run, (floats(ROWS, 1, K * G, D), new, new, floats(ROWS * M, page, 2 * K, D), ints(ROWS), ints(ROWS, M))


def _batched(case: PeerCase, generation: str, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    _pretend(generation)
    from tokamax._src.ops.batched_rpa.kernel import configs, wrapper

    page, K, G, D, dtype = case
    floats, ints = arrays()
    sizes = configs.BlockSizes(bq_sz=1, bq_c_sz=1, bkv_sz=tokens, batch_size=BATCHED, n_buffer=3)

    def run(*args: Any) -> Any:
        return wrapper.ragged_paged_attention(*args, sm_scale=D**-0.5, decode_block_sizes=sizes)

    M = SLOTS // page
    new = floats(ROWS, K, D, dtype=dtype)
    pages = floats(ROWS * M, page, 2 * K, D, dtype=dtype)
    return run, (floats(ROWS, K * G, D), new, new, pages, ints(ROWS), ints(ROWS * M), ints(ROWS + 1), ints(3))


PEERS: Final = {
    "RPA v3": DecodePeer("RPAd", True, _rpa_v3),
    "flywheel": DecodePeer("flash_attn_with_kvcache", True, _flywheel),
    "batched_rpa": DecodePeer("RPAd", True, _batched),
    "jax ragged": DecodePeer("ragged_paged_attention", True, _jax_ragged),
    "jax paged": DecodePeer("paged_attention", False, _jax_paged),
}


def bundles_a_byte(name: str, case: PeerCase, generation: str) -> float | None:
    """Bundles per byte of keys and values, at the best block size; None if the kernel refuses the case."""
    import jax.numpy as jnp

    peer, ratios = PEERS[name], []
    for tokens in [FLYWHEEL] if name == "flywheel" else sizes(case):
        command = [str(Path(__file__).resolve()), json.dumps([name, case, generation, tokens])]
        try:
            schedule, _ = measure(command, peer.kernel)
        except RuntimeError as error:
            if not any(refusal in str(error) for refusal in REFUSALS):
                raise
            continue
        heads = case.kv_heads * (BATCHED if name == "batched_rpa" else 1) if peer.has_all_heads else 1
        ratios.append(peer_loop(schedule) / (tokens * heads * 2 * case.head_dim * jnp.dtype(case.dtype).itemsize))
    return min(ratios, default=None)


def peer_loop(schedule: Schedule) -> int:
    """Bundles of the loop over blocks, in steady state."""
    runs: list[list[int]] = [[]]
    for i, depth in enumerate(schedule.depths):
        if depth >= 2:  # 1 is the grid's loop, or that over rows
            runs[-1].append(i)
        elif runs[-1]:
            runs.append([])
    body = max(runs, key=len)
    short = [x for x in schedule.spans if body[0] <= x.start and x.stop <= body[-1] + 1 and x.stop - x.start < _SHORT]
    outer = [x for x in short if not any(y != x and y.start <= x.start and x.stop <= y.stop for y in short)]
    return len(body) - sum(x.stop - x.start for x in outer)


def _vmem(generation: str) -> int:
    return {"v5e": 100 << 20, "v5p": 50 << 20, "v6e": 100 << 20, "tpu7x": 50 << 20}[generation]


if __name__ == "__main__":
    peer_name, case_fields, for_generation, block = json.loads(sys.argv[1])
    compile_for(*PEERS[peer_name].function(PeerCase(*case_fields), for_generation, block), for_generation)
