"""Masks and biases of a call over a cache, from positions in sequences to the cache's slots.

The scores of such a call are [B, H, T, S]: T queries of each row over its S slots; or, for packed rows,
[1, H, N, B · S]: N queries over the slots of all rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from attnops.biases import Bias, RelativeBias, ScoreFn, ScoreProgram
from attnops.dispatch.binding import bind_bias
from attnops.masks.ancestors import Ancestors
from attnops.masks.at import At
from attnops.masks.base import Mask
from attnops.masks.chosen import Blocks
from attnops.masks.positions import Full
from attnops.masks.tokens import Segments
from attnops.sharding.placing import whole
from attnops_caches.masks.chosen import blocks_by_slot
from attnops_caches.masks.packed import Packed, PackedByRow
from attnops_caches.masks.slots import NO_KEY, NO_QUERY, AtSlots, Held, Slots, mapped, segments

if TYPE_CHECKING:
    from attnops.typing import Index, Leaf
    from attnops_caches.base import Cache


@dataclasses.dataclass(frozen=True)
class ScorePositions:
    """The shape of the scores of a call over a cache, and where its queries and keys are.

    Attributes:
        shape: [B, H, T, S] of masks and biases as the caller gives them; for packed rows T is N.
        q_positions: int32 [B, T], or [1, N] for packed rows; −1 for padding.
        q_rows: for packed rows, the row of the cache that each query belongs to, int32 [1, N]; else None.
        cache: the cache.
    """

    shape: tuple[int, int, int, int]
    q_positions: jax.Array
    q_rows: jax.Array | None
    cache: Cache

    @property
    def is_packed(self) -> bool:
        """Whether the rows are packed."""
        return self.q_rows is not None

    @property
    def slots_shape(self) -> tuple[int, int, int, int]:
        """The shape of the scores by slot: [B, H, T, S] or [1, H, T, B · S]."""
        B, H, T, S = self.shape
        return (1, H, T, B * S) if self.is_packed else self.shape

    @functools.cached_property
    def rows(self) -> Slots | None:
        """Where tokens lie, as values by row; None for packed rows, and where a mesh shards the slots."""
        placement = self.cache.placement
        is_sharded = placement is not None and placement.slots is not None
        return None if self.is_packed or is_sharded else self.cache.slots()

    @functools.cached_property
    def arrays(self) -> tuple[jax.Array, jax.Array]:
        """The position of each slot int32 [B, S], and whether it is held, bool [B, S]; by device."""
        position, held = self.cache.positions_by_device()
        return (whole(position), whole(held)) if self.is_packed else (position, held)

    @property
    def shards(self) -> tuple[int, int]:
        """The shards of rows and of slots that a mesh makes of packed rows' keys."""
        placement = self.cache.active_placement
        if placement is None or not self.is_packed:
            return 1, 1
        return placement.shards(placement.batch), placement.shards(placement.slots)

    def of_keys(self, x: jax.Array) -> jax.Array:
        """Values by row and slot [B, S] as those of packed rows' keys, [1, B · S], in the order of devices."""
        rows, slots = self.shards
        B, S = x.shape
        return x.reshape(rows, B // rows, slots, S // slots).swapaxes(1, 2).reshape(1, -1)

    @property
    def slot_positions(self) -> jax.Array:
        """The position of each slot, int32 [B, S] or [1, B · S]."""
        return self.of_keys(self.arrays[0]) if self.is_packed else self.arrays[0]

    def exists(self) -> Mask:
        """The mask of what exists: real queries see the tokens that their row holds."""
        if self.rows is not None:
            return Held(self.q_positions, self.rows)
        held = self.arrays[1]
        if self.q_rows is None:
            return segments(self.q_positions, held)
        q_ids = jnp.where(self.q_positions < 0, NO_QUERY, self.q_rows)
        rows = jnp.arange(self.shape[0], dtype=jnp.int32)[:, None]
        return Segments(q_ids, self.of_keys(jnp.where(held, rows, NO_KEY)))


def slot_mask(mask: Mask | None, scores: ScorePositions) -> Mask:
    """The mask of a call by slot, bound. Arrays by key of the caller's ``mask``, [..., S], are by position."""
    mask = scores.cache.mask(mask)
    exists = scores.exists()
    if not scores.is_packed:
        both = exists if mask is None else mapped(mask, functools.partial(_by_slot, scores)) & exists
        return both.bind(*scores.slots_shape)
    by_row = jnp.arange(scores.shape[0], dtype=jnp.int32)[:, None]
    rows = scores.of_keys(jnp.repeat(by_row, scores.shards[1], 1))  # each device has its own
    if mask is None:
        return Packed(Full(), exists, rows).bind(*scores.slots_shape)
    if mask.kinds() & {"Ancestors", "Blocks"}:
        raise ValueError(
            f"{mask!r} numbers the queries of each row, but rows are packed, whose queries are numbered together; give "
            f"a batch [B, T] with query_lengths"
        )
    # The scores of a batch in which each row has all N queries.
    of_rows = dataclasses.replace(scores, q_rows=None)
    batched = mapped(mask, functools.partial(_by_slot, of_rows)).bind(*scores.shape)
    if _varies(batched):
        return PackedByRow(batched, exists.bind(*scores.slots_shape), rows, scores.cache.length)  # type: ignore[arg-type]
    return Packed(mask.at(scores.q_positions, scores.slot_positions), exists, rows).bind(*scores.slots_shape)


def _by_slot(scores: ScorePositions, mask: Mask) -> Mask:
    """A caller's mask of a batch, by slot: evaluated at the slots' positions, or its arrays by key taken to slots."""
    if isinstance(mask, Blocks):
        _check_bounded(repr(mask), scores.cache)
        return blocks_by_slot(mask, scores.shape, scores.slot_positions)
    q_positions = _unpadded(scores.q_positions) if isinstance(mask, Ancestors) else scores.q_positions
    if scores.rows is not None and not isinstance(mask, Ancestors) and type(mask).__module__.startswith("attnops."):
        place: Any = jax.ShapeDtypeStruct((scores.shape[0], scores.shape[3]), jnp.int32)
        placed: Mask = mask.at(q_positions, place)
        if isinstance(placed, At) and placed.q_positions is q_positions and placed.kv_positions is place:
            return AtSlots(placed.mask, q_positions, scores.rows.without_pages())
    placed = mask.at(q_positions, scores.slot_positions)
    return _keys_by_slot(mask.bind(*scores.shape), scores) if placed is mask else placed


def _unpadded(q_positions: jax.Array) -> jax.Array:
    """Positions of queries [B, T] that count on through left padding, below 0."""
    place = jnp.arange(q_positions.shape[1], dtype=jnp.int32)
    first = jnp.where(q_positions < 0, -place.size, q_positions - place).max(1, keepdims=True)
    return first + place


def slot_bias(bias: object, scores: ScorePositions) -> Bias:
    """The bias of a call by slot, bound; see `slot_mask`."""
    if isinstance(bias, Bias) and (offset := getattr(bias, "offset", None)) is not None:
        raise ValueError(
            f"{bias!r} has offset={offset}, but over a cache the queries' positions are known: both place the queries; "
            f"leave the offset out"
        )
    bound = bind_bias(dataclasses.replace(bias, offset=0) if isinstance(bias, RelativeBias) else bias, scores.shape)  # type: ignore[type-var]
    if not isinstance(bound, Bias) and bound.shape[3] > 1:
        _check_bounded("bias", scores.cache)
    positions = scores.slot_positions if scores.rows is None else scores.rows.without_pages()
    return SlotBias(bound, scores.q_positions, positions, scores.q_rows)


@dataclasses.dataclass(frozen=True, eq=False)
class SlotBias(Bias):
    """A bias by slot of a cache. Made by `slot_bias`.

    Attributes:
        bias: by positions; bound, or an array that broadcasts to [B, H, T, S].
        q_positions: int32 [B, T], or [1, N] for packed rows; −1 for padding.
        k_positions: the position of each slot, int32 [B, S] or [1, B · S]; or `Slots`, which computes them.
        q_rows: the row of the cache that each packed query belongs to, int32 [1, N]; None for a batch.
    """

    bias: Bias | jax.Array
    q_positions: jax.Array
    k_positions: jax.Array | Slots
    q_rows: jax.Array | None

    axes: ClassVar = {"bias": "bh", "q_positions": "bt", "k_positions": "bs", "q_rows": ""}
    inner_axes: ClassVar = {"bias": "bh"}  # a bias by positions is the same for all tokens

    def apply(self, scores: jax.Array, b: Index, h: Index, q: Index, kv: Index) -> jax.Array:
        # The query's index stays for arrays; functions of positions are given its position.
        slots = self.k_positions
        k_position = slots.position(b, kv) if isinstance(slots, Slots) else _picked(slots, b, kv)
        k_position = jnp.maximum(k_position, 0)
        q_position = jnp.maximum(_picked(self.q_positions, b, q), 0)
        row = b if self.q_rows is None else jnp.maximum(_picked(self.q_rows, b, q), 0)
        if isinstance(self.bias, Bias):
            return self.bias.apply(scores, row, h, q_position, k_position)
        index = zip((row, h, q, k_position), self.bias.shape, strict=True)
        return scores + self.bias[tuple(i if size > 1 else 0 for i, size in index)].astype(jnp.float32)

    def of_tiles(self, queries: jax.Array, slots: Slots) -> SlotBias:
        """The bias of tiles of packed queries as that of a batch, see `attnops.masks.Packed.of_tiles`."""
        q_rows = None if self.q_rows is None else self.q_rows[0][queries]
        return dataclasses.replace(
            self, q_positions=self.q_positions[0][queries], k_positions=slots.without_pages(), q_rows=q_rows
        )

    def array(self, B: int, H: int, T: int, S: int) -> jax.Array | None:
        """The bias as an array float32 [B, H, T, S]; None for one that is not added, a `ScoreFn`."""
        if isinstance(self.bias, Bias) and not isinstance(self.bias, RelativeBias):
            return None
        indices = jnp.ix_(*map(jnp.arange, (B, H, T, S)))
        return self.apply(jnp.zeros((B, H, T, S), jnp.float32), *indices)

    def score_fn(self) -> Bias:
        """The same as a `ScoreFn` where it is one by position, which kernels may serve; else as it is."""
        if not isinstance(self.bias, (ScoreFn, ScoreProgram)):
            return self
        leaves, tree = jax.tree.flatten(self)

        def fn(scores: jax.Array, b: Index, h: Index, q: Index, kv: Index, *leaves: jax.Array) -> jax.Array:
            slot_bias: SlotBias = jax.tree.unflatten(tree, leaves)
            return slot_bias.apply(scores, b, h, q, kv)

        return ScoreFn(fn, tuple(leaves))

    def __repr__(self) -> str:
        return repr(self.bias) if isinstance(self.bias, Bias) else "array"


def _picked(values: jax.Array, b: Index, index: Index) -> jax.Array:
    return values[0, index] if values.shape[0] == 1 else values[b, index]


def _varies(mask: Mask) -> bool:
    """Whether a bound mask depends on batch, query or key by more than positions; `Lengths` of one row does too."""
    varies = False
    for name, letters in (mask.axes or {}).items():
        shape = getattr(getattr(mask, name, None), "shape", ())
        by_query = isinstance(mask, (At, AtSlots)) and name.endswith("_positions")
        varies |= not by_query and any(
            (size != 1 or letters == "b") and letter != "h" for size, letter in zip(shape, letters, strict=False)
        )  # fmt: skip
    return varies or mask.axes is None or any(_varies(x) for x in masks_in(mask) if not isinstance(x, Slots))


def masks_in(mask: Mask) -> list[Mask]:
    """The masks among the fields of a mask."""
    fields: tuple[Any, ...] = dataclasses.fields(mask) if dataclasses.is_dataclass(mask) else ()
    values = (getattr(mask, field.name) for field in fields)
    return [value for value in values if isinstance(value, Mask)]


def _keys_by_slot(mask: Mask, scores: ScorePositions) -> Mask:
    """A bound mask of tokens with its arrays by key position taken to slots."""
    changes: dict[str, Any] = {}
    positions = jnp.clip(scores.slot_positions, 0, scores.cache.length - 1)
    for name, letters in (mask.axes or {}).items():
        value: Leaf = getattr(mask, name, None)
        if "s" in letters and np.ndim(value) == len(letters) and np.shape(value)[letters.index("s")] > 1:
            _check_bounded(repr(mask), scores.cache)
            changes[name] = _taken(jnp.asarray(value), letters, positions)
    return dataclasses.replace(mask, **changes) if changes else mask  # type: ignore[type-var]


def _taken(value: Leaf, letters: str, positions: jax.Array) -> jax.Array:
    """``value`` with B rows along axis "b", each with its axis "s" taken at ``positions`` [B, S]."""
    axis = letters.index("s")
    B, S = positions.shape
    index = positions.reshape([B if letter == "b" else S if letter == "s" else 1 for letter in letters])
    value = jnp.broadcast_to(
        value, [B if letter == "b" else size for letter, size in zip(letters, value.shape, strict=True)]
    )
    return jnp.take_along_axis(value, index, axis=axis)


def _check_bounded(what: str, cache: Cache) -> None:
    if cache.unbounded:
        raise ValueError(
            f"{what} has an array by key, but positions in a {type(cache).__name__} of {cache.length} slots have no "
            f"limit; use a mask or bias that is computed from positions, or a DenseCache"
        )
