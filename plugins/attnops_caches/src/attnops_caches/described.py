"""Caches described by words and numbers, for commands."""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp

from attnops.typing import DType
from attnops_caches.codec import Quantized
from attnops_caches.dense import DenseCache
from attnops_caches.paged import PagedCache
from attnops_caches.rows import Rows
from attnops_caches.stored import StoredCache
from attnops_caches.window import WindowCache

STORAGES: Final = ("DenseCache", "WindowCache", "PagedCache")


def make_cache(
    storage: str,
    *,
    batch: int,
    query_length: int,
    length: int,
    kv_heads: int,
    head_dim: int,
    value_head_dim: int,
    dtype: DType,
    page_size: int | None,
    codec: str | None,
    scales: str | None,
    latent: int | None,
) -> StoredCache:
    """A cache of ``length`` slots per row to which ``query_length`` tokens can be appended.

    Call it while tracing, so that no array is allocated.

    Raises:
        ValueError: no such cache.
    """
    names = {name.lower(): name for name in STORAGES}
    name = names.get(storage.lower()) or names.get(f"{storage.lower()}cache")
    if name is None:
        raise ValueError(f"cache={storage!r} is unknown; use one of {list(STORAGES)}")
    if page_size is not None and name != "PagedCache":
        raise ValueError(f"page_size={page_size} is given, but a {name} has no pages; use PagedCache")
    if scales is not None and codec is None:
        raise ValueError(f"scales={scales!r} is given, but codec is not; give codec=int8, for example")
    quantized = None if codec is None else Quantized(codec, *([] if scales is None else [scales]))
    scale = None
    if quantized is not None and quantized.scales != "token_head":
        scale = jnp.zeros(() if quantized.scales == "tensor" else (kv_heads,))
    sizes = {
        "batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "value_head_dim": value_head_dim, "dtype": dtype,
        "codec": quantized, "latent": latent, "key_scale": scale, "value_scale": None if latent else scale,
    }  # fmt: skip
    if name == "DenseCache":
        return DenseCache.create(length=length, **sizes)  # type: ignore[arg-type]
    if name == "WindowCache":
        if length < query_length:
            raise ValueError(f"S={length} slots do not hold the T={query_length} tokens appended")
        return WindowCache.create(window=length - query_length + 1, max_append=query_length, **sizes)  # type: ignore[arg-type]
    page_size = 16 if page_size is None else page_size
    if length % page_size:
        raise ValueError(f"S={length} must be a multiple of page_size={page_size}: a row has whole pages")
    pages = length // page_size
    return PagedCache.create(pages=batch * pages, page_size=page_size, max_pages=pages, **sizes)  # type: ignore[arg-type]


_OPTIONS: Final = ("page_size", "codec", "scales", "latent", "packed")


def source(
    storage: str, query: jax.Array, key: jax.Array, value_head_dim: int | None, options: dict[str, str]
) -> tuple[jax.Array, StoredCache, dict[str, Any]]:
    """A cache for ``attnops explain``, see `attnops_cli.sources`.

    Args:
        storage: the class.
        query: [B, T, H, D].
        key: [B, S, K, D].
        value_head_dim: Dv; None for D, or the latent.
        options: page_size, codec, scales, latent, and packed, "true" for T queries of all rows in one batch.

    Raises:
        ValueError: no such cache.
    """
    if unknown := sorted(set(options) - {*_OPTIONS}):
        raise ValueError(f"source_options names {', '.join(unknown)}, but a {storage} has {', '.join(_OPTIONS)}")
    numbers = {name: _number(name, options.get(name)) for name in ("page_size", "latent")}
    packed = options.get("packed", "false").lower()
    if packed not in ("true", "false"):
        raise ValueError(f"packed={packed!r} must be true or false")
    B, S, K, D = key.shape
    cache = make_cache(
        storage, batch=B, query_length=query.shape[1], length=S, kv_heads=K, head_dim=D, dtype=key.dtype,
        value_head_dim=value_head_dim or numbers["latent"] or D, codec=options.get("codec"),
        scales=options.get("scales"), **numbers,
    )  # fmt: skip
    if packed == "false":
        return query, cache, {}
    return query[:1], cache, {"rows": Rows(jnp.zeros(B + 1, jnp.int32), jnp.zeros(B, jnp.int32))}


# The entry points.
dense, window, paged = (functools.partial(source, storage) for storage in STORAGES)


def _number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text} must be an integer of at least 1")
    return int(text)
