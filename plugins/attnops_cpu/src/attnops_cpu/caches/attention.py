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
from attnops_caches.masks import Packed, PackedByRow, Slots, without_table
from attnops_cpu.caches.bands import Bands, bands
from attnops_cpu.library import library

# Numbers of `Stored` and `Scales` in native/decode.h.
STORED: Final = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "float8_e4m3fn": 4, "float8_e5m2": 5,
                 "int4": 6}  # fmt: skip
SCALES: Final = {"": 0, "tensor": 1, "head": 2, "token_head": 3}


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Everything static about a call; the fields are the attributes of the kernel's call.

    Attributes:
        head_dim: D.
        value_head_dim: Dv.
        value_first: the first element of values in the array of keys; −1 if values have a separate array.
        stored: the dtype of stored numbers, a value of `STORED`.
        scales: what has a separate scale, a value of `SCALES`.
        scale: the softmax scale.
        cap: the soft cap of scores; 0 for none.
        wanted: whether the logsumexp is asked for, and whether the largest scores are.
    """

    head_dim: int
    value_head_dim: int
    value_first: int
    stored: int
    scales: int
    scale: float
    cap: float
    wanted: tuple[bool, bool]

    @classmethod
    def of(cls, call: FlashCall, cache: StoredCache, wants_lse: bool) -> DecodePlan:
        """The plan of a call."""
        layout, codec = cache.store.layout, cache.codec
        joined = layout.elements(layout.width - layout.value_head_dim)
        first = {"separate": -1, "joined": joined, "latent": 0}[layout.content]
        stored = jnp.dtype(layout.stored_dtype).name if codec is None else codec.dtype
        return cls(
            head_dim=layout.head_dim, value_head_dim=layout.value_head_dim, value_first=first,
            stored=STORED[stored], scales=SCALES["" if codec is None else codec.scales],
            scale=call.scale, cap=call.logits_soft_cap or 0.0, wanted=(wants_lse, call.max_logits),
        )  # fmt: skip


def cached_attention(
    call: FlashCall, cache: StoredCache, wants_lse: bool
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The output [B, T, H, Dv], and, if asked for, the logsumexp and the largest scores, each float32 [B, H, T].

    The keys of ``call`` are slots; its key and value have only a shape and a dtype.
    """
    assert call.mask is not None
    library()  # registers the kernel
    plan, arrays = DecodePlan.of(call, cache, wants_lse), _store_arrays(cache)
    if isinstance(call.mask, (Packed, PackedByRow)):
        arrays["packed"] = call.mask.q_rows
        arrays |= _score_arrays(_unpacked(call, cache), cache.slots())
    else:
        arrays |= _score_arrays(call)
    out, *statistics = _compiled(plan, call.query, arrays)
    lse, highest = (statistics.pop(0) if wanted else None for wanted in plan.wanted)
    return out, lse, highest


def _run(plan: DecodePlan, query: jax.Array, arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    (B, T, H, _), names = query.shape, list(arrays)
    query, *given = equally_varying([query, *(arrays[name] for name in names)])
    arrays = dict(zip(names, given, strict=True))
    of_scores = [output_like(query, (B, H, T) if wanted else (0,), jnp.float32) for wanted in plan.wanted]
    shapes = output_like(query, (B, T, H, plan.value_head_dim), query.dtype), *of_scores
    none = {name: jnp.zeros(0, dtype) for name, dtype in _OPTIONAL.items() if name not in arrays}
    arrays = arrays | none
    arrays.setdefault("value", jnp.zeros((0, *(1,) * (arrays["key"].ndim - 1)), arrays["key"].dtype))
    attributes: dict[str, Any] = {
        name: np.float32(x) if isinstance(x, float) else np.int64(x)
        for name, x in dataclasses.asdict(plan).items()
        if name != "wanted"
    }
    call = jax.ffi.ffi_call("attnops_cpu_decode", shapes)
    out, *results = call(query, *(arrays[name] for name in _ORDER), **attributes)
    return out, *(x for x, wanted in zip(results, plan.wanted, strict=True) if wanted)


_ORDER: Final = (
    "key", "value", "key_scale", "value_scale", "positions", "rows", "left", "right", "packed", "table", "layer",
    "bits", "bias", "sinks",
)  # fmt: skip
# The dtypes of arrays that may be missing.
_OPTIONAL: Final = {
    "key_scale": jnp.float32, "value_scale": jnp.float32, "packed": jnp.int32, "table": jnp.int32, "bits": jnp.bool_,
    "bias": jnp.float32, "sinks": jnp.float32,
}  # fmt: skip
# Compiled once for equal plans, also where the caller does not compile.
_compiled = jax.jit(one_by_one(_run), static_argnums=0)


def _store_arrays(cache: StoredCache) -> dict[str, jax.Array]:
    """The arrays of the cache (of all layers, if it has several), the index of the layer, and the table of pages."""
    store = cache.store
    arrays = {name: getattr(store, name) for name in ("key", "value", "key_scale", "value_scale")} | store.given_scales
    if cache.is_latent:
        arrays["value_scale"] = arrays["key_scale"]
    arrays["layer"] = jnp.zeros((), jnp.int32) if store.layer is None else store.layer
    if isinstance(cache, PagedCache):
        arrays["table"] = cache.table
    return {name: x for name, x in arrays.items() if x is not None}


def _unpacked(call: FlashCall, cache: StoredCache) -> FlashCall:
    """A call of N packed queries as a call of N rows with one query each."""
    mask, (_, N, H, D), S = call.mask, call.query.shape, cache.length
    assert isinstance(mask, (Packed, PackedByRow))
    queries, row = jnp.arange(N, dtype=jnp.int32)[:, None], jnp.maximum(mask.q_rows, 0)
    slots, bias = cache.slots().of_rows(row), call.bias
    if bias is not None:
        n, h, _, s = np.ix_(*map(np.arange, (N, H, 1, S)))
        bias = bias.apply(jnp.zeros((N, H, 1, S), jnp.float32), 0, h, n, row[:, None, None, None] * S + s)
    return call.replace(
        query=jax.ShapeDtypeStruct((N, 1, H, D), call.query.dtype),
        mask=mask.of_tiles(queries, mask.q_rows >= 0, row, slots).bind(N, H, 1, S),
        bias=bias,
    )


def _score_arrays(call: FlashCall, of_rows: Slots | None = None) -> dict[str, jax.Array]:
    """The arrays that scores depend on besides query and key; ``of_rows``: the slots of the cache's rows, if packed."""
    assert call.mask is not None
    B, H, T, S = call.scores_shape
    split = bands(without_table(call.mask)[0])  # the kernel reads the table
    arrays = _positions(split, B, T, S, split.slots if of_rows is None else of_rows)
    left, right = (jnp.asarray(x, jnp.int32) for x in (split.left, split.right))
    shape = np.broadcast_shapes(left.shape, right.shape, (1, 1))
    arrays |= {"left": jnp.broadcast_to(left, shape), "right": jnp.broadcast_to(right, shape)}
    if split.rest is not None:
        arrays["bits"] = _bits(split.rest, B, H, T, S)
    bias = call.bias
    if bias is not None:
        array = bias if hasattr(bias, "shape") else bias.array(B, H, T, S)  # of an `attnops_caches.scores.SlotBias`
        arrays["bias"] = jnp.asarray(array).astype(jnp.float32)
    if call.sinks is not None:
        arrays["sinks"] = call.sinks.astype(jnp.float32)
    return arrays


def _positions(split: Bands, B: int, T: int, S: int, slots: Slots | None) -> dict[str, jax.Array]:
    """``positions`` of queries, int32 [B, T], and ``rows``, int32 [B, 4]: for each row its tokens' position minus their
    number, the first number that is held, the last one plus 1, and the newest slot.
    """
    if split.held is None or slots is None:
        row = jnp.asarray([0, 0, S, S - 1], jnp.int32)
        return {"positions": jnp.zeros((B, T), jnp.int32), "rows": jnp.broadcast_to(row, (B, 4))}
    held = jnp.asarray(split.held.q_positions)
    positions = held if split.q_positions is None else jnp.where(held < 0, held, split.q_positions)
    fields = [
        jnp.asarray(x) for x in (slots.shift, slots.start, slots.stop, S - 1 if slots.newest is None else slots.newest)
    ]
    rows = jnp.stack(jnp.broadcast_arrays(*fields), 1)
    return {"positions": jnp.broadcast_to(positions, (B, T)), "rows": rows.astype(jnp.int32)}


def _bits(mask: Mask, B: int, H: int, T: int, S: int) -> jax.Array:
    """Whether queries see slots, bool [B or 1, H or 1, T or 1, S]."""
    bits = mask.dense(B, H, T, S)
    return jnp.broadcast_to(bits, (*bits.shape[:3], S))
