"""Attention over a cache: from the options of a call to the kernels and back."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import triton.language as tl
from jax import lax

from attnops.kernels import FlashCall, describe, one_by_one
from attnops_caches import NewTokens, PagedCache, StoredCache
from attnops_caches.masks import without_table
from attnops_triton.caches import operands
from attnops_triton.caches.intervals import interval
from attnops_triton.caches.kernels.attention import attnops_ragged
from attnops_triton.caches.kernels.codec import assembly
from attnops_triton.caches.kernels.result import attnops_ragged_merge
from attnops_triton.caches.kernels.scores import within
from attnops_triton.caches.parameters import Arrays, Sizes, Tokens
from attnops_triton.caches.plan import CachePlan, features
from attnops_triton.caches.schedule import schedule
from attnops_triton.caches.tile_sizes import choose, current_splits, rows_of, split_count
from attnops_triton.flash.operands import Operand
from attnops_triton.language.compat import device_arch
from attnops_triton.language.launch import launch_any
from attnops_triton.language.source import KernelFunction
from attnops_triton.language.translate import Value, describe_values, mask_function, score_function
from attnops_triton.targets import current

CacheType = TypeVar("CacheType", bound=StoredCache)


def cached_attention(
    call: FlashCall, cache: CacheType, wants_lse: bool, new: NewTokens | None = None
) -> tuple[jax.Array, jax.Array | None, CacheType]:
    """The output [B, T, H, Dv], the logsumexp float32 [B, H, T] or None, and the cache with the new tokens.

    ``call`` has slots as keys; its key and value have shape and dtype only.
    """
    assert call.mask is not None
    mask = without_table(call.mask)[0]
    batch, T = call.query.shape[:2]
    seen = interval(mask, (batch, T, cache.length)) if batch == cache.batch else None
    call = operands.fitted(call.replace(mask=None if seen is not None else mask))
    plan = make_plan(call, cache, wants_lse, seen is not None, new is not None)
    arrays = {"q": call.query} | operands.store_arrays(cache) | operands.score_arrays(plan, call, seen)
    items = schedule(plan, mask, seen, cache.lengths, new)
    arrays |= {f"ranges{i}": x for i, x in enumerate(items.ranges)}
    arrays |= {name: x for name in ("row", "tile") if (x := getattr(items, name)) is not None}
    if new is not None:
        arrays |= operands.token_arrays(cache, new)
    results = _run(plan, arrays)
    if new is not None:
        written = {name: results[f"{name}_out"].reshape(getattr(cache.store, name).shape) for name in new.tokens}
        cache = dataclasses.replace(cache, store=dataclasses.replace(cache.store, **written))
    return results["out"], results.get("lse"), cache


def make_plan(call: FlashCall, cache: StoredCache, wants_lse: bool, by_interval: bool, writes: bool) -> CachePlan:
    """The plan of a call.

    Args:
        call: the call.
        cache: the cache.
        wants_lse: whether the call returns the logsumexp.
        by_interval: whether the kernel has the mask as an `Interval`.
        writes: whether it writes new tokens.
    """
    (batch, T, H, D), metadata, store = call.query.shape, call.metadata, cache.store
    is_packed = batch == 1 and cache.batch > 1
    S, K, Dv = cache.length, cache.kv_heads, cache.value_head_dim
    page, pages = (cache.page_size, cache.max_pages) if isinstance(cache, PagedCache) else (0, 0)
    keys = cache.batch * S if is_packed else S
    scoring = describe((T, keys), call.mask, call.bias, call.logits_soft_cap, 0.0, call.sinks is not None, by_row=True)
    arch = "" if metadata.interpret else current() or device_arch()
    codec, stored = cache.codec, jnp.dtype(store.layout.stored_dtype).name
    if codec is not None:
        stored = codec.dtype
    dtype = operand_dtype(call.query.dtype.name, jnp.dtype(cache.dtype).name, bool(codec))
    in_order = is_packed and current_splits() > 0
    # Tile sizes must not depend on T then: products of other sizes may be summed in another order.
    rows = rows_of(metadata.block_q, 1 << 20 if in_order else T, H // K, max(D, Dv), bool(codec), arch)
    tiles = choose(arch, dtype, (D, Dv), rows, metadata.block_k, bool(codec))
    content = store.layout.content
    packed = 1 if codec is None else codec.per_element
    key_features, value_features = features(D, Dv, store.layout.width, content, dtype, packed)
    plan = CachePlan(
        B=cache.batch, T=T, S=S, H=H, K=K, D=D, Dv=Dv, keys=key_features, values=value_features, tiles=tiles,
        is_even=S % tiles.bk == 0, is_packed=is_packed, in_order=in_order, page=page, pages=pages,
        blocks=store.own_blocks, is_joined=content == "joined", is_latent=content == "latent", stored=stored,
        scales="" if codec is None else codec.scales, dtype=dtype, out_dtype=call.query.dtype.name,
        assembly=assembly(stored, dtype, arch), scale=float(call.scale),
        tf32=dtype == "float32" and metadata.precision == lax.Precision.DEFAULT, writes=writes,
        mask=within if by_interval else mask_function(scoring.mask, scoring.dense),  # type: ignore[arg-type]
        score=score_function(scoring.bias, scoring.cap),
        masks=(Value(True, False, "q", tl.int32),) * 2 if by_interval else describe_values(scoring.mask),
        biases=describe_values(scoring.bias),
        has_bias=scoring.has_bias, scoring=scoring, wants_lse=wants_lse, arch=arch, interpret=metadata.interpret,
    )  # fmt: skip
    return dataclasses.replace(plan, splits=split_count(arch, plan.items * K * plan.head_blocks, plan.nk))


def operand_dtype(query: str, cache: str, has_codec: bool) -> str:
    """The dtype of products' operands. float16 represents all numbers of 8 bits or 4 exactly."""
    if query != cache or query == "float32":
        return "float32"
    return "float16" if has_codec else query


@one_by_one
def _run(plan: CachePlan, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The outputs by name: "out", "lse" if wanted, and "key_out", … for the arrays of the cache that are written."""
    written = [name for name in Tokens._fields if name in arrays and f"new_{name}" in arrays]
    is_split = plan.splits > 1
    outputs = _partial_outputs(plan) if is_split else _outputs(plan)
    aliases = {} if is_split else _initialised(plan, arrays)
    outputs |= {f"{name}_out": jax.ShapeDtypeStruct((x := arrays[name]).shape, x.dtype) for name in written}
    aliases |= {f"{name}_out": name for name in written}
    programs = plan.items * plan.K * plan.head_blocks
    results = _launch(plan, 0, arrays, outputs, programs * plan.splits, aliases)
    if not is_split:
        return results
    names = ("tile", "row", "sinks")
    given = {name: results.pop(name) for name in _partial_outputs(plan)} | {x: arrays[x] for x in names if x in arrays}
    aliases, rows = _initialised(plan, given), programs * plan.bq * plan.heads
    merged = max(16, 1 << (plan.splits - 1).bit_length())
    return results | _launch(plan, merged, given, _outputs(plan), rows, aliases)


def _launch(
    plan: CachePlan, merged: int, arrays: dict[str, jax.Array], outputs: dict[str, jax.ShapeDtypeStruct],
    programs: int, aliases: dict[str, str],
) -> dict[str, jax.Array]:  # fmt: skip
    """Run the kernel that merges this many splits, or for 0 the one that computes attention."""
    names = [*arrays, *outputs]
    named: dict[str, Any] = {name: name for name in names if name in Arrays._fields}
    for group, text in {"stored": "{}", "new": "new_{}", "written": "{}_out"}.items():
        tokens = map(text.format, Tokens._fields)
        named[group] = Tokens(*(name if name in names else None for name in tokens))
    for group in ("mask", "dense", "bias", "ranges"):
        # By number: a program's dictionaries have "mask10" before "mask2".
        found = (x for x in names if re.fullmatch(rf"{group}\d+", x))
        named[group] = tuple(sorted(found, key=lambda x: (len(x), x)))
    sizes = {name: getattr(plan, name) for name in Sizes._fields if name not in Sizes._field_defaults}
    fields: dict[str, Any] = {name: name for name in sizes}
    strides = {name: (f"{name}_b", f"{name}_h") for name in names if name in (*named["dense"], "array")}
    for name, pair in strides.items():
        batch, heads = arrays[name].shape[:2]
        sizes |= zip(pair, (heads * (batch > 1), int(heads > 1)), strict=True)
    if not all(0 <= value < 1 << 31 for value in sizes.values()):
        raise ValueError(f"{sizes} must be integers of 32 bits")
    fields |= {"dense": tuple(strides[x] for x in named["dense"]), "array": strides.get("array")}
    function = attnops_ragged_merge if merged else attnops_ragged
    kernel = KernelFunction(function, Arrays(**named), Sizes(**fields), plan.options(merged))
    inputs = [Operand(name, arrays[name]) for name in kernel.pointers if name in arrays]
    outputs = {name: outputs[name] for name in kernel.pointers if name in outputs}
    bits = ("key", "value", "key_out", "value_out")
    stored = {} if plan.scales else dict.fromkeys(bits, plan.stored)
    integers = tuple(sizes[name] for name in kernel.integers)
    return launch_any(plan, plan.tiles, kernel, integers, inputs, outputs, programs, frozenset(), aliases, stored)


def _outputs(plan: CachePlan) -> dict[str, jax.ShapeDtypeStruct]:
    batch = 1 if plan.is_packed else plan.B
    out = jax.ShapeDtypeStruct((batch, plan.T, plan.H, plan.Dv), jnp.dtype(plan.out_dtype))
    return {"out": out} | ({"lse": _float32(batch, plan.H, plan.T)} if plan.wants_lse else {})


def _partial_outputs(plan: CachePlan) -> dict[str, jax.ShapeDtypeStruct]:
    shape = plan.items, plan.K, plan.head_blocks, plan.splits, plan.tiles.rows
    return {"part": _float32(*shape, plan.Dv), "part_m": _float32(*shape), "part_l": _float32(*shape)}


def _initialised(plan: CachePlan, arrays: dict[str, jax.Array]) -> dict[str, str]:
    """For packed rows, add to ``arrays`` the initial values of the outputs, since no item writes padding. Returns the
    aliases.
    """
    if not plan.is_packed:
        return {}
    outputs = _outputs(plan)
    for name, x in outputs.items():
        arrays[f"{name}_before"] = jnp.full(x.shape, -jnp.inf if name == "lse" else 0.0, x.dtype)
    return {name: f"{name}_before" for name in outputs}


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
