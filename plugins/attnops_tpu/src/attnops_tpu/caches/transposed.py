"""The kernel for items of many queries: scores are [keys, rows], so that reductions over keys cross no lanes.

It is software-pipelined over *units*, 256 rows of a kv head and a chunk of keys: in the same straight-line code, a step
computes the scores of a unit into vector memory, and adds the weights of the unit `LAG` before it, times its values, to
the state. NOTES.md has the figures.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attnops_tpu.caches.between import Between
from attnops_tpu.caches.chunk import Chunk, Seen
from attnops_tpu.caches.kernel import Kernel
from attnops_tpu.caches.operands import values_of
from attnops_tpu.caches.references import Tile
from attnops_tpu.caches.tile_sizes import LAG, LANES, SUB_KEYS, SUB_ROWS, ranges
from attnops_tpu.flash.tile import LOG2E, by_sublane, plus, product

if TYPE_CHECKING:
    from attnops.typing import Leaf


class _Part(NamedTuple):
    """Some keys of a unit: their scores are one product."""

    chunk: Chunk
    place: tuple[int, int]  # the number of the chunk of the tile, and the first key in it
    visible: jax.Array | None  # which scores are not masked; None for all
    seen: Seen | None  # which keys some query of the unit sees; None for all


class _Unit(NamedTuple):
    """A unit whose scores were computed."""

    parts: Sequence[_Part]
    buffer: int  # which of the buffers has its scores
    m: jax.Array  # [rows of a number, rows], the largest score of each row so far, with this unit's
    alpha: jax.Array  # [rows of a number, rows], the factor by which the state is rescaled to it


class _Once(dict[tuple[Any, ...], Any]):
    """Values that several units share."""

    def of(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self:
            self[key] = make()
        return self[key]


class TransposedKernel(Kernel):
    """A grid step whose scores are transposed."""

    def _add_chunks(
        self, tile: Tile, buffer: jax.Array, chunks: Iterable[tuple[Leaf, int]], masked: bool, between: Between
    ) -> None:
        """Add chunks of a tile, (start, size)."""
        plan, once, done = self.plan, _Once(), collections.deque[_Unit]()
        units = itertools.product(enumerate(chunks), range(plan.K), ranges(plan.R, SUB_ROWS))
        for number, ((i, (start, size)), head, (first, rows)) in enumerate(units):
            at, parts = slice(first, first + rows), []
            for key, n in ranges(size, SUB_KEYS):
                chunk = Chunk(plan, self.refs, tile, buffer, head, start + key, n, between, at)
                parts.append(_Part(chunk, (i, key), *self._mask(chunk, (i, key), once) if masked else (None, None)))
            self._step(parts, number % (LAG + 1), done, once)
        while done:
            self._step([], 0, done, once)

    def _mask(self, chunk: Chunk, place: tuple[int, int], once: _Once) -> tuple[jax.Array, Seen]:
        """What is visible of a part, and which of its keys some query of the tile sees.

        Parts of the same queries share the first, and all of the tile the second, unless heads have different masks.
        """
        heads = (chunk.head,) if chunk.mask_varies_by_head else ()

        def visible(first: int, rows: int) -> jax.Array:
            queries = first if heads or self.plan.N else first % self.plan.bq
            of_rows = dataclasses.replace(chunk, at=slice(first, first + rows))
            return once.of(("mask", *place, *heads, queries, rows), of_rows.visible)

        def seen() -> Seen:
            # Tokens that no query of the tile sees may hold NaN, and 0 · NaN is NaN.
            masks = {id(x): x for x in (visible(*rows) for rows in ranges(self.plan.R, SUB_ROWS))}.values()
            by_size = itertools.groupby(masks, lambda x: x.shape)
            each = [chunk.seen(functools.reduce(jnp.bitwise_or, x)).column for _, x in by_size]
            column = functools.reduce(jnp.bitwise_or, each)
            return Seen(column, column)

        return visible(chunk.at.start, chunk.rows), once.of(("seen", *place, *heads), seen)

    def _step(self, parts: Sequence[_Part], buffer: int, done: collections.deque[_Unit], once: _Once) -> None:
        """Compute the scores of a unit, which is ``parts`` and may be none, and add the oldest that is ``done``."""
        state, c, of_number = self.refs.state, self.plan.score_unit * LOG2E, self.plan.rows_of_number
        before = done.popleft() if not parts or len(done) == LAG else None
        highest: jax.Array | None = None
        total: jax.Array | None = None
        for i in range(max(len(parts), 0 if before is None else len(before.parts))):
            is_added = before is not None and i < len(before.parts)
            if before is not None and is_added:
                weights = jnp.exp2((by_sublane(of_number, self._computed(before, i)) - before.m) * c)
                total = plus(total, weights.sum(axis=0))
            if i < len(parts):
                # The matrix unit works in program order: this product fills the time until the weights are there.
                chunk, s = parts[i].chunk, self._scores_of(parts[i], once)
                self.refs.scores[buffer][i * SUB_KEYS : i * SUB_KEYS + chunk.size, : chunk.rows] = s
                most = by_sublane(of_number, s).max(axis=0)
                highest = most if highest is None else jnp.maximum(highest, most)
            if before is not None and is_added:
                chunk = before.parts[i].chunk
                added = self._added(before.parts[i], weights.reshape(chunk.size, chunk.rows), once)
                acc = state.acc[chunk.head, :, chunk.at]
                if i == 0:
                    acc = (before.alpha * by_sublane(of_number, acc)).reshape(acc.shape)
                # Accumulated in memory: as a value it would occupy half of the registers.
                state.acc[chunk.head, :, chunk.at] = acc + added
        if before is not None:
            chunk = before.parts[0].chunk
            state.l[chunk.head, :, chunk.at] = before.alpha * state.l[chunk.head, :, chunk.at] + total
        if highest is not None:
            chunk = parts[0].chunk
            m_before = state.m[chunk.head, :, chunk.at]
            m = jnp.maximum(m_before, jnp.broadcast_to(highest.max(axis=0, keepdims=True), highest.shape))
            state.m[chunk.head, :, chunk.at] = m
            done.append(_Unit(parts, buffer, m, jnp.exp2((m_before - m) * c)))

    def _computed(self, unit: _Unit, part: int) -> jax.Array:
        # At an offset of 0 that the compiler does not know: else it forwards stores to loads, and spills.
        chunk, sublanes = unit.parts[part].chunk, self.plan.sublanes
        offset = self.stream.state.zero * sublanes
        offset = (offset if self.plan.interpret else pl.multiple_of(offset, sublanes)) + part * SUB_KEYS
        return self.refs.scores[unit.buffer][pl.ds(offset, chunk.size), : chunk.rows]

    def _scores_of(self, part: _Part, once: _Once) -> jax.Array:
        """The scores of a part, float32 [size, rows]."""
        plan, chunk = self.plan, part.chunk
        key = self._shared(once, "key", part, lambda: self._key(chunk))
        s = product(plan, key, self._queries(chunk), 1, 1)
        if plan.scales:
            s = s * self._scales_of(0, part, once)
        if plan.scoring.has_cap_or_bias:
            s = chunk.with_cap_and_bias(s * plan.scale_residual)
        return s if part.visible is None else jnp.where(part.visible, s, -jnp.inf)

    def _added(self, part: _Part, w: jax.Array, once: _Once) -> jax.Array:
        """Values times weights, float32 [value_lanes, rows]."""
        plan, chunk = self.plan, part.chunk
        if plan.scales == "token_head":
            scale = self._scales_of(1, part, once)
            w = w * (scale if part.seen is None else jnp.where(part.seen.column, scale, 0.0))
        value = self._shared(once, "value", part, lambda: self._value(chunk))
        if part.seen is not None:
            value = jnp.where(part.seen.column, value, jnp.zeros((), value.dtype))
        added = product(plan, value, w.astype(plan.dtype), 0, 0)
        return added * self._scale(1, chunk) if plan.scales == "head" else added

    def _shared(self, once: _Once, name: str, part: _Part, make: Callable[[], jax.Array]) -> jax.Array:
        """What all rows of a kv head share, if loading it again would need more than loads."""
        plan = self.plan
        if plan.packed == 1 and plan.stored == plan.operand and not plan.values_in_key_lanes:
            return make()
        return once.of((name, *part.place, part.chunk.head), make)

    def _scales_of(self, array: int, part: _Part, once: _Once) -> Any:
        """The scales of keys or values, [size, rows] or a number."""
        chunk, scale = part.chunk, self._scale(array, part.chunk)
        if self.plan.scales == "head":
            return scale

        def make() -> jax.Array:
            return jnp.broadcast_to(scale, (LANES, chunk.size)).T

        column = once.of(("scale", array, *part.place, chunk.head), make)
        return jnp.concatenate([column] * -(-chunk.rows // LANES), axis=1)[:, : chunk.rows]

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
            self._put(head, out.astype(plan.out_dtype).T)
            if refs.lse is not None:
                refs.lse[0, head] = jnp.where(sees_any, m + jnp.log(l), -jnp.inf)
