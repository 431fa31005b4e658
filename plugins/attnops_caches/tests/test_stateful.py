"""Caches against lists of tokens, under random sequences of what can be done with them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import PagePool, Rows
from attnops_testing import oracle
from attnops_testing.cache_codec import Codec
from attnops_testing.cache_model import CacheModel, ModelLayout

B, H, K, D, T, PAGE, MOST, PAGES, WINDOW = 3, 2, 1, 4, 3, 2, 5, 9, 4
LAYOUTS = {
    "dense": ModelLayout(storage="dense", rows=B, slots=10),
    "ring": ModelLayout(storage="ring", rows=B, slots=WINDOW - 1 + T),
    "paged": ModelLayout(storage="paged", rows=B, slots=PAGE, table=((), (), ()), pages=PAGES),
}
OPERATION = OperationRegistry.create("attnops:flash", OperationMetadata(on_unsupported="error"))

counts = st.lists(st.integers(0, T), min_size=B, max_size=B)
rows = st.integers(0, B - 1)


@jax.jit
def append(cache: Any, key: Any, value: Any, lengths: Any) -> Any:
    return cache.append(key, value, lengths)


@jax.jit
def append_rows(cache: Any, key: Any, value: Any, rows: Any) -> Any:
    return cache.append(key, value, rows=rows)


@jax.jit
def step(cache: Any, query: Any, key: Any, value: Any, lengths: Any) -> Any:
    result, cache = OPERATION.step(query, key, value, cache, mask=Causal(), query_lengths=lengths)
    return result.attention_outputs, cache


read = jax.jit(lambda cache: cache.read())
reserve = jax.jit(lambda pool, lengths: pool.reserve(lengths))
truncate = jax.jit(lambda cache, lengths: cache.truncate(lengths))
reset = jax.jit(lambda cache, chosen: cache.reset(chosen))
release = jax.jit(lambda pool, chosen: pool.release(chosen))
take_rows = jax.jit(lambda cache, index: cache.take_rows(index))
copy_pages = jax.jit(lambda cache, copies: cache.copy_pages(copies))
fork = jax.jit(lambda cache, *arrays: cache.fork(*arrays))


class Machine(RuleBasedStateMachine):
    """A cache, and what it must hold.

    Attributes:
        model: the tokens of each row.
        overflowed: of each row.
        written: of a ring, one more than the largest index that was written.
        lost: of a ring, the rows whose tokens were overwritten before they were taken back.
    """

    storage: ClassVar[str]
    codec: ClassVar[Codec | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.model = CacheModel(layout=LAYOUTS[self.storage], kv_heads=K, head_dim=D, value_head_dim=D, dtype="float32",
                           codec=self.codec, window=WINDOW, max_append=T, max_pages=MOST)  # fmt: skip
        self.cache: Any = self.model.cache()
        self.rng = np.random.default_rng(0)
        self.overflowed, self.written, self.lost = [False] * B, [0] * B, [False] * B
        self.pool: Any = PagePool.create(pages=PAGES, page_size=PAGE, rows=B, max_pages=MOST)

    # What is appended to the model, and whether it fitted.
    def grow(self, row: int, key: Any, value: Any) -> None:
        for k, v in zip(key, value, strict=True):
            before = len(self.model.rows[row])
            self.model.append(row, k, v)
            self.overflowed[row] |= len(self.model.rows[row]) == before
        self.written[row] = max(self.written[row], len(self.model.rows[row]))

    def use_pool(self) -> None:
        table = tuple(tuple(page for page in row if page >= 0) for row in np.asarray(self.pool.table).tolist())
        self.model.layout = dataclasses.replace(self.model.layout, table=table)
        self.cache = self.cache.with_table(self.pool.table)

    def reserve(self, lengths: list[int], may_fail: bool) -> None:
        """Pages for the next tokens; without them, they do not fit."""
        if self.storage == "paged" and not may_fail:
            wanted = [len(row) + n for row, n in zip(self.model.rows, lengths, strict=True)]
            self.pool = reserve(self.pool, np.array(wanted, np.int32))
            self.use_pool()

    @rule(lengths=counts, unreserved=st.integers(0, 9))
    def append(self, lengths: list[int], unreserved: int) -> None:
        self.reserve(lengths, unreserved == 0)
        key, value = self.model.draw(self.rng, T)
        assert value is not None
        self.cache = append(self.cache, key, value, np.array(lengths, np.int32))
        for b in range(B):
            self.grow(b, key[b, : lengths[b]], value[b, : lengths[b]])

    @rule(order=st.permutations(range(B)), lengths=counts)
    def append_packed(self, order: list[int], lengths: list[int]) -> None:
        self.reserve([lengths[order.index(b)] for b in range(B)], False)
        key, value = (x.reshape(1, B * T, K, D) for x in self.model.draw(self.rng, T) if x is not None)
        starts = np.cumsum([0, *lengths])
        self.cache = append_rows(self.cache, key, value, Rows(starts.astype(np.int32), np.array(order, np.int32)))
        for row, first, last in zip(order, starts, starts[1:], strict=False):
            self.grow(row, key[0, first:last], value[0, first:last])

    @rule(lengths=counts)
    def step(self, lengths: list[int]) -> None:
        self.reserve(lengths, False)
        key, value = self.model.draw(self.rng, T)
        assert value is not None
        query = self.rng.uniform(-1, 1, (B, T, H, D)).astype(np.float32)
        wanted = [len(row) + n for row, n in zip(self.model.rows, lengths, strict=True)]
        out, self.cache = step(self.cache, query, key, value, np.array(lengths, np.int32))
        for b in range(B):
            self.grow(b, key[b, : lengths[b]], value[b, : lengths[b]])
            if not self.lost[b]:
                self.check_output(b, np.asarray(out[b]), query[b], wanted[b], lengths[b])

    def check_output(self, row: int, out: Any, query: Any, length: int, count: int) -> None:
        held = list(self.held(row))
        assert not out[count:].any()
        if not held:
            assert not out.any()
            return
        key, value = (np.stack(x)[None] for x in zip(*(self.model.dequantised(row, j) for j in held), strict=True))
        position = length - count + np.arange(count)[:, None]
        seen = np.array(held) <= position
        if self.storage == "ring":
            seen &= np.array(held) > position - WINDOW
        if count:
            wanted = oracle.attention(query[None, :count], key, value, mask=seen[None, None]).out
            np.testing.assert_allclose(out[:count], wanted[0], atol=1e-5)

    @rule(lengths=st.lists(st.integers(0, 12), min_size=B, max_size=B), few=st.booleans())
    def truncate(self, lengths: list[int], few: bool) -> None:
        """Mostly a few tokens, as drafts are."""
        if few:
            lengths = [max(0, len(row) - n % (T + 1)) for row, n in zip(self.model.rows, lengths, strict=True)]
        if self.storage == "paged":
            self.pool, copies = self.pool.truncate(np.minimum(lengths, np.asarray(self.pool.lengths)))
            self.cache = copy_pages(self.cache, copies)
            lengths = [n if ok else 10**6 for n, ok in zip(lengths, np.asarray(self.pool.ok), strict=True)]
        for b, n in enumerate(lengths):
            if n >= len(self.model.rows[b]):
                continue
            del self.model.rows[b][n:]
            if n == 0:
                self.written[b] = 0
            if self.storage == "ring" and max(0, n - WINDOW + 1) < self.written[b] - self.model.layout.slots:
                self.lost[b] = self.overflowed[b] = True
        self.cache = truncate(self.cache, np.array(lengths, np.int32))
        if self.storage == "paged":
            self.use_pool()

    @rule(chosen=st.lists(st.booleans(), min_size=B, max_size=B))
    def reset(self, chosen: list[bool]) -> None:
        self.cache, self.pool = reset(self.cache, np.array(chosen)), release(self.pool, np.array(chosen))
        if self.storage == "paged":
            self.use_pool()
        for b in np.flatnonzero(chosen):
            self.model.rows[b], self.overflowed[b], self.lost[b], self.written[b] = [], False, False, 0

    def copy(self, source: int, target: int) -> None:
        self.model.rows[target] = list(self.model.rows[source])
        for x in (self.overflowed, self.written, self.lost):
            x[target] = x[source]

    @precondition(lambda self: self.storage != "paged")
    @rule(source=rows, into=rows)
    def take_rows(self, source: int, into: int) -> None:
        index = np.arange(B)
        index[into] = source
        self.cache = take_rows(self.cache, index)
        self.copy(source, into)

    @precondition(lambda self: self.storage == "paged")
    @rule(source=rows, into=rows)
    def fork(self, source: int, into: int) -> None:
        if source == into:
            return
        # Pages that were reserved and not written to are given back: else both rows would write to them.
        self.pool, copies = self.pool.truncate(np.array([len(row) for row in self.model.rows], np.int32))
        self.cache = copy_pages(self.cache, copies)
        ids = np.array([source], np.int32), np.array([into], np.int32)
        self.pool, copies = self.pool.fork(*ids)
        self.cache = fork(self.cache, *ids, self.pool.table, copies)
        self.use_pool()
        self.copy(source, into)
        if not self.pool.ok[into]:  # no page for the copy of the last one: the row has none
            self.cache = reset(self.cache, np.arange(B) == into)
            self.model.rows[into], self.overflowed[into] = [], False

    def held(self, row: int) -> range:
        length = len(self.model.rows[row])
        first = self.written[row] - self.model.layout.slots if self.storage == "ring" else 0
        return range(max(0, first), length)

    @invariant()
    def holds_the_tokens_of_the_lists(self) -> None:
        keys, values, positions, held = map(np.asarray, read(self.cache))
        assert np.asarray(self.cache.overflowed).tolist() == self.overflowed
        for b in range(B):
            assert int(self.cache.lengths[b]) == len(self.model.rows[b])
            if self.lost[b]:
                continue
            slots = {int(positions[b, j]): j for j in np.flatnonzero(held[b])}
            assert sorted(slots) == list(self.held(b))
            for position, j in slots.items():
                key, value = self.model.dequantised(b, position)
                np.testing.assert_allclose(keys[b, j], key, rtol=1e-6)
                np.testing.assert_allclose(values[b, j], value, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [None, pytest.param(Codec("int8", "token_head"), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("storage", ["paged", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dense", "ring"))])
@pytest.mark.tier(every=6)
def test_a_cache_holds_what_a_list_holds(storage: str, codec: Codec | None) -> None:
    machine = type(storage, (Machine,), {"storage": storage, "codec": codec})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=20))


@pytest.mark.slow
@pytest.mark.parametrize("storage", LAYOUTS)
@pytest.mark.tier(every=3)
def test_a_cache_holds_what_a_list_holds_for_long(storage: str) -> None:
    machine = type(storage, (Machine,), {"storage": storage, "codec": Codec("float8_e4m3fn", "token_head")})
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=50))
