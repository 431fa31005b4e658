"""The contenders of `gpu_decode.py`; one that is not installed, or does not support a case, raises `Refused`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from attnops_testing.bench.case import Refused

# The scale of all tokens if there is one scale per tensor.
SCALE: Final = 0.05


class DecodeCase(NamedTuple):
    """A step of decoding: one token per row.

    Attributes:
        length: tokens per row, the new one included.
        batch: rows.
        codec: what the cache is quantised to; "" for none.
        scales: "token_head" or "tensor"; "" without a codec.
        page: slots per page.
        kv_heads: K.
        groups: query heads per kv head.
        head_dim: D.
        dtype: the dtype of queries, and of the cache without a codec.
    """

    length: int
    batch: int
    codec: str
    scales: str
    page: int
    kv_heads: int
    groups: int
    head_dim: int
    dtype: str


class Step(NamedTuple):
    """A program for a case, whose pages are in any order and whose rows hold ``length - 1`` random tokens.

    Attributes:
        run: starts the program, and returns its output.
        wait: waits for an output.
        part: given an output, a row and a kv head, returns what the oracle needs, float64: the query [G, D], keys and
            values [n, D], and this part [G, D] of the output.
        device: the name of the device.
    """

    run: Callable[[], Any]
    wait: Callable[[Any], Any]
    part: Callable[[Any, int, int], tuple[np.ndarray, ...]]
    device: str


def _attnops(case: DecodeCase, interpret: bool, times: int = 0) -> Step:
    """`op(query, cache)` of attnops-triton; if stated, with the most splits whose programs are at most ``times`` as
    many as an H200 runs at once.
    """
    import contextlib

    import jax
    import jax.numpy as jnp

    from attnops import OperationMetadata, OperationRegistry
    from attnops.masks import Causal
    from attnops_caches import PagedCache, Quantized
    from attnops_triton.caches.tile_sizes import splits

    max_pages = -(-case.length // case.page)
    table = np.random.default_rng(0).permutation(case.batch * max_pages).reshape(case.batch, max_pages)
    by_tensor = {"key_scale": SCALE, "value_scale": SCALE} if case.scales == "tensor" else {}
    cache = PagedCache.create(
        batch=case.batch, pages=table.size, page_size=case.page, max_pages=max_pages, kv_heads=case.kv_heads,
        head_dim=case.head_dim, dtype=jnp.dtype(case.dtype), table=table,
        codec=Quantized(case.codec, case.scales) if case.codec else None, **by_tensor,
    )  # fmt: skip

    def drawn(x: jax.Array) -> jax.Array:
        numbers = jax.random.normal(jax.random.key(x.ndim), x.shape, jnp.bfloat16)
        if x.ndim == 3:
            return (jnp.abs(numbers) / 100).astype(x.dtype)
        dtype = cache.store.layout.stored_dtype
        stored = (numbers * 40).astype(jnp.int8) if case.codec == "int8" else numbers.astype(dtype)
        return stored if stored.dtype == x.dtype else jax.lax.bitcast_convert_type(stored, x.dtype)

    names = ("key", "key_scale", "value_scale") if case.scales == "token_head" else ("key",)
    store = dataclasses.replace(cache.store, **{name: drawn(getattr(cache.store, name)) for name in names})
    cache = dataclasses.replace(cache, store=store, lengths=jnp.full((case.batch,), case.length - 1, jnp.int32))
    shape = case.batch, 1, case.kv_heads * case.groups, case.head_dim
    query = jax.random.normal(jax.random.key(1), shape, jnp.dtype(case.dtype))
    metadata = OperationMetadata(platform="cuda", interpret=interpret, on_unsupported="error")
    operation: Any = OperationRegistry.create("attnops-triton:flash", metadata)
    program = jax.jit(lambda q, c: operation(q, c, mask=Causal()).attention_outputs)

    def part(out: jax.Array, b: int, k: int) -> tuple[np.ndarray, ...]:
        rows = {name: getattr(cache, name)[b : b + 1] for name in ("table", "lengths", "starts", "overflowed")}
        keys, values, _, held = dataclasses.replace(cache, **rows).read()
        heads = slice(k * case.groups, (k + 1) * case.groups)
        arrays = query[b, 0, heads], keys[0, :, k][held[0]], values[0, :, k][held[0]], out[b, 0, heads]
        return tuple(np.asarray(x, np.float64) for x in arrays)

    count = min(64, max(1, times * 396 // (case.batch * case.kv_heads)))

    def run() -> jax.Array:
        with splits(count) if times else contextlib.nullcontext():
            return program(query, cache)

    return Step(run, jax.block_until_ready, part, jax.devices()[0].device_kind)


class _Arrays:
    """Tokens, table and query as tensors of torch.

    Attributes:
        query: [B, H, D].
        key, value: pages as they are stored, [pages, K, page, D] in the layout "HND", [pages, page, K, D] in "NHD".
        key_scale, value_scale: float32 [pages, page, K] by token and head; else None.
        table: int32 [B, pages per row].
        lengths: int32 [B].
    """

    def __init__(self, case: DecodeCase, layout: str) -> None:
        torch = _torch()
        self.case, self.layout, device = case, layout, "cuda"
        torch.manual_seed(0)
        max_pages = -(-case.length // case.page)
        sizes = {"H": case.kv_heads, "N": case.page, "D": case.head_dim}
        shape = (case.batch * max_pages, *(sizes[name] for name in layout))
        stored = getattr(torch, case.codec or case.dtype)

        def tokens() -> Any:
            drawn = torch.randn(shape, dtype=getattr(torch, case.dtype), device=device)
            return (drawn * 40).to(stored) if case.codec == "int8" else drawn.to(stored)

        def scales() -> Any:
            if case.scales != "token_head":
                return None
            return torch.rand((shape[0], case.page, case.kv_heads), device=device) / 100

        self.query = torch.randn(
            (case.batch, case.kv_heads * case.groups, case.head_dim), dtype=getattr(torch, case.dtype), device=device
        )
        self.key, self.value, self.key_scale, self.value_scale = tokens(), tokens(), scales(), scales()
        self.table = torch.randperm(shape[0], device=device).reshape(case.batch, max_pages).to(torch.int32)
        self.lengths = torch.full((case.batch,), case.length - 1, dtype=torch.int32, device=device)

    def step(self, run: Callable[[], Any]) -> Step:
        """The step of a program that returns [B, H, D] or [B, 1, H, D]."""
        torch, case = _torch(), self.case

        def wait(out: Any) -> Any:
            torch.cuda.synchronize()
            return out

        def part(out: Any, b: int, k: int) -> tuple[np.ndarray, ...]:
            pages, n = self.table[b].long(), case.length - 1

            def read(x: Any, scale: Any) -> Any:
                tokens = x[pages].select(self.layout.index("H") + 1, k).reshape(-1, case.head_dim)[:n].double()
                if case.codec:
                    tokens = tokens * (SCALE if scale is None else scale[pages, :, k].reshape(-1, 1)[:n].double())
                return tokens

            heads = slice(k * case.groups, (k + 1) * case.groups)
            result = out.reshape(case.batch, -1, case.head_dim)[b, heads]
            keys, values = read(self.key, self.key_scale), read(self.value, self.value_scale)
            return tuple(x.double().cpu().numpy() for x in (self.query[b, heads], keys, values, result))

        return Step(run, wait, part, torch.cuda.get_device_name())


def _flashinfer(case: DecodeCase, _: bool) -> Step:
    """FlashInfer's wrapper for decoding over pages; with tensor cores if a kv head has 4 query heads or more."""
    flashinfer = _module("flashinfer", "pip install flashinfer-python")
    if case.codec and (case.scales != "tensor" or case.codec == "int8"):
        raise Refused("its only codec is float8 with one scale per tensor: --scales tensor")
    arrays, torch = _Arrays(case, "HND"), _torch()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(256 << 20, dtype=torch.uint8, device="cuda"), "HND", use_tensor_cores=case.groups >= 4
    )
    used = -(-(case.length - 1) // case.page)  # pages of a row that hold tokens
    wrapper.plan(
        torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * used, arrays.table[:, :used].flatten(),
        arrays.lengths - (used - 1) * case.page, case.kv_heads * case.groups, case.kv_heads, case.head_dim, case.page,
        q_data_type=arrays.query.dtype, kv_data_type=arrays.key.dtype,
    )  # fmt: skip
    scales = {"k_scale": SCALE, "v_scale": SCALE} if case.codec else {}
    return arrays.step(lambda: wrapper.run(arrays.query, (arrays.key, arrays.value), **scales))


def _vllm(case: DecodeCase, _: bool) -> Step:
    """VLLM's unified kernel in Triton, with as many segments as vLLM uses."""
    name = "vllm.v1.attention.ops.triton_unified_attention"
    unified = _module(name, "pip install vllm").unified_attention
    modes = {"int8": "INT8_PER_TOKEN_HEAD", "float8_e4m3fn": "FP8_PER_TOKEN_HEAD"}
    if case.codec and (case.scales != "token_head" or case.codec not in modes):
        raise Refused(f"its only codecs are {' and '.join(modes)} with scales by token and head")
    arrays, torch = _Arrays(case, "NHD"), _torch()
    segments, heads, threshold = 16, case.kv_heads * case.groups, 128 // case.kv_heads
    maxima = torch.empty((threshold, heads, segments), dtype=torch.float32, device="cuda")
    out = torch.empty_like(arrays.query)
    padded = 1 << (case.head_dim - 1).bit_length()
    options: dict[str, Any] = {
        "cu_seqlens_q": torch.arange(case.batch + 1, dtype=torch.int32, device="cuda"), "max_seqlen_q": 1,
        "seqused_k": arrays.lengths, "max_seqlen_k": case.length - 1, "softmax_scale": case.head_dim**-0.5,
        "causal": True, "window_size": (-1, -1), "block_table": arrays.table, "softcap": 0, "q_descale": None,
        "k_descale": None, "v_descale": None, "seq_threshold_3D": threshold, "num_par_softmax_segments": segments,
        "softmax_segm_output": torch.empty((*maxima.shape, padded), dtype=torch.float32, device="cuda"),
        "softmax_segm_max": maxima, "softmax_segm_expsum": torch.empty_like(maxima),
    }  # fmt: skip
    if case.codec:
        quantised = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode[modes[case.codec]]
        options |= {"kv_quant_mode": quantised, "k_scale_cache": arrays.key_scale, "v_scale_cache": arrays.value_scale}

    def run() -> Any:
        unified(q=arrays.query, k=arrays.key, v=arrays.value, out=out, **options)
        return out

    return arrays.step(run)


def _flash_attention(case: DecodeCase, name: str, table: str, install: str) -> Step:
    attend = _module(name, install).flash_attn_with_kvcache
    if case.codec:
        raise Refused("keys and values must have the query's dtype")
    if name == "flash_attn" and case.page % 256:
        raise Refused(f"pages of {case.page} slots must be multiples of 256: --page 256")
    arrays = _Arrays(case, "NHD")
    options = {"cache_seqlens": arrays.lengths, table: arrays.table, "causal": True}
    query = arrays.query[:, None]
    return arrays.step(lambda: attend(query, arrays.key, arrays.value, **options))


def _torch() -> Any:
    return importlib.import_module("torch")


def _module(name: str, install: str) -> Any:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise Refused(f"{name} can't be imported ({error}): {install}") from None
    if not _torch().cuda.is_available():
        raise Refused("torch sees no GPU")
    return module


# By name; functions of the case and of whether Triton is interpreted.
CONTENDERS: Final[dict[str, Callable[[DecodeCase, bool], Step]]] = {
    "attnops-triton": _attnops,
    "attnops-triton-split": lambda case, dry: _attnops(case, dry, times=4),
    "FlashInfer": _flashinfer,
    "vLLM": _vllm,
    "FlashAttention-3": lambda case, _: _flash_attention(
        case, "flash_attn_interface", "page_table", "install flash-attention's folder hopper"
    ),
    "FlashAttention-2": lambda case, _: _flash_attention(case, "flash_attn", "block_table", "pip install flash-attn"),
}
