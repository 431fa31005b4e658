"""The kernel's part of `attnops_tpu.caches.prompts`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops_tpu.caches.plan import CachePlan
from attnops_tpu.caches.prompts import Prompts
from attnops_tpu.caches.references import CacheRefs, PromptBuffers
from attnops_tpu.caches.write import as_words, bits_of_slots


def write_prompts(plan: CachePlan, refs: CacheRefs) -> None:
    """In the first grid step, write the new tokens of rows with several tiles of queries, if the call has any."""
    if refs.prompts is not None:
        writer = PromptWriter(plan, refs.sources, *refs.prompts)
        pl.when(pl.program_id(1) == 0)(writer.run)


@dataclasses.dataclass(frozen=True)
class PromptWriter:
    """Writes the new tokens of a call, on references."""

    plan: CachePlan
    cache: tuple[Any, ...]  # the arrays of the cache
    new: Prompts
    own: PromptBuffers

    def run(self) -> None:
        """Write all of them: of the pending chunks half are being read, and half written."""
        count, buffers = self.new.count[0], np.int32(self.own.old[0].shape[0])
        ahead = np.int32(buffers // 2)

        def write(i: jax.Array) -> None:
            following = i + ahead

            @pl.when(following < count)
            def _() -> None:
                pl.when(following >= buffers)(lambda: _wait(self._writes(following - buffers)))
                self._read(following, _start)

            self._read(i, _wait)
            for array, (tokens, old) in enumerate(zip(self.own.tokens, self.own.old, strict=True)):
                merge = self._merge_scales if array >= self.plan.token_arrays else self._merge
                merge(i, self._shift(i, array), tokens, old)
            _start(self._writes(i))

        _each(np.int32(0), jnp.minimum(count, ahead), lambda i: self._read(i, _start))
        _each(np.int32(0), count, write)
        _each(jnp.maximum(count - buffers, 0), count, lambda i: _wait(self._writes(i)))

    def _at(self, i: jax.Array) -> jax.Array:
        """The buffer of a chunk."""
        return lax.rem(i, np.int32(self.own.old[0].shape[0]))

    def _read(self, i: jax.Array, do: Callable[[Iterable[Any]], None]) -> None:
        """Start or wait for the transfers of a chunk's tokens, and, unless all are new, of what its slots hold."""
        at, arrived = self._at(i), self.own.read.at[self._at(i)]

        def tokens() -> Iterator[Any]:
            for array, (new, tokens) in enumerate(zip(self.new.tokens, self.own.tokens, strict=True)):
                source = new.at[self.new.batch[i], :, pl.ds(self._begin(i, array), tokens.shape[2])]
                yield pltpu.make_async_copy(source, tokens.at[at], arrived)

        def held() -> Iterator[Any]:
            for x, old in zip(self.cache, self.own.old, strict=True):
                yield pltpu.make_async_copy(self._slots(x, i), old.at[at], arrived)

        do(tokens())
        pl.when((self.new.first[i] > 0) | (self.new.stop[i] < self.own.old[0].shape[2]))(lambda: do(held()))

    def _begin(self, i: jax.Array, array: int) -> jax.Array:
        """The token with which the transfer of a chunk begins: the first of a group, which the first slot's is in.

        A transfer that would begin before the array begins at its first token, and one that would end after it ends at
        its last.
        """
        size, n = self.own.tokens[array].shape[2], self.new.tokens[array].shape[2]
        group = np.int32(size - self.own.old[array].shape[2])
        first = lax.div(jnp.maximum(self.new.token[i], 0), group) * group
        return pl.multiple_of(jnp.minimum(first, n - size), int(group))

    def _shift(self, i: jax.Array, array: int) -> jax.Array:
        """By how much the tokens of a transfer are moved to their slots, around its ends: the place of the first's."""
        size = np.int32(self.own.tokens[array].shape[2])
        return lax.rem(self.new.token[i] - self._begin(i, array) + size, size)

    def _writes(self, i: jax.Array) -> Iterator[Any]:
        at = self._at(i)
        for x, tokens, old in zip(self.cache, self.own.tokens, self.own.old, strict=True):
            merged = tokens.at[at, :, pl.ds(0, old.shape[2])]
            yield pltpu.make_async_copy(merged, self._slots(x, i), self.own.written.at[at])

    def _slots(self, x: Any, i: jax.Array) -> Any:
        """A chunk's slots in an array of the cache."""
        chunk = self.own.old[0].shape[2]
        return x.at[self.new.block[i], :, pl.ds(pl.multiple_of(self.new.slot[i], chunk), chunk)]

    def _merge(self, i: jax.Array, by: jax.Array, tokens: Any, old: Any) -> None:
        """Move a chunk's tokens to their slots; of slots without a new token, to what they hold."""
        at, dtype, packed, chunk = self._at(i), tokens.dtype, 4 // tokens.dtype.itemsize, old.shape[2]
        words = tokens.shape[2] // packed
        bits = lax.rem(by, np.int32(packed)) * (32 // packed)
        by = lax.rem(words - lax.div(by, np.int32(packed)), np.int32(words))
        is_new = bits_of_slots((chunk // packed, tokens.shape[3]), self.new.first[i], self.new.stop[i], packed)

        def merge(head: jax.Array) -> None:
            x = pltpu.roll(as_words(tokens[at, head]), by, 0)
            if packed > 1:
                following = pltpu.roll(x, words - 1, 0)
                x = jnp.where(bits == 0, x, lax.shift_right_logical(x, bits) | (following << (32 - bits)))
            merged = (x[: chunk // packed] & is_new) | (as_words(old[at, head]) & ~is_new)
            tokens[at, head, :chunk] = pltpu.bitcast(merged, dtype)

        _each(np.int32(0), np.int32(self.plan.K), merge)

    def _merge_scales(self, i: jax.Array, by: jax.Array, tokens: Any, old: Any) -> None:
        at, size, chunk = self._at(i), tokens.shape[2], old.shape[2]
        x = pltpu.roll(tokens[at], lax.rem(size - by, np.int32(size)), 1)[:, :chunk]
        slot = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        tokens[at, :, :chunk] = jnp.where((slot >= self.new.first[i]) & (slot < self.new.stop[i]), x, old[at])


def _each(first: Any, stop: Any, do: Callable[[jax.Array], None]) -> None:
    def body(i: jax.Array, carry: None) -> None:
        do(i)
        return carry

    lax.fori_loop(first, stop, body, None)


def _start(copies: Iterable[Any]) -> None:
    for copy in copies:
        copy.start()


def _wait(copies: Iterable[Any]) -> None:
    for copy in copies:
        copy.wait()
