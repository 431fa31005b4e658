"""Caches described on the command line."""

from __future__ import annotations

from typing import Annotated, Any, Final

import jax.numpy as jnp
import typer

from attnops.caches import Cache, DenseCache, PagedCache, Quantized, WindowCache
from attnops.typing import DType

STORAGES: Final = ("DenseCache", "WindowCache", "PagedCache")

# Options of the commands that take a cache.
Storage = Annotated[
    str | None, typer.Option(help="DenseCache, WindowCache or PagedCache, of S slots a row, where keys and values are.")
]
PageSize = Annotated[int | None, typer.Option(help="Slots a page.", show_default="16", min=1)]
Codec = Annotated[str | None, typer.Option(help="int8, float8_e4m3fn or float8_e5m2.")]
Scales = Annotated[
    str | None, typer.Option(help="Of the codec: tensor, head or token_head.", show_default="token_head")
]
Latent = Annotated[int | None, typer.Option(help="The value is so many features of the key (MLA).", min=1)]


def check_without_cache(options: dict[str, Any]) -> None:
    """Refuse options of caches where there is none, by name.

    Raises:
        ValueError: one is given.
    """
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if given:
        raise ValueError(f"{', '.join(given)} is given, but no cache; give --cache PagedCache, for example")


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
) -> Cache:
    """A cache of ``length`` slots a row to which ``query_length`` tokens can be appended.

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
        raise ValueError(f"scales={scales!r} is given, but codec is not; give --codec int8, for example")
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
