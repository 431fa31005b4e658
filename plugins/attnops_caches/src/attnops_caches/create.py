"""The arrays of an empty cache, and checks of what it is created with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops_caches.bits import bits_dtype
from attnops_caches.codec import Quantized
from attnops_caches.integers import integers_by_row
from attnops_caches.store import Store

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.typing import DType


def create_store(
    blocks: int,
    slots: int,
    kv_heads: int,
    head_dim: int,
    value_head_dim: int | None,
    dtype: DType,
    codec: Quantized | None,
    latent: int | None,
    key_scale: ArrayLike | None,
    value_scale: ArrayLike | None,
    layers: int | None,
    width: int | None,
) -> Store:
    """An empty store, its arguments checked; see `DenseCache.create`."""
    for name, size in (("kv_heads", kv_heads), ("head_dim", head_dim)):
        check_size(name, size)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize not in (2, 4):
        raise ValueError(f"dtype={jnp.dtype(dtype).name} must be float32, bfloat16 or float16: what op takes")
    if codec is not None and not isinstance(codec, Quantized):
        raise ValueError(f"codec={codec!r} must be None or an attnops_caches.Quantized")
    if latent is not None:
        check_size("latent", latent)
        if latent > head_dim or value_head_dim not in (None, latent):
            raise ValueError(
                f"latent={latent} must be at most head_dim={head_dim}, and value_head_dim={value_head_dim} None or "
                f"equal to it: the value is the first latent features of the key"
            )
    elif value_head_dim is not None:
        check_size("value_head_dim", value_head_dim)
    lead = () if layers is None else (check_size("layers", layers),)
    dv = latent or (head_dim if value_head_dim is None else value_head_dim)
    least = head_dim if latent is not None else head_dim + dv
    if width is not None and check_size("width", width) < least:
        what = "the features of a latent" if latent is not None else "the features of key and value together"
        raise ValueError(f"width={width} must be at least {least}, {what}; or None for no padding")
    stored = bits_dtype(dtype if codec is None else codec.stored_dtype)

    def tokens(d: int) -> jax.Array:
        return jnp.zeros((*lead, blocks, kv_heads, slots, d), stored)

    def scales(name: str, given: ArrayLike | None) -> jax.Array | None:
        if codec is None or codec.scales == "token_head":
            if given is not None:
                why = "has no codec" if codec is None else "computes scales by token and head itself"
                raise ValueError(f"{name} is given, but the cache {why}; leave it out")
            return None if codec is None else jnp.zeros((*lead, blocks, kv_heads, slots), jnp.float32)
        shape = () if codec.scales == "tensor" else (kv_heads,)
        if given is None:
            raise ValueError(f"{name} is missing: with scales={codec.scales!r} it must be given, float32 {list(shape)}")
        known = isinstance(given, (int, float, np.ndarray, np.generic, list, tuple))
        if known and not all(np.isfinite(x) and x > 0 for x in np.asarray(given, np.float32).ravel()):
            raise ValueError(f"{name}={given} must be finite and above 0: tokens are stored as x / {name}")
        array = jnp.asarray(given, jnp.float32)
        if array.shape not in (shape, (*lead, *shape)):
            raise ValueError(f"{name} has shape {array.shape}, but must have shape {(*lead, *shape)} or {shape}")
        return jnp.broadcast_to(array, (*lead, *shape)) * jnp.float32(1)  # a buffer of its own, which can be donated

    if latent is not None and value_scale is not None:
        raise ValueError("value_scale is given, but the cache has latent content, which has no values of its own")
    return Store(
        key=tokens(head_dim if width is None else width),
        value=None if latent is not None or width is not None else tokens(dv),
        key_scale=scales("key_scale", key_scale),
        value_scale=None if latent is not None else scales("value_scale", value_scale),
        dtype=jnp.dtype(dtype),
        codec=codec,
        latent=latent,
        head_dims=(int(head_dim), int(dv)),
    )


def create_rows(batch: int, starts: ArrayLike | None, layers: int | None) -> dict[str, Any]:
    """``lengths``, ``starts`` and ``overflowed`` of an empty cache."""
    check_size("batch", batch)
    lead = () if layers is None else (layers,)
    first = jnp.zeros((batch,), jnp.int32) if starts is None else integers_by_row("starts", starts, batch)
    if isinstance(starts, (int, list, tuple, np.ndarray)) and (np.asarray(starts) < 0).any():
        raise ValueError(f"starts={starts} must be at least 0: how many tokens of left padding each row has")
    return {
        "lengths": jnp.zeros((*lead, batch), jnp.int32),
        "starts": jnp.broadcast_to(first, (*lead, batch)) + jnp.int32(0),
        "overflowed": jnp.zeros((*lead, batch), bool),
    }


def joined_width(head_dim: int, value_head_dim: int | None) -> int:
    """W of tokens that are joined without zeros."""
    dv = head_dim if value_head_dim is None else value_head_dim
    return check_size("head_dim", head_dim) + check_size("value_head_dim", dv)


def check_size(name: str, size: object) -> int:
    """``size``; raises a `ValueError` unless it is an int of at least 1."""
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
        raise ValueError(f"{name}={size!r} must be an int of at least 1")
    return int(size)
