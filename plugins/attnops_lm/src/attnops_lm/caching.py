"""A model's caches, one per layer, and their metadata."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from attnops import OperationMetadata
from attnops.sharding import BATCH, HEAD, MODE_DECODE, AxisRules, correct_spec
from attnops_caches import Cache, DenseCache, PagedCache, PagePool, Quantized, WindowCache, pages_that_fit, sharded
from attnops_linear import StateCache
from attnops_lm.config import Config

# A layer's cache: of keys and values, or the state of a linear layer.
LayerCache = Cache | StateCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheMetadata:
    """The sizes of the caches that `init_cache` makes."""

    batch_size: int
    max_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    pad_token_id: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedMetadata:
    """The sizes of the pages that `init_ragged_pages` makes."""

    pages: int
    page_size: int
    max_model_length: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def max_pages(self) -> int:
        """The most pages per row."""
        return math.ceil(self.max_model_length / self.page_size)


class Caching:
    """The methods of a model that make caches."""

    config: Config
    dtype: Any
    metadata: OperationMetadata

    def create_cache_metadata(self, batch_size: int, max_length: int, pad_token_id: int | None = None) -> CacheMetadata:
        """The sizes of a cache with a row of ``max_length`` tokens for each of ``batch_size`` sequences."""
        c = self.config
        return CacheMetadata(
            batch_size=batch_size, max_length=max_length, num_layers=c.num_layers, num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim, pad_token_id=c.pad_token_id if pad_token_id is None else pad_token_id,
        )  # fmt: skip

    def init_cache(
        self,
        batch_size: int,
        max_length: int,
        starts: ArrayLike | None = None,
        shardings: dict[str, Any] | None = None,
        pad_token_id: int | None = None,
        *,
        codec: Quantized | None = None,
        max_append: int | None = None,
    ) -> tuple[LayerCache, ...]:
        """Empty caches, one per layer; a linear layer has a `StateCache`.

        Args:
            batch_size: B, the rows.
            max_length: S, the tokens of a row, left padding included.
            starts: tokens of left padding of each row, integers [B] or one for all; None for none.
            shardings: ``{"mesh": Mesh, "rules": AxisRules}``, by which the caches are sharded; None: on the mesh of the
                model's metadata, else on one device.
            pad_token_id: not used, since lengths tell what is padding; accepted because the protocol has it.
            codec: how tokens are quantised; None: they are not.
            max_append: if given, layers with a window have a `WindowCache`, to which at most this many tokens can be
                appended at a time, in place of a cache of S tokens.

        Memory: 2 · B · S · K · D elements per layer; with a `WindowCache` window + max_append in place of S.

        Raises:
            ValueError: starts are not B integers from 0 to S; a size is not an int of at least 1; codec is not a
                `Quantized`, or one whose scales must be given.
        """
        c = self.config
        del pad_token_id
        _check_sizes(batch_size, max_length, codec, max_append)
        if shardings is None and self.metadata.mesh is not None:
            shardings = {"mesh": self.metadata.mesh, "rules": self.metadata.axis_rules}
        if starts is not None:
            _check_starts(starts, batch_size, max_length)
            # With NumPy arrays nothing has to be compiled.
            array = jnp if isinstance(starts, jax.Array) else np
            starts = array.broadcast_to(array.asarray(starts, array.int32), (batch_size,))
        sizes = (batch_size, max_length, jnp.dtype(self.dtype), codec, max_append)
        if shardings is None:
            return _compiled_empty(c, *sizes, starts)
        return tuple(_placed(create, shardings) for create in _empty(c, *sizes, starts))

    def create_paged_metadata(self, hbm_utilization: float, page_size: int, max_model_length: int) -> PagedMetadata:
        """The sizes of as many pages as fit in a share of the device's memory, by `attnops_caches.pages_that_fit`.

        Raises:
            ValueError: the device does not report its memory (CPUs do not; give ``pages`` to `init_ragged_pages`), or
                the pages do not hold one sequence of ``max_model_length``.
        """
        c = self.config
        pages = pages_that_fit(
            hbm_utilization=hbm_utilization, page_size=page_size, kv_heads=c.num_kv_heads, head_dim=c.head_dim,
            dtype=self.dtype, layers=c.num_layers - c.layer_types.count("linear_attention"),
            max_model_length=max_model_length,
        )  # fmt: skip
        return self._paged_metadata(pages, page_size, max_model_length)

    def _paged_metadata(self, pages: int, page_size: int, max_model_length: int) -> PagedMetadata:
        c = self.config
        return PagedMetadata(
            pages=pages, page_size=page_size, max_model_length=max_model_length, num_layers=c.num_layers,
            num_kv_heads=c.num_kv_heads, head_dim=c.head_dim,
        )  # fmt: skip

    def init_ragged_pages(
        self,
        metadata: PagedMetadata | None = None,
        page_size: int | None = None,
        hbm_utilization: float | None = None,
        max_model_length: int | None = None,
        *,
        batch_size: int = 1,
        pages: int | None = None,
        codec: Quantized | None = None,
    ) -> tuple[tuple[LayerCache, ...], PagePool]:
        """Empty pages, one `PagedCache` per layer, and the pool whose table all layers share; a linear layer has a
        `StateCache`.

        Give ``metadata``, or ``page_size`` and ``max_model_length`` with one of ``hbm_utilization`` and ``pages``. The
        caches are on the mesh of the model's metadata, if it has one.

        Args:
            metadata: from `create_paged_metadata`.
            page_size: slots per page.
            hbm_utilization: the share of the device's memory for weights and pages together.
            max_model_length: tokens of the longest sequence.
            batch_size: B, the rows.
            pages: P, in place of a number computed from the device's memory.
            codec: how tokens are quantised; None: they are not.

        Raises:
            ValueError: too few or too many of these arguments are given.
        """
        if metadata is None:
            if page_size is None or max_model_length is None or (hbm_utilization is None) == (pages is None):
                raise ValueError(
                    f"give metadata, or page_size={page_size}, max_model_length={max_model_length} and one of "
                    f"hbm_utilization={hbm_utilization} and pages={pages}"
                )
            if pages is not None:
                metadata = self._paged_metadata(pages, page_size, max_model_length)
            else:
                assert hbm_utilization is not None
                metadata = self.create_paged_metadata(hbm_utilization, page_size, max_model_length)
        elif any(x is not None for x in (page_size, hbm_utilization, max_model_length, pages)):
            raise ValueError("metadata is given, so page_size, hbm_utilization, max_model_length and pages must not be")
        pool = PagePool.create(
            pages=metadata.pages, page_size=metadata.page_size, rows=batch_size, max_pages=metadata.max_pages
        )
        paged = functools.partial(
            PagedCache.create, batch=batch_size, pages=metadata.pages, page_size=metadata.page_size,
            max_pages=metadata.max_pages, kv_heads=metadata.num_kv_heads, head_dim=metadata.head_dim, dtype=self.dtype,
            codec=codec,
        )  # fmt: skip
        layers: list[Callable[..., LayerCache]]
        layers = [
            _states(self.config, batch_size, self.dtype) if kind == "linear_attention" else paged
            for kind in self.config.layer_types
        ]
        if (mesh := self.metadata.mesh) is not None:
            shardings = {"mesh": mesh, "rules": self.metadata.axis_rules}
            return tuple(_placed(create, shardings) for create in layers), pool
        return tuple(create() for create in layers), pool


def _check_sizes(batch_size: Any, max_length: Any, codec: Any, max_append: Any) -> None:
    """Check the static arguments of the program that makes caches; JAX's errors for wrong types say less."""
    sizes = {"batch_size": batch_size, "max_length": max_length}
    for name, size in (sizes if max_append is None else sizes | {"max_append": max_append}).items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"{name}={size!r} must be an int of at least 1")
    if codec is not None and not isinstance(codec, Quantized):
        raise ValueError(f"codec={codec!r} must be None or an attnops_caches.Quantized")


def _check_starts(starts: ArrayLike, batch_size: int, max_length: int) -> None:
    if isinstance(starts, jax.core.Tracer) or not getattr(starts, "is_fully_addressable", True):
        return  # their values are not known here
    host = np.asarray(starts)
    if host.dtype.kind not in "iu" or host.shape not in ((), (batch_size,)):
        raise ValueError(f"starts are {host.dtype} {host.shape}, but must be one integer or {batch_size}, one per row")
    if host.min() < 0 or host.max() > max_length:
        raise ValueError(
            f"starts={host.tolist()} must be from 0 to max_length={max_length}: they count tokens of a row"
        )


def with_table(caches: tuple[LayerCache, ...], table: jax.Array) -> tuple[LayerCache, ...]:
    """The caches of all layers with one page table."""
    return tuple(cache.with_table(table) if isinstance(cache, PagedCache) else cache for cache in caches)


def counted(caches: tuple[LayerCache, ...]) -> Cache:
    """The first cache of keys and values; all have the same lengths."""
    first = next((cache for cache in caches if isinstance(cache, Cache)), None)
    if first is None:
        raise ValueError("past_key_values has states alone, but needs a cache of keys and values: use model.init_cache")
    return first


def truncated(caches: tuple[LayerCache, ...], lengths: jax.Array) -> tuple[LayerCache, ...]:
    """Caches of keys and values (no states), truncated to the first ``lengths`` [B] tokens of each row."""
    truncate = operator.methodcaller("truncate", lengths)
    return tuple(map(truncate, caches))


def with_one_length(caches: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
    """The caches of all layers, with one set of arrays for rows (lengths, tables, …), so that XLA computes only once
    what depends on them.

    All layers hold the same tokens, so that these arrays are equal. XLA can't know that separate arrays are equal, and
    would determine the active tiles anew in each layer.
    """
    names = ("lengths", "starts", "written", "table")
    kinds: dict[object, LayerCache] = {}

    def shared(cache: LayerCache) -> LayerCache:
        first = kinds.setdefault((type(cache), getattr(cache, "length", None)), cache)
        same = {name: getattr(first, name) for name in names if hasattr(cache, name)}
        return dataclasses.replace(cache, **same)  # type: ignore[arg-type]

    return tuple(shared(cache) for cache in caches)


def without_shared_arrays(cache: LayerCache, original: LayerCache) -> LayerCache:
    """The inverse of `with_one_length` after a call: the cache with the arrays of ``original`` that no call changes.

    Otherwise all layers would return the same array, which could not be donated to the next call.
    """
    names = [name for name in ("starts", "table") if hasattr(original, name)]
    return dataclasses.replace(cache, **{name: getattr(original, name) for name in names})  # type: ignore[arg-type]


def _empty(
    config: Config, batch: int, length: int, dtype: Any, codec: Quantized | None, max_append: int | None,
    starts: ArrayLike | None,
) -> list[Callable[..., LayerCache]]:  # fmt: skip
    """The functions that create each layer's cache, with the arguments of `Caching.init_cache`."""
    sizes: dict[str, Any] = {
        "batch": batch, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "dtype": dtype, "codec": codec,
        "starts": starts,
    }  # fmt: skip
    creates: list[Callable[..., LayerCache]] = []
    for layer in range(config.num_layers):
        window = config.window_of(layer)
        if config.layer_types[layer] == "linear_attention":
            creates.append(_states(config, batch, dtype))
        elif max_append is not None and window is not None and window - 1 + max_append < length:
            creates.append(functools.partial(WindowCache.create, window=window, max_append=max_append, **sizes))
        else:
            creates.append(functools.partial(DenseCache.create, length=length, **sizes))
    return creates


def _states(config: Config, batch: int, dtype: Any) -> Callable[[], StateCache]:
    """The function that creates the cache of a linear layer."""
    sizes = config.linear
    assert sizes is not None
    return functools.partial(
        StateCache.create, batch=batch, heads=sizes.value_heads, head_dim=sizes.head_dim,
        value_head_dim=sizes.value_head_dim, conv=(sizes.channels, sizes.width), conv_dtype=dtype,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=range(6))
def _compiled_empty(*given: Any) -> tuple[LayerCache, ...]:
    """Caches of `_empty`, all in one compiled call: created one by one, the arrays of many layers cost as much time as
    a step.
    """
    return tuple(create() for create in _empty(*given))


def _placed(create: Callable[..., LayerCache], shardings: dict[str, Any]) -> LayerCache:
    if "mesh" not in shardings or set(shardings) - {"mesh", "rules"}:
        raise ValueError(f"shardings has {sorted(shardings)}, but must have mesh and may have rules, an AxisRules")
    mesh, rules = shardings["mesh"], shardings.get("rules", AxisRules())
    if create.func != StateCache.create:  # type: ignore[attr-defined]
        return sharded(cast(Callable[..., Cache], create), mesh=mesh, axis_rules=rules)
    batch, heads = rules.spec([BATCH, HEAD], mode=MODE_DECODE)

    def placement(x: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = PartitionSpec(batch, heads) if x.ndim == 4 else PartitionSpec(batch)
        return NamedSharding(mesh, correct_spec(spec, x.shape, mesh))

    return jax.jit(create, out_shardings=jax.tree.map(placement, jax.eval_shape(create)))()
