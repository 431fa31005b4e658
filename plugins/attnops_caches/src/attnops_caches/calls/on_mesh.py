"""A call over a cache under a mesh: every device attends to the keys that it holds.

If only rows and heads are sharded, devices need no exchange. If the context is sharded, or if rows are packed and
sharded, a device has only some of the keys of its queries: it computes a partial softmax, and `joined` merges these.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from attnops.errors import Reason, UnsupportedError
from attnops.masks.at import At
from attnops.masks.base import Mask
from attnops.output import OperationOutput
from attnops.partition.boundary import (
    Boundary,
    Entry,
    dividing_axes,
    is_elsewhere,
    mesh_of_call,
    result_specs,
    rule_axes,
)
from attnops.partition.run import fields_of, kv_heads_of, run_on_shards, wanted_fields
from attnops.partition.shards import Shard
from attnops.sharding.axes import HEAD
from attnops.sharding.mesh import manual_axes, names_of
from attnops.sharding.placing import explicit_names, mapped_names, mesh_of_types
from attnops.sharding.rules import AxisRules
from attnops.sharding.specs import MeshLike
from attnops.softmax import PartialSoftmax, exp_sum, log_sum, merge, with_sinks
from attnops_caches.calls.reader import cache_of
from attnops_caches.masks.packed import PackedByRow
from attnops_caches.placement import Placement, check_packed, placement_of
from attnops_caches.scores import masks_in

if TYPE_CHECKING:
    from attnops.dispatch.request import AttentionRequest
    from attnops.typing import Leaf, Options
    from attnops_caches.base import Cache, CacheType
    from attnops_caches.calls.run import CallOfShard
    from attnops_caches.store import NewTokens

# Up to so many queries, partial softmaxes are all-gathered: one exchange, of more bytes than the two reductions.
_GATHERED: Final = 16


@dataclasses.dataclass(frozen=True)
class CacheBoundary(Boundary):
    """How a call over a cache is sharded over a mesh.

    Attributes:
        placement: how the cache is sharded. Queries are sharded with it, except packed rows, whose ``batch`` is None.
    """

    placement: Placement = dataclasses.field(kw_only=True)


def find_cache_boundary(
    mesh: MeshLike | None, rules: AxisRules, request: AttentionRequest, query: Leaf, cache: Cache
) -> CacheBoundary | None:
    """How a call over a cache is sharded: as the cache is, or by the rules where it has no placement.

    ``mesh`` and ``rules`` are the metadata's; without a mesh it is the cache's, the current one, or else that of the
    arrays.

    Raises:
        ValueError: ``mesh``, that of the cache and the current mesh have different axes.
        UnsupportedError: see `Placement.free`.
    """
    given = cache.placement
    if given is not None and mesh is not None and dict(given.mesh.shape) != dict(mesh.shape):
        raise ValueError(
            f"metadata.mesh has the axes {dict(mesh.shape)}, but the cache was placed on a mesh with "
            f"{dict(given.mesh.shape)}; a call runs on one mesh: leave metadata.mesh out, or give an equal one"
        )
    ambient = jax.sharding.get_abstract_mesh()
    arrays = [query, *jax.tree.leaves(cache)]
    typed = mesh_of_types(arrays)
    chosen = mesh_of_call(mesh if given is None else given.mesh, ambient, typed)
    if chosen is None:
        return None
    free = frozenset(chosen.shape) - mapped_names(arrays) - manual_axes()
    unsharded = Placement(chosen, None, None, None)
    if given is None:
        # Masks were bound to all slots of a row, so that each device has all of them.
        placement = dataclasses.replace(placement_of(cache, chosen, rules, by_page=False), slots=None)
    else:
        placement = cache.active_placement or unsharded
    dividing = functools.partial(dividing_axes, chosen, free)
    axes_of = functools.partial(rule_axes, rules, request.mode)
    heads = placement.kv_heads
    if heads is None and cache.is_stored:
        used = names_of(placement.batch) + names_of(placement.slots)
        heads = dividing(tuple(name for name in axes_of(HEAD) if name not in used), request.heads)
    is_explicit = bool(explicit_names(chosen) | explicit_names(typed))
    is_here = math.prod(chosen.shape[name] for name in free) > 1 or not is_elsewhere(chosen, arrays)
    if is_here and not is_explicit and placement == unsharded and heads is None:
        return None
    batch = None if cache_of(request).is_packed else placement.batch
    return CacheBoundary(
        mesh=chosen,
        is_ambient=not ambient.empty,
        batch=batch,
        heads=heads,
        kv_heads=placement.kv_heads,
        lengths=(None, None),
        results=result_specs(dividing, axes_of, request, batch, heads) if is_explicit else {},
        placement=placement,
    )


def run_cached(
    boundary: Boundary,
    of_shard: CallOfShard,
    query: jax.Array,
    cache: CacheType,
    options: Options,
    new: NewTokens | None = None,
) -> tuple[OperationOutput, CacheType]:
    """Attention over a cache, each device computing its shard; and the cache with new tokens written, if any.

    The query is [B, T, H, D], for packed rows [1, N, H, D]; the options are bound to slots, see
    `attnops_caches.calls.bind`.

    Raises:
        UnsupportedError: what can't be computed from partial softmaxes, or from some of the keys.
    """
    assert isinstance(boundary, CacheBoundary)
    placement, is_packed = boundary.placement, cache_of(of_shard.request).is_packed
    if is_packed:
        check_packed(placement)
    # The mesh axes over which partial softmaxes are merged; None where each device has all keys of its rows.
    keys = placement.batch if is_packed else placement.slots
    if keys is not None:
        _check_partial(keys, options)
    by_query, by_head = (
        PartitionSpec(boundary.batch, None, boundary.heads),
        PartitionSpec(boundary.batch, boundary.heads),
    )
    of_new = None if new is None else placement.specs_of_new(cache, is_packed)
    of_cache: Any = placement.specs(cache)
    fields = {"attention_outputs": by_query, "attention_weights": by_head, "logsumexp": by_head}
    wanted, written = wanted_fields(options), () if new is None else tuple(new.tokens)
    group = query.shape[2] // cache.kv_heads

    def compute(shard: Shard, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Leaf, ...]:
        query, cache, new = args
        local: Any = placement.local(cache)
        if boundary.kv_heads != boundary.heads:
            local = _with_heads(local, shard, group)
        if keys is None:
            output, local = of_shard.run(query, local, options, new)
            return *fields_of(output, wanted), *(getattr(local.store, name) for name in written)
        sinks = options.pop("sinks", None)
        options.pop("return_lse", None)
        part = joined(of_shard.partial(query, local, options), keys)
        if sinks is not None:
            part = with_sinks(part, sinks)
        return fields_of(OperationOutput(part.out.astype(query.dtype), None, part.lse), wanted)

    # Nothing is differentiated, and kernels may have carries that don't vary as the check wants.
    results = run_on_shards(
        boundary, compute, (query, cache, new), (by_query, of_cache, of_new), options,
        (*(fields[name] for name in wanted), *(getattr(of_cache.store, name) for name in written)), of_shard.key,
        (placement, wanted, written), kv_heads=cache.kv_heads, option_axes=of_shard.operation.option_axes,
        check_vma=False, keys=keys,
    )  # fmt: skip
    output = OperationOutput(**dict(zip(wanted, results[: len(wanted)], strict=True)))
    if new is not None:
        held: Any = cache
        arrays: dict[str, Any] = dict(zip(written, results[len(wanted) :], strict=True))
        cache = dataclasses.replace(held, store=dataclasses.replace(held.store, **arrays))
    return output, cache


def may_step(boundary: Boundary, cache: Cache) -> bool:
    """Whether each device may write the tokens of a step to its shard of a cache: the call must be sharded as the cache
    is, and the context of a row must be on one device.
    """
    assert isinstance(boundary, CacheBoundary)
    free = cache.active_placement
    return free is not None and free == boundary.placement and free.slots is None and free.kv_heads == boundary.heads


def joined(part: PartialSoftmax, axes: Entry) -> PartialSoftmax:
    """The partial softmaxes of the devices along mesh axes as one; inside `jax.shard_map`."""
    names = names_of(axes)
    if part.out.shape[1] > _GATHERED:
        m = lax.pmax(part.lse, names)
        l = exp_sum(part.lse, part.lse_residual, m).swapaxes(1, 2)[..., None]
        sums = lax.psum(jnp.concatenate([part.out * l, l], axis=-1), names)
        out, l = sums[..., :-1], sums[..., -1:]
        out = jnp.where(l != 0, out / jnp.where(l != 0, l, 1.0), 0.0)  # != 0: NaN too
        return PartialSoftmax(out, *log_sum(m, l[..., 0].swapaxes(1, 2)))
    rows = (x.swapaxes(1, 2)[..., None] for x in (part.lse, part.lse_residual))
    parts = lax.all_gather(jnp.concatenate([part.out, *rows], axis=-1), names)  # [devices, B, T, H, Dv + 2]
    return merge(*(PartialSoftmax(x[..., :-2], *(x[..., i].swapaxes(1, 2) for i in (-2, -1))) for x in parts))


def _check_partial(keys: Entry, options: Options) -> None:
    """Raise an `UnsupportedError` for what needs all keys on one device."""
    axes, reasons = ", ".join(names_of(keys)), []
    if "return_weights" in options:
        reasons.append(Reason("return_weights", True, f"the mesh axes {axes} shard the keys of each query",
                              "leave it out, or AxisRules(kv_length=None)"))  # fmt: skip
    if (mask := _numbering_keys(options["mask"])) is not None:
        reasons.append(Reason("mask", repr(mask), f"it numbers the keys, which the mesh axes {axes} shard",
                              "declare its axes, or AxisRules(kv_length=None)"))  # fmt: skip
    if reasons:
        listed = "".join(f"\n  - {reason}" for reason in reasons)
        raise UnsupportedError(f"attention over keys that are sharded over {axes}:{listed}", reasons)


def _numbering_keys(mask: Mask) -> Mask | None:
    """A part of a bound mask that needs the index of a key among all of them; None if there is none."""
    if isinstance(mask, PackedByRow) or (isinstance(mask, At) and mask.kv_positions is not None):
        return None
    if mask.axes is None:
        return mask
    return next((x for x in map(_numbering_keys, masks_in(mask)) if x is not None), None)


def _with_heads(cache: Any, shard: Shard, group: int) -> Any:
    """A cache with the kv heads that this device's query heads use; a copy, unless those are all."""
    store = cache.store
    if store.kv_heads == 1:
        return cache

    def chosen(x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return x
        return kv_heads_of(store.own(x), shard, group, 1) if x.ndim > 1 else kv_heads_of(x, shard, group, 0)

    return dataclasses.replace(cache, store=dataclasses.replace(jax.tree.map(chosen, store), layer=None))
