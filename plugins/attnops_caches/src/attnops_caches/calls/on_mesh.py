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

from attnops.dispatch.binding import shapes_of
from attnops.dispatch.call import Call
from attnops.dispatch.result import check_output
from attnops.errors import Reason
from attnops.masks.at import At
from attnops.masks.base import Mask
from attnops.output import OPTIONAL_FIELDS, OperationOutput
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
from attnops.sharding.mesh import manual_axes
from attnops.sharding.placing import explicit_names, mapped_names, mesh_of_types
from attnops.sharding.rules import AxisRules
from attnops.sharding.specs import MeshLike, names_of
from attnops.softmax import PartialSoftmax, exp_sum, log_sum, merge, with_sinks
from attnops_caches.calls.reader import attention_request, cache_of
from attnops_caches.calls.run import partial_on_device, run_on_device
from attnops_caches.masks.packed import PackedByRow
from attnops_caches.placement import Placement, placement_of, refusal
from attnops_caches.scores import masks_in

if TYPE_CHECKING:
    from attnops.dispatch.attention import OperationImpl
    from attnops.dispatch.request import AttentionRequest
    from attnops.typing import Leaf, Options
    from attnops_caches.base import Cache
    from attnops_caches.store import GivenTokens

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
    arrays. If these meshes have different axes, a `ValueError` is raised.
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
    placement = cache.active_placement or unsharded
    if given is None:
        placement = placement_of(cache, chosen, rules, is_made=False)
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


def run_over_cache(
    operation: OperationImpl, forward: str, call: Call, new: GivenTokens | None = None
) -> tuple[OperationOutput, Cache]:
    """Attention over a cache, and the cache with the new tokens of a step, if any, which the same kernel writes; under
    a mesh each device computes its shard. What needs all keys where they are sharded raises an `UnsupportedError`.
    """
    boundary, request, (query, cache), options = call.boundary, attention_request(call), call.args, call.options
    if boundary is None:
        return run_on_device(operation, forward, call, new)
    assert isinstance(boundary, CacheBoundary)
    placement, source = boundary.placement, cache_of(request)
    # The mesh axes over which partial softmaxes are merged; None where each device has all keys of its rows.
    keys = placement.keys(source.is_packed)
    if keys is not None:
        _check_partial(keys, options, placement.slots)
    by_query = PartitionSpec(boundary.batch, None, boundary.heads)
    by_head = PartitionSpec(boundary.batch, boundary.heads)
    of_cache, of_new = placement.specs(cache), None if new is None else placement.specs_of_given(new)
    fields = {"attention_outputs": by_query} | dict.fromkeys(OPTIONAL_FIELDS.values(), by_head)
    wanted, written = wanted_fields(options), () if new is None else tuple(cache.store._blocks())
    group = query.shape[2] // cache.kv_heads

    def compute(shard: Shard, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Leaf, ...]:
        query, whole, new = args
        cache: Any = placement.local(whole)
        if boundary.kv_heads != boundary.heads:
            cache = _with_heads(cache, shard, group)
        sinks = None if keys is None else options.pop("sinks", None)
        if keys is not None:
            options.pop("return_lse", None)
        local = request.replace(
            source=dataclasses.replace(source, rows=cache.batch),
            batch=query.shape[0], heads=query.shape[2], kv_heads=cache.kv_heads,
            key_length=cache.length * (cache.batch if source.is_packed else 1),
            mask_structure=request.mask_structure, options=request.options & frozenset(options),
        )  # fmt: skip
        call = Call(local, (query, cache), options)
        if keys is None:
            output, cache = run_on_device(operation, forward, call, new)
            check_output(type(operation).__name__, shapes_of(call), options, output)
            return *fields_of(output, wanted), *(getattr(cache.store, name) for name in written)
        part = joined(partial_on_device(operation, forward, call), keys)
        if sinks is not None:
            part = with_sinks(part, sinks)
        output = OperationOutput(part.out.astype(query.dtype), None, part.lse, part.max_logits)
        return fields_of(output, wanted)

    key = operation.program_key(forward)
    # Nothing is differentiated, and kernels may have carries that don't vary as the check wants.
    results = run_on_shards(
        boundary, compute, (query, cache, new), (by_query, of_cache, of_new), options,
        (*(fields[name] for name in wanted), *(getattr(of_cache.store, name) for name in written)),
        None if key is None else (key, forward, request), (placement, wanted, written),
        kv_heads=cache.kv_heads, option_axes=operation.option_axes, check_vma=False, keys=keys,
    )  # fmt: skip
    output = boundary.typed(OperationOutput(**dict(zip(wanted, results[: len(wanted)], strict=True))))
    if new is None:
        return output, cache
    return output, cache.with_blocks(dict(zip(written, results[len(wanted) :], strict=True)))


def may_step(boundary: Boundary | None, cache: Cache) -> bool:
    """Whether each device may write a step's tokens to its shard: the call is sharded as the cache, but no context."""
    if boundary is None:
        return cache.placement is None
    assert isinstance(boundary, CacheBoundary)
    free = cache.active_placement
    return free is not None and free == boundary.placement and free.slots is None and free.kv_heads == boundary.heads


def joined(part: PartialSoftmax, axes: Entry) -> PartialSoftmax:
    """The partial softmaxes of the devices along mesh axes as one; inside `jax.shard_map`."""
    names = names_of(axes)
    highest = jax.tree.map(lambda x: lax.pmax(x, names), part.max_logits)
    if part.out.shape[1] > _GATHERED:
        m = lax.pmax(part.lse, names)
        l = exp_sum(part.lse, part.lse_residual, m).swapaxes(1, 2)[..., None]
        sums = lax.psum(jnp.concatenate([part.out * l, l], axis=-1), names)
        out, l = sums[..., :-1], sums[..., -1:]
        out = jnp.where(l != 0, out / jnp.where(l != 0, l, 1.0), 0.0)  # != 0: NaN too
        return PartialSoftmax(out, *log_sum(m, l[..., 0].swapaxes(1, 2)), highest)
    rows = (x.swapaxes(1, 2)[..., None] for x in (part.lse, part.lse_residual))
    parts = lax.all_gather(jnp.concatenate([part.out, *rows], axis=-1), names)  # [devices, B, T, H, Dv + 2]
    merged = merge(*(PartialSoftmax(x[..., :-2], *(x[..., i].swapaxes(1, 2) for i in (-2, -1))) for x in parts))
    return merged._replace(max_logits=highest)


def _check_partial(keys: Entry, options: Options, slots: Entry) -> None:
    """Raise an `UnsupportedError` for what needs all keys on one device."""
    axes, reasons = ", ".join(names_of(keys)), []
    if "return_weights" in options:
        reasons.append(Reason("return_weights", True, f"the mesh axes {axes} shard the keys of each query",
                              "leave it out, or AxisRules(kv_length=None)"))  # fmt: skip
    if (mask := _numbering_keys(options["mask"])) is not None:
        reasons.append(Reason("mask", repr(mask), f"it numbers the keys, which the mesh axes {axes} shard",
                              "declare its axes, or AxisRules(kv_length=None)"))  # fmt: skip
    if slots is not None and isinstance(mask := options["mask"], PackedByRow):
        reasons.append(Reason("mask", repr(mask.mask), "it differs by row, and rows are packed, whose context the "
                              f"mesh axes {', '.join(names_of(slots))} shard",
                              "give a batch [B, T] with query_lengths, or AxisRules(kv_length=None)"))  # fmt: skip
    if reasons:
        raise refusal(f"attention over keys that are sharded over {axes}", *reasons)


def _numbering_keys(mask: Mask) -> Mask | None:
    """A part of a bound mask that needs the index of a key among all of them; None if there is none."""
    if isinstance(mask, PackedByRow) or (isinstance(mask, At) and mask.kv_positions is not None):
        return None
    if mask.axes is None:
        return mask
    return next((x for x in map(_numbering_keys, masks_in(mask)) if x is not None), None)


def _with_heads(cache: Any, shard: Shard, group: int) -> Any:
    """A cache with the kv heads that this device's query heads use; a copy, unless those are all."""
    if cache.kv_heads == 1:
        return cache

    def chosen(x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return x
        return kv_heads_of(cache.store.own(x), shard, group, 1) if x.ndim > 1 else kv_heads_of(x, shard, group, 0)

    return dataclasses.replace(cache, store=dataclasses.replace(jax.tree.map(chosen, cache.store), layer=None))
