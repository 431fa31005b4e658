"""Attention over a cache: from the options of a call to the kernel and back."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.kernels import FlashCall, equally_varying, one_by_one, output_like
from attnops.masks import Mask
from attnops_caches import PagedCache, StoredCache
from attnops_caches.masks import without_table
from attnops_cpu.caches.bands import Bands, bands
from attnops_cpu.library import library

# Numbers of `Stored` and `Scales` in native/decode.h.
STORED: Final = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "float8_e4m3fn": 4, "float8_e5m2": 5}
SCALES: Final = {"": 0, "tensor": 1, "head": 2, "token_head": 3}


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Everything static about a call; the fields are the attributes of the kernel's call.

    Attributes:
        head_dim: D.
        value_head_dim: Dv.
        value_first: the first feature of values in the array of keys; −1 where values have an array of their own.
        stored: the dtype of stored numbers, of `STORED`.
        scales: what has a scale of its own, of `SCALES`.
        scale: the softmax scale.
        cap: the soft cap of scores; 0 for none.
        wants_lse: whether the logsumexp is asked for.
    """

    head_dim: int
    value_head_dim: int
    value_first: int
    stored: int
    scales: int
    scale: float
    cap: float
    wants_lse: bool

    @classmethod
    def of(cls, call: FlashCall, cache: StoredCache, wants_lse: bool) -> DecodePlan:
        """The plan of a call."""
        layout, codec = cache.store.layout, cache.codec
        first = {"separate": -1, "joined": layout.width - layout.value_head_dim, "latent": 0}[layout.content]
        return cls(
            head_dim=layout.head_dim, value_head_dim=layout.value_head_dim, value_first=first,
            stored=STORED[jnp.dtype(layout.stored_dtype).name], scales=SCALES["" if codec is None else codec.scales],
            scale=call.scale, cap=call.logits_soft_cap or 0.0, wants_lse=wants_lse,
        )  # fmt: skip


def cached_attention(call: FlashCall, cache: StoredCache, wants_lse: bool) -> tuple[jax.Array, jax.Array | None]:
    """The output [B, T, H, Dv], and the logsumexp float32 [B, H, T] if it is wanted.

    ``call`` has slots as keys; its key and value have shape and dtype only.
    """
    assert call.mask is not None
    library()  # which registers the kernel
    plan = DecodePlan.of(call, cache, wants_lse)
    arrays = _store_arrays(cache) | _score_arrays(call)
    out, *lse = _compiled(plan, call.query, arrays)
    return out, lse[0] if lse else None


def _run(plan: DecodePlan, query: jax.Array, arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    (B, T, H, _), names = query.shape, list(arrays)
    query, *given = equally_varying([query, *(arrays[name] for name in names)])
    arrays = dict(zip(names, given, strict=True))
    lse = (B, H, T) if plan.wants_lse else (0,)
    shapes = output_like(query, (B, T, H, plan.value_head_dim), query.dtype), output_like(query, lse, jnp.float32)
    none = {name: jnp.zeros(0, dtype) for name, dtype in _OPTIONAL.items() if name not in arrays}
    arrays = arrays | none
    arrays.setdefault("value", jnp.zeros((0, *(1,) * (arrays["key"].ndim - 1)), arrays["key"].dtype))
    attributes: dict[str, Any] = {
        name: np.float32(x) if isinstance(x, float) else np.int64(x)
        for name, x in dataclasses.asdict(plan).items()
        if name != "wants_lse"
    }
    call = jax.ffi.ffi_call("attnops_cpu_decode", shapes)
    results = call(query, *(arrays[name] for name in _ORDER), **attributes)
    return tuple(results) if plan.wants_lse else (results[0],)


_ORDER: Final = (
    "key", "value", "key_scale", "value_scale", "positions", "rows", "left", "right", "table", "layer", "bits", "bias",
    "sinks",
)  # fmt: skip
# The dtypes of arrays that may be missing.
_OPTIONAL: Final = {
    "key_scale": jnp.float32, "value_scale": jnp.float32, "table": jnp.int32, "bits": jnp.bool_, "bias": jnp.float32,
    "sinks": jnp.float32,
}  # fmt: skip
# Compiled once for equal plans, also where the caller does not compile.
_compiled = jax.jit(one_by_one(_run), static_argnums=0)


def _store_arrays(cache: StoredCache) -> dict[str, jax.Array]:
    """The arrays of the cache (of all layers, if it has several), the index of the layer, and the table of pages."""
    store = cache.store
    found = {name: getattr(store, name) for name in ("key", "value", "key_scale", "value_scale")}
    if cache.is_latent:
        found["value_scale"] = found["key_scale"]
    found["layer"] = jnp.zeros((), jnp.int32) if store.layer is None else store.layer
    if isinstance(cache, PagedCache):
        found["table"] = cache.table
    return {name: x for name, x in found.items() if x is not None}


def _score_arrays(call: FlashCall) -> dict[str, jax.Array]:
    """What scores depend on in addition to query and key."""
    assert call.mask is not None
    B, H, T, S = call.scores_shape
    split = bands(without_table(call.mask)[0])  # the kernel looks into the table
    found = _positions(split, B, T, S)
    left, right = (jnp.asarray(x, jnp.int32) for x in (split.left, split.right))
    shape = np.broadcast_shapes(left.shape, right.shape, (1, 1))
    found |= {"left": jnp.broadcast_to(left, shape), "right": jnp.broadcast_to(right, shape)}
    if split.rest is not None:
        found["bits"] = _bits(split.rest, B, H, T, S)
    bias = call.bias
    if bias is not None:
        array = bias if hasattr(bias, "shape") else bias.array(B, H, T, S)  # of an `attnops_caches.scores.SlotBias`
        found["bias"] = jnp.asarray(array).astype(jnp.float32)
    if call.sinks is not None:
        found["sinks"] = call.sinks.astype(jnp.float32)
    return found


def _positions(split: Bands, B: int, T: int, S: int) -> dict[str, jax.Array]:
    """``positions`` of queries, int32 [B, T], and of each row ``rows``, int32 [B, 4]: its tokens' position minus their
    number, the first number that is held, one more than the last, and the newest slot.
    """
    if split.held is None:
        row = jnp.asarray([0, 0, S, S - 1], jnp.int32)
        return {"positions": jnp.zeros((B, T), jnp.int32), "rows": jnp.broadcast_to(row, (B, 4))}
    slots = split.held.slots
    newest = jnp.full((B,), S - 1, jnp.int32) if slots.newest is None else slots.newest
    rows = jnp.stack(
        [jnp.broadcast_to(jnp.asarray(x), (B,)) for x in (slots.shift, slots.start, slots.stop, newest)], 1
    )
    return {"positions": jnp.broadcast_to(jnp.asarray(split.held.q_positions), (B, T)), "rows": rows}


def _bits(mask: Mask, B: int, H: int, T: int, S: int) -> jax.Array:
    """Whether queries see slots, bool [B or 1, H or 1, T or 1, S]."""
    bits = mask.dense(B, H, T, S)
    return jnp.broadcast_to(bits, (*bits.shape[:3], S))
