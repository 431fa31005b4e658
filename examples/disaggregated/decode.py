"""The process that decodes: it puts the keys and values of prompts into its pages, and decodes all rows together."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnops_caches import CacheRows

from .prefill import from_bytes

Carry = tuple[Any, Any]  # the caches of all layers and their `PagePool`


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt that was computed, and what is decoded of it."""

    length: int  # of the prompt
    max_tokens: int
    tokens: list[int]
    rows: tuple[CacheRows, ...]
    done: concurrent.futures.Future[list[int]] = dataclasses.field(default_factory=concurrent.futures.Future)


class Decode:
    """Decodes up to ``rows`` requests at a time, greedily.

    Args:
        model: the model.
        prefill: computes a prompt elsewhere, see `Prefill.__call__`.
        rows: R; further prompts are not computed before a row ends.
        pages: pages of all rows.
        max_length: the most tokens of a row.
        seconds: how long each step waits before it is computed, in place of a larger model.
    """

    def __init__(
        self,
        model: Any,
        prefill: Callable[[list[int]], bytes],
        rows: int = 4,
        pages: int = 32,
        max_length: int = 64,
        seconds: float = 0.0,
    ) -> None:
        self.prefill, self.max_length, self.seconds = prefill, max_length, seconds
        self.waiting = threading.Semaphore(rows)
        self.changed, self.queue, self.running = threading.Condition(), [], [None] * rows  # type: ignore[var-annotated]
        graph, self.state = nnx.split(model)
        self.carry: Carry = model.init_ragged_pages(
            batch_size=rows, pages=pages, page_size=8, max_model_length=max_length
        )

        def admit(carry: Carry, row: jax.Array, length: jax.Array, taken: Any) -> tuple[Carry, jax.Array]:
            """Pages for a row of ``length`` tokens in the end, and its prompt in them; whether both fit."""
            caches, pool = carry
            pool = pool.reserve(jnp.zeros(rows, jnp.int32).at[row].set(length))
            caches = tuple(c.with_table(pool.table).put(row[None], t) for c, t in zip(caches, taken, strict=True))
            return (caches, pool), pool.ok[row] & ~jnp.stack([c.overflowed[row] for c in caches]).any()

        def release(carry: Carry, given: jax.Array) -> Carry:
            caches, pool = carry
            pool = pool.release(given)
            return tuple(c.reset(given).with_table(pool.table) for c in caches), pool

        def step(state: Any, carry: Carry, tokens: jax.Array, counts: jax.Array) -> tuple[Carry, jax.Array]:
            caches, pool = carry
            out = nnx.merge(graph, state)(tokens[:, None], past_key_values=caches, query_lengths=counts)
            return (out.past_key_values, pool), out.logits[:, 0].argmax(-1)

        self._admit, self._release = jax.jit(admit, donate_argnums=0), jax.jit(release, donate_argnums=0)
        self._step = jax.jit(step, donate_argnums=1)

    def __call__(self, tokens: list[int], max_tokens: int) -> list[int]:
        """The tokens that follow a prompt, at most ``max_tokens``; from any thread."""
        if max_tokens < 1 or len(tokens) + max_tokens > self.max_length:
            raise ValueError(f"{len(tokens)} and {max_tokens} tokens must be at most {self.max_length}")
        with self.waiting:
            first, rows = from_bytes(self.prefill(tokens))
            request = Request(len(tokens), max_tokens, [first], rows)
            with self.changed:
                self.queue.append(request)
                self.changed.notify()
            return request.done.result()

    def run(self) -> None:
        """Decode for ever."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.queue or any(self.running))
            self._admit_waiting()
            counts = np.array([x is not None for x in self.running], np.int32)
            tokens = np.array([0 if x is None else x.tokens[-1] for x in self.running], np.int32)
            time.sleep(self.seconds)
            self.carry, found = self._step(self.state, self.carry, tokens, counts)
            for request, token in zip(self.running, np.asarray(found), strict=True):
                if request is not None:
                    request.tokens.append(int(token))
            self._end([x is not None and len(x.tokens) >= x.max_tokens for x in self.running])

    def _admit_waiting(self) -> None:
        while self.queue and None in self.running:
            request, row = self.queue[0], self.running.index(None)
            length = request.length + request.max_tokens
            self.carry, fits = self._admit(self.carry, jnp.int32(row), jnp.int32(length), request.rows)
            if fits:
                self.running[row] = request
                self.queue.pop(0)
                continue
            given = np.arange(len(self.running)) == row
            self.carry = self._release(self.carry, given)
            if not any(self.running):  # it fits no empty pool, so that its rows are damaged
                self.queue.pop(0).done.set_exception(ValueError("the rows of the prompt could not be put"))
            return

    def _end(self, ended: list[bool]) -> None:
        if any(ended):
            self.carry = self._release(self.carry, np.array(ended))
        for row, request in enumerate(self.running):
            if ended[row]:
                request.done.set_result(request.tokens[: request.max_tokens])
                self.running[row] = None


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """Wait; a `TimeoutError` that says ``what`` after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not happen in {seconds} s")
        time.sleep(0.05)
