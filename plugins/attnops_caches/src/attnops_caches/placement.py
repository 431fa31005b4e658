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
from attnops_caches.store import NewTokens

if TYPE_CHECKING:
    from attnops.typing import Leaf
    from attnops_caches.base import CacheType
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

    def specs_of_new(self, cache: Any, is_packed: bool) -> NewTokens:
        """The partition specs of the new tokens of a cache."""
        by_row, by_head = PartitionSpec(self.batch), PartitionSpec(self.batch, self.kv_heads)
        tokens: Any = dict.fromkeys(cache.store._blocks(), by_head)
        by_token = PartitionSpec(self.batch, None, self.kv_heads)
        given: Any = (by_token,) if cache.is_latent else (by_token, by_token)
        return NewTokens(tokens, by_row, by_row, by_row, by_row if is_packed else None, given)  # type: ignore[arg-type]

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


def append_by_shard(placement: Placement, writes: bool, *call: Any) -> tuple[Any, Any]:
    """An append on a mesh, where it is possible: each device's tokens go to its rows, heads and slots.

    Args:
        placement: how the cache is sharded.
        writes: whether the tokens are written, as `Cache.append` does; else it is `StoredCache.pending`.
        *call: the cache, and what `Cache._new` returns.

    Returns:
        The cache after it; the new tokens unless they are written.
    """
    is_packed = call[-1] is not None
    kept_whole = ("context of each row", placement.slots), ("rows", placement.batch if is_packed else None)
    for what, axes in () if writes else kept_whole:
        if axes is not None:
            reason = Reason("mesh", ", ".join(names_of(axes)), f"shards the {what}", "append them: cache.append(...)")
            raise refusal("tokens that a kernel would write", reason)
    cache, *given = jax.tree.map(lambda x, spec: placed(x, spec, placement.mesh), call, _specs(placement, call))
    grown, changed = _on_shards(placement, writes, cache, *given)
    grown |= {"store": changed} if writes else {}
    return dataclasses.replace(cache, **grown), None if writes else changed


@functools.partial(jax.jit, static_argnums=(0, 1))
def _on_shards(placement: Placement, writes: bool, *call: Any) -> Any:
    """What `_of_shard` returns of every device's shard."""
    specs = _specs(placement, call)
    changed = specs[0].store if writes else placement.specs_of_new(call[0], call[-1] is not None)
    # Nothing is differentiated, and loops may have carries that don't vary as the check wants.
    return jax.shard_map(
        functools.partial(_of_shard, placement, writes), in_specs=specs, out_specs=(_grown(specs[0]), changed),
        check_vma=False, **mesh_arguments(placement.mesh),
    )(*call)  # fmt: skip


def _specs(placement: Placement, call: tuple[Any, ...]) -> Any:
    """The specs of cache, key, value, count and rows."""
    by_token = PartitionSpec(placement.batch if call[-1] is None else None, None, placement.kv_heads)
    specs = placement.specs(call[0]), by_token, by_token, PartitionSpec(placement.batch), PartitionSpec()
    return jax.tree.broadcast(specs, call)


def _of_shard(
    placement: Placement, writes: bool, cache: StoredCache, key: Any, value: Any, count: Any, rows: Any
) -> Any:
    """What an append changes of one device's shard: by row; and its store, or if it does not write the new tokens."""
    shard = placement.local(cache)
    if rows is not None:
        # Rows of other devices are out of range, and their tokens are dropped as padding is.
        rows = dataclasses.replace(rows, slots=jnp.asarray(rows.slots) - first_index(placement.batch, shard.batch))
    if not writes:
        after, new = shard._pending(key, value, count, rows)
        return _grown(after), new
    after = shard._append(key, value, count, rows)
    return _grown(after), after.store


def _grown(cache: StoredCache) -> dict[str, Any]:
    """What an append changes of a cache, other than its store."""
    return {name: x for name, x in cache._rows().items() if name not in ("starts", "table")}


def refusal(what: str, *reasons: Reason) -> UnsupportedError:
    """The error of what a mesh does not allow."""
    return UnsupportedError(f"{what}:" + "".join(f"\n  - {reason}" for reason in reasons), reasons)
