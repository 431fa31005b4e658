"""The arrays of an empty cache, and checks of what it is created with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attnops.dispatch.vocabulary import hint
from attnops_caches.bits import bits_dtype
from attnops_caches.codec import Quantized
from attnops_caches.integers import integers_by_row
from attnops_caches.layout import TokenLayout, check_size
from attnops_caches.store import Store

if TYPE_CHECKING:
    from attnops.typing import DType


class TokenOptions(TypedDict, total=False):
    """What every storage is created with. All but the first two may be left out, or be None.

    Attributes:
        kv_heads: K.
        head_dim: D, of keys.
        value_head_dim: Dv, of values; None for D.
        dtype: the dtype of keys and values as they are appended and read, and of queries. bfloat16 if left out.
        codec: a `Quantized`, how tokens are stored; None: as they are.
        latent: for multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the value is the first ``latent``
            features of the key, and is not stored again.
        key_scale: with scales by tensor, float32 []; by head, [K]; [L] or [L, K] for layers that differ.
        value_scale: the same of the values.
        layers: L, for a layer axis in front of every array; None for none.
        width: W, the features of a token in one array: its key, zeros, and its value last; of latent content the
            key and zeros. If left out, keys and values are arrays of their own, [B, K, S, D] and [B, K, S, Dv], which
            products on CPUs read where they are.
    """

    kv_heads: Required[int]
    head_dim: Required[int]
    value_head_dim: int | None
    dtype: DType
    codec: Quantized | None
    latent: int | None
    key_scale: ArrayLike | None
    value_scale: ArrayLike | None
    layers: int | None
    width: int | None


def create_store(blocks: int, slots: int, joins: bool = False, **tokens: Unpack[TokenOptions]) -> Store:
    """An empty store of ``blocks`` of n = ``slots``, its arguments checked.

    If ``joins``, key and value are in one array, without zeros unless a width is given.
    """
    given = given_options(tokens)
    K, layers = check_size("kv_heads", given.pop("kv_heads")), given.pop("layers", None)
    lead = () if layers is None else (check_size("layers", layers),)
    given_scales = given.pop("key_scale", None), given.pop("value_scale", None)
    layout = TokenLayout.create(**given, joins=joins)
    codec, is_latent = layout.codec, layout.content == "latent"
    stored = bits_dtype(layout.stored_dtype)

    def array(d: int) -> jax.Array:
        return jnp.zeros((*lead, blocks, K, slots, d), stored)

    def scales(name: str, given: ArrayLike | None) -> jax.Array | None:
        if codec is None or codec.scales == "token_head":
            if given is not None:
                why = "has no codec" if codec is None else "computes scales by token and head itself"
                raise ValueError(f"{name} is given, but the cache {why}; leave it out")
            return None if codec is None else jnp.zeros((*lead, blocks, K, slots), jnp.float32)
        shape = () if codec.scales == "tensor" else (K,)
        if given is None:
            raise ValueError(f"{name} is missing: with scales={codec.scales!r} it must be given, float32 {list(shape)}")
        known = isinstance(given, (int, float, np.ndarray, np.generic, list, tuple))
        if known and not all(np.isfinite(x) and x > 0 for x in np.asarray(given, np.float32).ravel()):
            raise ValueError(f"{name}={given} must be finite and above 0: tokens are stored as x / {name}")
        array = jnp.asarray(given, jnp.float32)
        if array.shape not in (shape, (*lead, *shape)):
            raise ValueError(f"{name} has shape {array.shape}, but must have shape {(*lead, *shape)} or {shape}")
        return jnp.broadcast_to(array, (*lead, *shape)) * jnp.float32(1)  # a buffer of its own, which can be donated

    if is_latent and given_scales[1] is not None:
        raise ValueError("value_scale is given, but the cache has latent content, which has no values of its own")
    return Store(
        key=array(layout.width),
        value=array(layout.value_head_dim) if layout.content == "separate" else None,
        key_scale=scales("key_scale", given_scales[0]),
        value_scale=None if is_latent else scales("value_scale", given_scales[1]),
        layout=layout,
    )


def given_options(tokens: TokenOptions) -> dict[str, Any]:
    """The options that are given and not None.

    Raises:
        TypeError: an option that there is not, or one that is missing.
    """
    known = sorted(TokenOptions.__annotations__)
    for name in tokens:
        if name not in known:
            advice = hint(name, known)
            raise TypeError(f"a cache has no option {name!r}; it has {known}{advice and f'; {advice}'}")
    given = {name: x for name, x in tokens.items() if x is not None}
    for name in ("kv_heads", "head_dim"):
        if name not in given:
            raise TypeError(f"{name} is missing: a cache is created with kv_heads=K and head_dim=D at least")
    return given


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
