"""The kernel: online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over the tiles of keys of an item.

Scores are [rows, keys]: there are few rows of queries, and keys fill the lanes of vector registers. The kv heads of a
tile are computed in straight-line code, so that the compiler fills the latency of one with the next.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from attnops_tpu.caches.between import Between
from attnops_tpu.caches.chunk import Chunk, Seen
from attnops_tpu.caches.in_place import Outputs
from attnops_tpu.caches.missing import MissingPages
from attnops_tpu.caches.operands import values_of
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.references import CacheRefs, Tile
from attnops_tpu.caches.tile_sizes import LANES, ranges, reads_a_tile
from attnops_tpu.caches.transfers import Stream
from attnops_tpu.flash.tile import LOG2E, product

if TYPE_CHECKING:
    from attnops.typing import Leaf

# The maximum of no scores: finite, since exp(−inf + inf) is NaN.
LOWEST: Final = float(jnp.finfo(jnp.float32).min)
# How many of the 64 vector registers hold scores that are computed but not yet accumulated.
_AHEAD: Final = 32


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A grid step."""

    plan: CachePlan
    refs: CacheRefs  # its references
    stream: Stream  # the transfers of keys and values
    missing: MissingPages | None  # masks missing pages of a paged cache; else None
    outputs: Outputs | None  # writes outputs in place; None if a step returns a whole tile

    def run(self) -> None:
        """Compute an item, or a part of one."""
        core, step = pl.program_id(0), pl.program_id(1)
        pl.when(step == 0)(lambda: self._begin(core))
        item, part = step * self.plan.cores + core, self.refs.part
        if part is None:
            self._begin_item()
        else:
            pl.when(part.is_first)(self._begin_item)

        def body(index: jax.Array, carry: None) -> None:
            self.stream.step(item, index, self._tile)
            return carry

        lax.fori_loop(*self.stream.tiles(item), body, None)
        if part is None:
            self._end_item(item)
        else:
            pl.when(part.is_last)(lambda: self._end_item(item))

    def _begin_item(self) -> None:
        state = self.refs.state
        if self.refs.packed is not None:
            for head in range(self.plan.K):
                self.refs.packed.queries[head] = self._given(head)
        state.m[...] = jnp.full(state.m.shape, LOWEST, jnp.float32)
        for x in (state.l, state.acc):
            x[...] = jnp.zeros(x.shape, jnp.float32)
        # Transposed scores read values by row where they are.
        for source, target in zip(self.refs.by_row, state.by_row, strict=not self.plan.transposed):
            for head in range(target.shape[0]):
                target[head] = _to_rows(source[0, head : head + 1])[: self.plan.R]

    def _end_item(self, item: jax.Array) -> None:
        if self.outputs is not None:
            self.outputs.wait_for_last()
        self._finish(item)
        if self.outputs is not None:
            self.outputs.start()

    def _begin(self, core: jax.Array) -> None:
        self.stream.begin(core)
        if self.missing is not None:
            self.missing.begin()

    def _tile(self, tile: Tile, buffer: jax.Array, masked: bool, starts: list[Callable[[], None]]) -> None:
        """`_add`; before and after it, the bits of missing pages and the writes of new tokens, if there are any."""
        writer, missing = (self.stream.writer, self.missing) if masked else (None, None)
        if writer is not None:
            writer.put(tile, buffer)
        if missing is not None:
            missing.enter(tile)
        self._add(tile, buffer, masked, starts)
        if missing is not None:
            missing.leave(tile)
        if writer is not None:
            writer.finish(tile, buffer)

    def _add(self, tile: Tile, buffer: jax.Array, masked: bool, starts: list[Callable[[], None]]) -> None:
        """Add the keys and values of a tile to the state, one chunk of keys and one head at a time.

        The matrix unit works in program order: it computes the scores of the next chunks until the weights of one are
        ready.
        """
        plan = self.plan
        between = Between(starts, reads_a_tile(plan.K, plan.bk, plan.chunk))
        is_straight = not (masked or plan.is_looped)
        if is_straight or plan.bk == plan.masked_chunk or plan.bk % plan.masked_chunk:
            self._add_chunks(tile, buffer, ranges(plan.bk, plan.chunk), masked, between)
        else:
            # A loop over chunks, since queries may see few keys of the tile.
            chunk = np.int32(plan.masked_chunk)

            def body(index: jax.Array, carry: None) -> None:
                start = pl.multiple_of(index * chunk, plan.masked_chunk)
                self._add_chunks(tile, buffer, [(start, plan.masked_chunk)], masked, between)
                return carry

            first, stop = lax.div(tile.first * plan.unit, chunk), lax.div(tile.stop * plan.unit + (chunk - 1), chunk)
            lax.fori_loop(first, stop, body, None)
        between.finish()

    def _add_chunks(
        self, tile: Tile, buffer: jax.Array, chunks: Iterable[tuple[Leaf, int]], masked: bool, between: Between
    ) -> None:
        """Add chunks of a tile, (start, size)."""
        plan, ahead = self.plan, collections.deque[tuple[Chunk, jax.Array, Seen | None]]()
        lag = max(_AHEAD // (-(-plan.R // plan.sublanes) * -(-plan.chunk // LANES)), 1)
        for start, size in chunks:
            shared: tuple[jax.Array, Seen] | None = None
            for head in range(plan.K):
                chunk = Chunk(plan, self.refs, tile, buffer, head, start, size, between, slice(0, plan.R))
                if masked and (shared is None or chunk.mask_varies_by_head):
                    visible = chunk.visible()
                    # Tokens that no query of the tile sees may hold NaN, and 0 · NaN is NaN.
                    shared = visible, chunk.seen(visible)
                scores = self._scores(chunk, None if shared is None else shared[0])
                ahead.append((chunk, scores, None if shared is None else shared[1]))
                if len(ahead) > lag:
                    self._accumulate(*ahead.popleft())
        while ahead:
            self._accumulate(*ahead.popleft())

    def _scores(self, chunk: Chunk, visible: jax.Array | None) -> jax.Array:
        """The scores of a chunk, float32 [R, keys]."""
        plan = self.plan
        s = product(plan, self._queries(chunk), self._key(chunk), 1, 1)
        scale = self._scale(0, chunk)
        if scale is not None:
            s = s * scale
        if plan.scoring.has_cap_or_bias:
            s = chunk.with_cap_and_bias(s * plan.scale_residual)
        return s if visible is None else jnp.where(visible, s, -jnp.inf)

    def _accumulate(self, chunk: Chunk, s: jax.Array, seen: Seen | None) -> None:
        """Add the weights of scores, and the values times them, to the state."""
        plan, state, head = self.plan, self.refs.state, chunk.head
        c = plan.score_unit * LOG2E
        before = state.m[head]
        m = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
        weights = [jnp.exp2((some - m[:, : some.shape[1]]) * c) for some in _by_lanes(s)]
        alpha = jnp.exp2((before - m) * c)
        state.m[head] = m
        state.l[head] = alpha * state.l[head] + _sum_of_lanes(weights)
        w = jnp.concatenate(weights, axis=1)
        if plan.scales == "token_head":
            scale = self._scale(0 if plan.is_latent else 1, chunk)
            w = w * (scale if seen is None else jnp.where(seen.row, scale, 0.0))
        value = self._value(chunk)
        if seen is not None:
            value = jnp.where(seen.column, value, jnp.zeros((), value.dtype))
        added = product(plan, w.astype(plan.dtype), value, 1, 0)
        if plan.scales == "head":
            added = added * self._scale(0 if plan.is_latent else 1, chunk)
        acc = state.acc[head]
        scaled = jnp.concatenate([alpha[:, : some.shape[1]] * some for some in _by_lanes(acc)], axis=1)
        state.acc[head] = scaled + added

    def _queries(self, chunk: Chunk) -> jax.Array:
        """The queries of a chunk, [rows, key_lanes]."""
        packed = self.refs.packed
        return self.refs.query[0, chunk.head, chunk.at] if packed is None else packed.queries[chunk.head, chunk.at]

    def _given(self, head: int) -> jax.Array:
        """The packed queries of the tile for a kv head, [R, key_lanes]."""
        plan, query = self.plan, self.refs.query
        return query[:, head].reshape(plan.R, plan.key_lanes)

    def _put(self, head: int, x: jax.Array) -> None:
        """Keep the outputs [R, value_lanes] of a kv head."""
        if self.outputs is None:
            self.refs.out[0, head] = x.astype(self.refs.out.dtype)
        else:
            self.outputs.put(head, x)

    def _key(self, chunk: Chunk) -> jax.Array:
        """Keys [size, key_lanes], in the dtype of products; features beyond D are 0 in slots that were written."""
        plan = self.plan
        x = self._load(0, chunk, slice(0, plan.key_lanes))
        if not plan.values_in_key_lanes:
            return x
        # Queries have zeros there, but a value may be infinite, and 0 · inf is NaN.
        lane = lax.broadcasted_iota(jnp.int32, (1, plan.key_lanes), 1)
        return jnp.where(lane < plan.D, x, jnp.zeros((), x.dtype))

    def _value(self, chunk: Chunk) -> jax.Array:
        """Values [size, value_lanes], in the dtype of products; keys may be in front of them."""
        plan = self.plan
        array = plan.token_arrays - 1
        return self._load(array, chunk, slice(plan.value_start, plan.value_start + plan.value_lanes))

    def _load(self, array: int, chunk: Chunk, features: slice) -> jax.Array:
        ref, reads, packed = self.refs.buffers[array], [], self.plan.packed
        elements = slice(features.start // packed, features.stop // packed)
        for first, size in ranges(chunk.size, LANES if chunk.between.has_any else chunk.size):
            reads.append(ref[chunk.buffer, chunk.head, pl.ds(chunk.start + first, size), elements])
            chunk.between.go_on()
        x = reads[0] if len(reads) == 1 else jnp.concatenate(reads, axis=0)
        if packed == 2:
            bits = x.astype(jnp.int32)
            x = jnp.concatenate([bits << 28 >> 28, bits << 24 >> 28], axis=1).astype(jnp.float32)
            return x.astype(self.plan.operand)
        return _floats(x, self.plan.stored).astype(self.plan.operand)

    def _scale(self, array: int, chunk: Chunk) -> Any:
        """The scales of keys or values, [1, size] or a number; None for tokens that are stored as they are."""
        if self.plan.scales == "token_head":
            arrays = self.refs.buffers[self.plan.token_arrays :]
            return arrays[array][chunk.buffer, chunk.head : chunk.head + 1, chunk.keys]
        return self.refs.scales[array][chunk.head] if self.plan.scales else None

    def _finish(self, item: jax.Array) -> None:
        """Divide by the denominator, sinks included; queries that see no key give 0 and −inf."""
        plan, refs, unit = self.plan, self.refs, self.plan.score_unit
        sinks = values_of(plan, "sinks")
        for head in range(plan.K):
            m = refs.state.m[head] * unit
            l, acc = jnp.sum(refs.state.l[head], axis=1, keepdims=True), refs.state.acc[head]
            sees_any = l != 0  # NaN too
            factor = jnp.ones((), jnp.float32)
            if sinks:
                sink = refs.state.by_row[sinks[0].place][head]
                larger = jnp.maximum(m, sink)
                factor = jnp.exp2((m - larger) * LOG2E)
                l = l * factor + jnp.exp2((sink - larger) * LOG2E)
                m = larger
            l = jnp.broadcast_to(jnp.where(sees_any, l, 1.0), m.shape)
            scale = jnp.where(jnp.broadcast_to(sees_any, m.shape), factor / l, 0.0)
            chunks = [jnp.where(sees_any, some * scale[:, : some.shape[1]], 0.0) for some in _by_lanes(acc)]
            self._put(head, jnp.concatenate(chunks, axis=1))
            if refs.lse is not None:
                refs.lse[0, head] = jnp.where(sees_any, m + jnp.log(l), -jnp.inf)


def _floats(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _by_lanes(x: jax.Array) -> list[jax.Array]:
    """[R, n] as chunks of at most 128 lanes."""
    return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]


def _sum_of_lanes(chunks: Sequence[jax.Array]) -> jax.Array:
    """The sum of chunks [R, 128 or less], by lane, as [R, 128]; missing lanes count as 0."""
    total: jax.Array | None = None
    for chunk in chunks:
        x = chunk if chunk.shape[1] == LANES else jnp.pad(chunk, ((0, 0), (0, LANES - chunk.shape[1])))
        total = x if total is None else total + x
    assert total is not None
    return total


def _to_rows(x: jax.Array) -> jax.Array:
    """[1, n] to [n, 128], the same in all lanes."""
    return jnp.broadcast_to(x, (LANES, x.shape[1])).T
