"""Caches described by words and numbers, for commands."""

from __future__ import annotations

import functools
from typing import Any, Final

import jax.numpy as jnp

from attnops.typing import Leaf
from attnops_caches.codec import Quantized
from attnops_caches.dense import DenseCache
from attnops_caches.paged import PagedCache
from attnops_caches.rows import Rows
from attnops_caches.stored import StoredCache
from attnops_caches.window import WindowCache

STORAGES: Final = ("DenseCache", "WindowCache", "PagedCache")
_OPTIONS: Final = ("page_size", "codec", "scales", "latent", "packed")


def source(
    storage: str, query: Leaf, key: Leaf, value_head_dim: int | None, options: dict[str, str]
) -> tuple[Any, StoredCache, dict[str, Any]]:
    """A cache of S slots per row to which T tokens can be appended, see `attnops_cli.sources`.

    Args:
        storage: the class, in upper or lower case, with or without "Cache".
        query: [B, T, H, D]; only its shape counts.
        key: [B, S, K, D]; only its shape and dtype count.
        value_head_dim: Dv; None for D, or the latent.
        options: page_size, codec, scales, latent, and packed, "true" for T queries of all rows in one batch.
    """
    names = {name.lower().removesuffix("cache"): name for name in STORAGES}
    if (name := names.get(storage.lower().removesuffix("cache"))) is None:
        raise ValueError(f"cache={storage!r} is unknown; use one of {list(STORAGES)}")
    if unknown := sorted(set(options) - {*_OPTIONS}):
        raise ValueError(f"source_options names {', '.join(unknown)}, but a {name} has {', '.join(_OPTIONS)}")
    page_size, latent = (_number(x, options.get(x)) for x in ("page_size", "latent"))
    codec, scales, packed = options.get("codec"), options.get("scales"), options.get("packed", "false").lower()
    if packed not in ("true", "false"):
        raise ValueError(f"packed={packed!r} must be true or false")
    if page_size is not None and name != "PagedCache":
        raise ValueError(f"page_size={page_size} is given, but a {name} has no pages; use PagedCache")
    if scales is not None and codec is None:
        raise ValueError(f"scales={scales!r} is given, but codec is not; give codec=int8, for example")
    T, (B, S, K, D) = query.shape[1], key.shape
    quantized = None if codec is None else Quantized(codec, scales or "token_head")
    scale = {"tensor": jnp.zeros(()), "head": jnp.zeros((K,))}.get(scales or "")
    sizes: Any = {
        "batch": B, "kv_heads": K, "head_dim": D, "value_head_dim": value_head_dim or latent or D, "dtype": key.dtype,
        "codec": quantized, "latent": latent, "key_scale": scale, "value_scale": None if latent else scale,
    }  # fmt: skip
    cache: StoredCache
    if name == "DenseCache":
        cache = DenseCache.create(length=S, **sizes)
    elif name == "WindowCache":
        if S < T:
            raise ValueError(f"S={S} slots do not hold the T={T} tokens appended")
        cache = WindowCache.create(window=S - T + 1, max_append=T, **sizes)
    else:
        pages, rest = divmod(S, page_size := page_size or 16)
        if rest:
            raise ValueError(f"S={S} must be a multiple of page_size={page_size}: a row has whole pages")
        cache = PagedCache.create(pages=B * pages, page_size=page_size, max_pages=pages, **sizes)
    if packed == "false":
        return query, cache, {}
    return query[:1], cache, {"rows": Rows(jnp.zeros(B + 1, jnp.int32), jnp.zeros(B, jnp.int32))}


# The entry points.
dense, window, paged = (functools.partial(source, storage) for storage in STORAGES)


def _number(name: str, text: str | None) -> int | None:
    if text is not None and (not text.isdecimal() or int(text) < 1):
        raise ValueError(f"{name}={text} must be an integer of at least 1")
    return None if text is None else int(text)
