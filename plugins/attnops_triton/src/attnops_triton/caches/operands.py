"""The arrays of a call in the kernels' layouts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attnops.kernels import FlashCall, elementwise_bias, of_bias, of_mask
from attnops.masks import Blocks, Dense
from attnops_caches import NewTokens, PagedCache, StoredCache
from attnops_triton.caches.intervals import Interval
from attnops_triton.caches.parameters import Tokens
from attnops_triton.caches.plan import CachePlan
from attnops_triton.flash.bits import is_translatable
from attnops_triton.language.translate import PRIMITIVES


def fitted(call: FlashCall) -> FlashCall:
    """The call, with arrays of all scores in place of masks and biases that can't be translated to Triton."""
    mask, bias, shape = call.mask, call.bias, call.scores_shape
    if mask is not None and (not is_translatable(mask) or any(isinstance(x, Blocks) for x in of_mask(mask)[2])):
        mask = Dense(jnp.broadcast_to(mask.dense(*shape), shape)).bind(*shape)
    if bias is not None and not of_bias(bias)[0].primitives <= PRIMITIVES:
        bias = bias.array(*shape)  # of an `attnops_caches.scores.SlotBias`
    if call.metadata.interpret:
        mask, bias = jax.tree.map(_widened, (mask, bias))
    return call.replace(mask=mask, bias=bias)


def _widened(x: Any) -> Any:
    """bfloat16 as float32, since Triton's interpreter has no bfloat16."""
    return x.astype(jnp.float32) if getattr(x, "dtype", None) == jnp.bfloat16 else x


def score_arrays(plan: CachePlan, call: FlashCall, seen: Interval | None) -> dict[str, jax.Array]:
    """The kernel's arrays for mask, bias and sinks, by parameter."""
    shape = (1 if plan.is_packed else plan.B), plan.H, plan.T, plan.key_axis
    found: dict[str, jax.Array] = {}
    if seen is not None:
        found |= {f"mask{i}": x for i, x in enumerate(seen)}
    elif plan.mask is not None:
        function, leaves, given = of_mask(call.mask, by_row=True)  # type: ignore[arg-type]
        found |= {f"mask{i}": _in_32_bits(x) for i, x in enumerate(function.compute(leaves, shape))}
        found |= {f"dense{i}": jnp.asarray(x).astype(jnp.int8) for i, x in enumerate(given)}
    if plan.scoring.bias is not None:
        bias, leaves = of_bias(elementwise_bias(call.bias), by_row=True)  # type: ignore[arg-type]
        found |= {f"bias{i}": _in_32_bits(x) for i, x in enumerate(bias.compute(leaves, shape))}
    elif plan.scoring.array:
        found["array"] = call.bias.astype(jnp.float32)
    return found | ({} if call.sinks is None else {"sinks": call.sinks.astype(jnp.float32)})


def _in_32_bits(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.uint32 else x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def store_arrays(cache: StoredCache) -> dict[str, jax.Array]:
    """The arrays of the cache, the numbers of their first block and of the layer, and the table of pages."""
    store = cache.store
    named = {name: getattr(store, name) for name in Tokens._fields}
    found = {name: x for name, x in named.items() if x is not None} | store.flat_blocks()
    # By row, and from its length: so XLA computes it in one kernel with the other numbers of rows. A row without tokens
    # reads no block.
    found["base"] = jnp.where(cache.lengths > 0, jnp.asarray(store.base, jnp.int32), 0)
    if store.layer is not None and store.given_scales:
        found["layer"] = jnp.where(cache.lengths > 0, store.layer, 0)
    return found | ({"table": cache.table} if isinstance(cache, PagedCache) else {})


def token_arrays(new: NewTokens) -> dict[str, jax.Array]:
    """The new tokens as the caller gave them, [B, T, K, d]; the slot after each row's last one, and how many fit."""
    assert new.given is not None
    given = {"new_key": new.given.key} | ({} if new.given.value is None else {"new_value": new.given.value})
    return given | {"new_stop": new.first + new.size, "new_size": new.size}
