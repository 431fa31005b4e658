"""How a cache is sharded over a mesh: its rows, its kv heads, and the slots of a row (the context)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from attnops.errors import Reason, UnsupportedError
from attnops.partition.boundary import dividing_axes
from attnops.partition.program import first_index
from attnops.programs.program import Program, bind
from attnops.programs.tracing import CALLS, trace
from attnops.sharding.axes import BATCH, KV_HEAD, KV_LENGTH
from attnops.sharding.mesh import manual_axes, mesh_arguments
from attnops.sharding.modes import MODE_DECODE
from attnops.sharding.placing import explicit_names, of_axes, placed
from attnops.sharding.rules import DEFAULT_RULES, AxisRules
from attnops.sharding.specs import MeshAxes, MeshLike, entry_of, names_of
from attnops_caches.store import GivenTokens

if TYPE_CHECKING:
    from attnops.typing import Leaf
    from attnops_caches.base import CacheType
    from attnops_caches.rows import Rows
    from attnops_caches.stored import StoredCache


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh axes that shard a cache; static. Made by `sharded`.

    Attributes:
        mesh: the mesh.
        batch: the mesh axes that shard rows and pages; the tables of a shard's rows number its pages from 0.
        kv_heads: the mesh axes that shard kv heads; None where they do not divide.
        slots: the mesh axes that shard the slots of a `DenseCache`'s rows, or of a `PagedCache`'s pages: the context.
    """

    mesh: MeshLike
    batch: MeshAxes
    kv_heads: MeshAxes
    slots: MeshAxes

    def free(self) -> Placement | None:
        """This placement without the axes that an enclosing `jax.shard_map` uses; None if it shards nothing then.

        Raises:
            UnsupportedError: the `jax.shard_map` uses axes that shard the context.
        """
        manual = manual_axes()
        if not manual:
            return self
        if used := [name for name in names_of(self.slots) if name in manual]:
            raise refusal("the cache can't be used in this jax.shard_map", Reason(
                "placement.slots", used, "shards the context, which can't be joined inside a jax.shard_map over it",
                "call the operation outside of it",
            ))  # fmt: skip
        entries = self.batch, self.kv_heads, self.slots
        kept = [entry_of(name for name in names_of(entry) if name not in manual) for entry in entries]
        return Placement(self.mesh, *kept) if any(kept) else None

    def for_rows(self, rows: int) -> Placement:
        """This placement for another number of rows: without the axes that do not divide it."""
        kept = {*names_of(_dividing(self.batch, rows, self.mesh)), *manual_axes()}
        return dataclasses.replace(self, batch=entry_of(name for name in names_of(self.batch) if name in kept))

    def keys(self, is_packed: bool) -> MeshAxes:
        """The mesh axes that shard the keys of a call, for packed rows those of all rows."""
        return entry_of(names_of(self.batch) + names_of(self.slots)) if is_packed else self.slots

    def shards(self, entry: MeshAxes) -> int:
        """How many shards some of its mesh axes make."""
        return math.prod(self.mesh.shape[name] for name in names_of(entry))

    def specs(self, cache: CacheType) -> CacheType:
        """The partition spec of every array of a cache, a pytree of its structure."""
        by_token = self.batch, self.kv_heads, self.slots
        scale = {"head": (self.kv_heads,), "token_head": by_token}.get(cache.describe().scales, ())
        # By the last dimensions: there may be a layer axis in front. What has no entry is by row, or by page.
        last: dict[str, tuple[MeshAxes, ...]] = {"layer": (), "first_slot": (), "table": (self.batch, None)}
        last |= dict.fromkeys(("key", "value"), (*by_token, None)) | dict.fromkeys(("key_scale", "value_scale"), scale)

        def spec(path: tuple[Any, ...], x: Leaf) -> PartitionSpec:
            entries = last.get(getattr(path[-1], "name", ""), (self.batch,))[: len(x.shape)]
            return PartitionSpec(*(None,) * (len(x.shape) - len(entries)), *entries)

        return jax.tree_util.tree_map_with_path(spec, cache)  # type: ignore[no-any-return]

    def specs_of_given(self, given: GivenTokens) -> GivenTokens:
        """The partition specs of new tokens."""
        by_row = PartitionSpec(self.batch)
        by_token = PartitionSpec(None if given.starts is not None else self.batch, None, self.kv_heads)
        specs: Any = GivenTokens(by_row, by_row, by_token, by_token)  # type: ignore[arg-type]
        return jax.tree.broadcast(specs, given)  # type: ignore[no-any-return]

    def by_compiler(self, function: Callable[..., Any], out_specs: Any, *args: Any) -> Any:
        """``function(*args)`` with automatic mesh axes in place of explicit ones, which allow no gather across shards.

        The function must not close over arrays, which would have explicit axes.
        """
        names = explicit_names(self.mesh)
        if not names:
            return function(*args)
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, of_axes(spec, names)), out_specs)
        return jax.sharding.auto_axes(function, out_sharding=shardings)(*args)

    def local(self, cache: CacheType) -> CacheType:
        """A device's shard of a cache, inside a `jax.shard_map`, as a cache: see `StoredCache.first_slot`."""
        first: dict[str, Any] = {}
        if self.slots is not None:
            slots = cast("StoredCache", cache).store.slots
            first = {"first_slot": lax.axis_index(self.slots) * slots, "whole_block": slots * self.shards(self.slots)}
        return dataclasses.replace(cache, placement=None, **first)


def _not_on_a_mesh(placement: Placement | None) -> None:
    if placement is not None:
        raise ValueError(
            f"placement={placement}: jax.export can't serialise a program with a cache on a mesh, which has devices of "
            f"this process; let the program take and give jax.tree.leaves(cache)"
        )


# How a placement is serialised, see `attnops.exported`.
PLACEMENT = (_not_on_a_mesh, lambda _: None)


def sharded(create: Callable[[], CacheType], mesh: MeshLike, axis_rules: AxisRules = DEFAULT_RULES) -> CacheType:
    """A cache that is sharded over a mesh from the start: no device ever holds all of it.

    Rows, kv heads and slots have the mesh axes that the rules give `BATCH`, `KV_HEAD` and `KV_LENGTH` in the mode
    decode, as far as they divide. A `PagedCache`'s pages are sharded with its rows: tables number the pages of the
    row's shard, from 0. Of slots, those of a `DenseCache`'s rows are sharded, and those of a `PagedCache`'s pages: each
    device has a part of every page, so that all have as many tokens of a row, one table and one `PagePool` serve all
    devices, and ``page_size`` is n times the slots that a device has of a page.

    Args:
        create: makes the cache, such as ``lambda: DenseCache.create(...)``.
        mesh: the mesh; calls over the cache run on it.
        axis_rules: those of the operation's metadata.

    Returns:
        The cache with its ``placement``; its methods give caches with the same one.

    Raises:
        ValueError: a cache that can't be sharded; see also the ``create`` of its class.
    """
    shape = jax.eval_shape(create)
    if not getattr(shape, "is_stored", False):
        raise ValueError(f"create made a {type(shape).__name__}, which no mesh shards; make a DenseCache, for example")
    traced = trace(lambda: jax.tree.leaves(create()), [], CALLS)
    placement = placement_of(shape, mesh, axis_rules)
    specs, tree = jax.tree.flatten(placement.specs(dataclasses.replace(shape, placement=placement)))
    data = [placed(x, PartitionSpec(), mesh) for x in traced.constants]
    made = _compiled(traced.program, tuple(NamedSharding(mesh, spec) for spec in specs))(data)
    return jax.tree.unflatten(tree, made)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=128)
def _compiled(program: Program, shardings: tuple[NamedSharding, ...]) -> Callable[[list[Any]], list[jax.Array]]:
    """The arrays of a cache from what ``create`` closes over; equal caches share it, whatever function makes them."""
    return jax.jit(lambda data: program.run(data, bind), out_shardings=list(shardings))


def placement_of(cache: CacheType, mesh: MeshLike, axis_rules: AxisRules, *, is_made: bool = True) -> Placement:
    """The placement that rules give a cache, which may have shapes in place of arrays.

    Axes that an enclosing `jax.shard_map` uses are left out. Where the cache is not made for it, ``is_made``, pages of
    any row are in any place, and masks are bound to all slots of a row: neither pages nor slots are sharded.
    """
    if not cache.is_stored:
        return Placement(mesh, None, None, None)
    store = cast("StoredCache", cache).store
    batch, kv_heads, slots = axis_rules.spec([BATCH, KV_HEAD, KV_LENGTH], mode=MODE_DECODE)
    is_paged = cache.storage == "PagedCache"
    # A number that mesh axes divide if they divide rows and pages; of one layer among the blocks of others, 1.
    rows = 1 if store.layer is not None else math.gcd(cache.batch, store.own_blocks) if is_paged else cache.batch
    return Placement(
        mesh=mesh,
        batch=_dividing(batch, rows, mesh) if is_made or not is_paged else None,
        kv_heads=_dividing(kv_heads, cache.kv_heads, mesh),
        slots=_dividing(slots, store.slots, mesh) if cache.storage != "WindowCache" and is_made else None,
    )


def _dividing(entry: MeshAxes, size: int, mesh: MeshLike) -> MeshAxes:
    """The axes of a mesh that divide a size, without those that an enclosing `jax.shard_map` uses."""
    return dividing_axes(mesh, frozenset(name for name, n in mesh.shape.items() if n > 1) - manual_axes(), entry, size)


def pending_on_mesh(
    placement: Placement, T: int, cache: CacheType, count: jax.Array | None, rows: Rows | None
) -> tuple[CacheType, dict[str, Any]]:
    """`Cache.pending` on a mesh, where each device advances its rows.

    Returns:
        The cache after it; ``count``, ``size`` and ``starts`` of the `Pending`.
    """
    by_row = PartitionSpec(placement.batch)
    grown, fields = _on_shards(placement, T, (by_row, PartitionSpec()), cache, count, rows)
    return dataclasses.replace(cache, **grown), fields


def written_on_mesh(placement: Placement, cache: CacheType, given: GivenTokens) -> CacheType:
    """`Cache.with_tokens` on a mesh, where each device writes the tokens of its rows, heads and slots."""
    blocks = _on_shards(placement, None, (placement.specs_of_given(given),), cache, given)
    return cache.with_blocks(blocks)  # type: ignore[attr-defined,no-any-return]


def _on_shards(placement: Placement, T: int | None, specs: Any, *call: Any) -> Any:
    """What `_grown` of T tokens returns of every device's shard; or, without T, the blocks with given tokens."""
    specs = jax.tree.broadcast((placement.specs(call[0]), *specs), call)
    call = jax.tree.map(lambda x, spec: placed(x, spec, placement.mesh), call, specs)
    leaves, tree = jax.tree.flatten(specs)
    return _compiled_on_shards(placement, T, tuple(leaves), tree, call)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _compiled_on_shards(placement: Placement, T: int | None, leaves: Any, tree: Any, call: tuple[Any, ...]) -> Any:
    specs = jax.tree.unflatten(tree, leaves)
    out_specs = specs[0].store._blocks() if T is None else PartitionSpec(placement.batch)

    def function(cache: StoredCache, *given: Any) -> Any:
        return (
            placement.local(cache)._with_tokens(*given).store._blocks()
            if T is None
            else _grown(placement, T, cache, *given)
        )

    # Nothing is differentiated, and loops may have carries that don't vary as the check wants.
    where = mesh_arguments(placement.mesh)
    return jax.shard_map(function, in_specs=specs, out_specs=out_specs, check_vma=False, **where)(*call)


def _grown(placement: Placement, T: int, cache: StoredCache, count: Any, rows: Rows | None) -> Any:
    """What an append of T tokens changes of a shard by row; and ``count``, ``size`` and ``starts`` of a `Pending`."""
    shard = placement.local(cache)
    if rows is not None:
        # Rows of other devices are out of range, and their tokens are dropped as padding is.
        rows = dataclasses.replace(rows, slots=jnp.asarray(rows.slots) - first_index(placement.batch, shard.batch))
    pending = shard.grown(T, count, rows)
    changed = {name: x for name, x in pending.cache._rows().items() if name not in ("starts", "table")}
    return changed, {"count": pending.count, "size": pending.size, "starts": pending.starts}


def refusal(what: str, *reasons: Reason) -> UnsupportedError:
    """The error of what a mesh does not allow."""
    return UnsupportedError(f"{what}:" + "".join(f"\n  - {reason}" for reason in reasons), reasons)
