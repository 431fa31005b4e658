"""The kernel for items of many queries: scores are [keys, rows], so that reductions over keys cross no lanes.

It is software-pipelined over *units*, 256 rows of a kv head and a chunk of keys: in the same straight-line code, a step
computes the scores of a unit into vector memory, and adds the weights of the unit before it, times its values, to the
state. NOTES.md has the figures.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attnops_tpu.caches.between import Between
from attnops_tpu.caches.chunk import Chunk, Seen
from attnops_tpu.caches.kernel import Kernel
from attnops_tpu.caches.missing import MissingPages
from attnops_tpu.caches.operands import values_of
from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.references import CacheRefs, Tile, as_slots
from attnops_tpu.caches.tile_sizes import LAG, SUB_KEYS, SUB_ROWS, ranges
from attnops_tpu.caches.transfers import Stream
from attnops_tpu.caches.write import Writer
from attnops_tpu.flash.tile import LOG2E, product

if TYPE_CHECKING:
    from attnops.typing import Leaf

# Scores are read at an offset of 0 that the compiler does not know: else it forwards stores to loads, and spills.
_OFFSET: Final = 8


def run_item(plan: CachePlan, refs: CacheRefs) -> None:
    """A grid step, which computes an item."""
    refs = refs._replace(block=refs.block[0], buffers=tuple(map(as_slots, refs.buffers)))
    refs.check(plan)
    writer = None if refs.new is None else Writer(plan, refs, refs.new)
    missing = None if refs.missing is None else MissingPages(plan, refs, refs.missing)
    kernel = TransposedKernel if plan.transposed else Kernel
    kernel(plan, refs, Stream(plan, refs, writer), missing).run()


class _Unit(NamedTuple):
    """A unit whose scores were computed."""

    chunks: list[tuple[Chunk, Seen | None]]  # parts of its keys, and which of them some query sees
    place: int  # which of the buffers has its scores
    m: jax.Array  # [8, rows], the largest score of each row so far, that of this unit included
    alpha: jax.Array  # [8, rows], the factor by which the state is rescaled to it


class TransposedKernel(Kernel):
    """A grid step whose scores are transposed."""

    def _add_chunks(
        self, tile: Tile, buffer: jax.Array, chunks: Iterable[tuple[Leaf, int]], masked: bool, between: Between
    ) -> None:
        """Add chunks of a tile, (start, size)."""
        plan, masks = self.plan, dict[Any, tuple[jax.Array, Seen]]()
        done = collections.deque[_Unit]()
        units = itertools.product(chunks, range(plan.K), ranges(plan.R, SUB_ROWS))
        for number, ((start, size), head, (first, rows)) in enumerate(units):
            parts = []
            for row, n in ranges(size, SUB_KEYS):
                chunk = Chunk(plan, self.refs, tile, buffer, head, start + row, n, between, slice(first, first + rows))
                parts.append((chunk, self._mask(chunk, (number, row), masks) if masked else None))
            before = done.popleft() if len(done) == LAG else None
            done.append(self._step(parts, number % (LAG + 1), before))
        for before in done:
            self._step([], 0, before)

    def _mask(
        self, chunk: Chunk, part: tuple[int, int], masks: dict[Any, tuple[jax.Array, Seen]]
    ) -> tuple[jax.Array, Seen]:
        """What is visible of a part of a unit; heads of the same queries share it."""
        plan, first = self.plan, chunk.at.start
        number, row = part
        of_chunk = number // (plan.K * len(ranges(plan.R, SUB_ROWS)))
        key = (of_chunk, row, first % plan.bq if plan.bq % SUB_ROWS == 0 else first)
        key = (*key, chunk.head, first) if chunk.mask_varies_by_head else key
        if key not in masks:
            visible = chunk.visible()
            # Tokens that no query of the part sees may hold NaN, and 0 · NaN is NaN.
            masks[key] = visible, chunk.seen(visible)
        return masks[key]

    def _step(
        self, parts: list[tuple[Chunk, tuple[jax.Array, Seen] | None]], place: int, before: _Unit | None
    ) -> _Unit | None:
        """Compute the scores of a unit, of which there may be none, and add the weights of the unit before it."""
        state, c = self.refs.state, self.plan.score_unit * LOG2E
        highest = total = None
        done: list[Any] = [] if before is None else before.chunks
        for i in range(max(len(parts), len(done))):
            if before is not None and i < len(done):
                weights = jnp.exp2((_by_sublane(self._read(before, i)) - before.m) * c)
                total = _plus(total, weights.sum(axis=0))
            if i < len(parts):
                # The matrix unit works in program order: this product fills the time until the weights are there.
                chunk, mask = parts[i]
                s = self._transposed_scores(chunk, mask)
                self.refs.scores[place][i * SUB_KEYS : i * SUB_KEYS + chunk.size, : chunk.rows] = s
                most = _by_sublane(s).max(axis=0)
                highest = most if highest is None else jnp.maximum(highest, most)
            if before is not None and i < len(done):
                chunk, seen = done[i]
                w = weights.reshape(chunk.size, chunk.rows)
                added = self._added(chunk, w, seen)
                acc = state.acc[chunk.head, :, chunk.at]
                if i == 0:
                    acc = (before.alpha * _by_sublane(acc)).reshape(acc.shape)
                # Accumulated in memory: as a value it would occupy half of the registers.
                state.acc[chunk.head, :, chunk.at] = acc + added
        if before is not None:
            chunk, _ = done[0]
            state.l[chunk.head, :, chunk.at] = before.alpha * state.l[chunk.head, :, chunk.at] + total
        if not parts:
            return None
        chunk = parts[0][0]
        m_before = state.m[chunk.head, :, chunk.at]
        m = jnp.maximum(m_before, jnp.broadcast_to(highest.max(axis=0, keepdims=True), highest.shape))
        state.m[chunk.head, :, chunk.at] = m
        alpha = jnp.exp2((m_before - m) * c)
        return _Unit([(chunk, None if mask is None else mask[1]) for chunk, mask in parts], place, m, alpha)

    def _read(self, unit: _Unit, part: int) -> jax.Array:
        chunk, start = unit.chunks[part][0], part * SUB_KEYS
        zero = self.stream.state.zero
        offset = zero * _OFFSET if self.plan.interpret else pl.multiple_of(zero * _OFFSET, _OFFSET)
        return self.refs.scores[unit.place][pl.ds(offset + start, chunk.size), : chunk.rows]

    def _transposed_scores(self, chunk: Chunk, mask: tuple[jax.Array, Seen] | None) -> jax.Array:
        """The scores of a part, float32 [size, rows]."""
        plan = self.plan
        s = product(plan, self._key(chunk), self.refs.query[0, chunk.head, chunk.at], 1, 1)
        scale = self._scale(0, chunk)
        if scale is not None:
            s = s * scale
        if plan.scoring.has_cap_or_bias:
            s = chunk.with_cap_and_bias(s * plan.scale_residual)
        return s if mask is None else jnp.where(mask[0], s, -jnp.inf)

    def _added(self, chunk: Chunk, w: jax.Array, seen: Seen | None) -> jax.Array:
        """Values times weights, float32 [value_lanes, rows]."""
        plan = self.plan
        if plan.scales == "token_head":
            scale = self._scale(1, chunk)
            w = w * (scale if seen is None else jnp.where(seen.column, scale, 0.0))
        value = self._value(chunk)
        if seen is not None:
            value = jnp.where(seen.column, value, jnp.zeros((), value.dtype))
        added = product(plan, value, w.astype(plan.dtype), 0, 0)
        return added * self._scale(1, chunk) if plan.scales == "head" else added

    def _scale(self, array: int, chunk: Chunk) -> Any:
        scale = super()._scale(array, chunk)
        return chunk.along_keys(scale) if self.plan.scales == "token_head" else scale

    def _finish(self, item: jax.Array) -> None:
        """Divide by the denominator, sinks included; queries that see no key give 0 and −inf."""
        plan, refs, unit = self.plan, self.refs, self.plan.score_unit
        sinks = values_of(plan, "sinks")
        for head in range(plan.K):
            m = refs.state.m[head, :1] * unit
            l, acc = jnp.sum(refs.state.l[head], axis=0, keepdims=True), refs.state.acc[head]
            sees_any = l != 0  # NaN too
            factor = jnp.ones((), jnp.float32)
            if sinks:
                sink = refs.by_row[sinks[0].place][0, head : head + 1, : plan.R]
                larger = jnp.maximum(m, sink)
                factor = jnp.exp2((m - larger) * LOG2E)
                l = l * factor + jnp.exp2((sink - larger) * LOG2E)
                m = larger
            l = jnp.where(sees_any, l, 1.0)
            out = jnp.where(sees_any, acc * (factor / l), 0.0)
            refs.out[0, head] = out.T.astype(refs.out.dtype)
            if refs.lse is not None:
                refs.lse[0, head] = jnp.where(sees_any, m + jnp.log(l), -jnp.inf)


def _by_sublane(x: jax.Array) -> jax.Array:
    """[n, rows] to [n / 8, 8, rows]: reductions along the first axis then need one register at a time."""
    return x.reshape(-1, 8, x.shape[1])


def _plus(total: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if total is None else total + x
