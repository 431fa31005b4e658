"""Continuous batching: which tokens of which requests each step computes."""

from __future__ import annotations

import collections
import itertools
import math
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnops_caches import PageCopies, PagedCache, Quantized
from attnops_lm.generation.text import TextOfRow
from attnops_lm.memory import release_memory
from attnops_lm.serve.logprobs import TokenLogprob
from attnops_lm.serve.pages import Pages
from attnops_lm.serve.pooling import check_pooling
from attnops_lm.serve.program import StepBatch, StepResult, step_program
from attnops_lm.serve.request import Delta, Request
from attnops_lm.serve.scores import MOST_LIKELY

if TYPE_CHECKING:
    from attnops_lm.model import CausalLM
    from attnops_lm.tokenizer import Tokenizer

CONTEXT = 4  # last tokens of a prompt that are decoded together with the next token


class QueueFullError(Exception):
    """The queue of waiting requests is full."""


class StoppedError(Exception):
    """The engine has stopped."""


class Engine:
    """Continuous batching: every step is one call of the model, on all rows that have tokens to compute.

    A step has at most N tokens: one of each row that generates, then chunks of prompts. Only few programs are compiled:
    one for [R, 1] tokens, if no row has more than one, and one for each size in ``chunks``, to which packed tokens are
    padded. Everything else that differs between steps is an argument of the program. Pages are allocated as tokens
    arrive. If no page is free, the youngest request is preempted, and recomputed when there is room; its text stays the
    same.

    Args:
        model: the model; later changes of its weights have no effect.
        tokenizer: converts tokens to text.
        rows: R, the most requests that run at a time.
        pages: pages of all requests together.
        page_size: tokens per page.
        max_length: the most tokens of a request, prompt included, at most the model's context; rounded up to whole
            pages.
        chunks: sizes of packed steps, each larger than R; the largest is N.
        max_waiting: the most requests that wait; further ones raise `QueueFullError`.
        prefix_sharing: whether requests with the same first tokens share the pages of these tokens; if the model has
            linear layers, whose states are not in pages, they never do.
        codec: how keys and values are quantised; None: they are not.
        pooling: which hidden states of a text are its embedding: "last", its last token's, or "mean", the mean of all,
            for which a request shares no pages of others.

    Raises:
        ValueError: a size is not positive, a request of ``max_length`` does not fit into pages or the model's context,
            a step has no room for a prompt, or the pooling is unknown.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        *,
        rows: int = 16,
        pages: int = 512,
        page_size: int = 16,
        max_length: int = 2048,
        chunks: Sequence[int] = (64, 256),
        max_waiting: int = 256,
        prefix_sharing: bool = True,
        codec: Quantized | None = None,
        pooling: str = "last",
    ) -> None:
        check_pooling(pooling)
        _check_sizes(model.config.max_position_embeddings, rows, pages, page_size, max_length, chunks)
        width = math.ceil(max_length / page_size)  # M
        self.pooling, self.width = pooling, model.config.hidden_size
        self.tokenizer, self.rows, self.chunks, self.max_waiting = tokenizer, rows, sorted(chunks), max_waiting
        self.vocab_size, self.max_length = model.config.vocab_size, width * page_size
        self.has_head = model.config.has_head
        self.eos_ids = frozenset(tokenizer.eos_ids)
        self.pages = Pages(pages, page_size, prefix_sharing and not model.config.has_linear_layers)
        self.table = np.full((rows, width), -1, np.int32)
        # On the device: steps without grammars and penalties transfer nothing.
        self.no_grammar = jax.device_put(np.zeros((rows, math.ceil(self.vocab_size / 32)), np.uint32))
        self.none_generated = jax.device_put(np.full((rows, self.max_length), self.vocab_size, np.int32))
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []
        self.copies: list[tuple[int, int]] = []  # pages to copy before the next step
        self.counts: collections.Counter[str] = collections.Counter()  # traces, steps, preempted, ...
        self.changed = threading.Condition()
        self.is_stopped = False
        self.failure: BaseException | None = None  # the error that ended `run`, if any
        self.numbers = itertools.count()
        graph, self.state = nnx.split(model)
        self.caches, _ = model.init_ragged_pages(
            batch_size=rows, pages=pages, page_size=page_size, max_model_length=self.max_length, codec=codec
        )
        self._step = step_program(graph, rows, pooling, self._count_trace)
        self._copy = jax.jit(
            lambda caches, copies: tuple(c.copy_pages(copies) if isinstance(c, PagedCache) else c for c in caches),
            donate_argnums=0,
        )

    def _count_trace(self) -> None:
        self.counts["traces"] += 1

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none; from any thread.

        Raises:
            QueueFullError: too many wait.
            StoppedError: the engine has stopped.
            ValueError: a request can never be served, or there are more than ``max_waiting``.
        """
        if len(requests) > self.max_waiting:
            raise ValueError(
                f"{len(requests)} requests at a time must be at most max_waiting={self.max_waiting}; submit fewer"
            )
        for request in requests:
            self._check(request)
        with self.changed:
            if self.is_stopped:
                raise StoppedError("the engine has stopped")
            if len(self.waiting) + len(requests) > self.max_waiting:
                raise QueueFullError(
                    f"{len(self.waiting)} requests wait, and {len(requests)} more would be above "
                    f"max_waiting={self.max_waiting}; send them again later"
                )
            for request in requests:
                request.number, request.arrived = next(self.numbers), time.monotonic()
                request.text = TextOfRow(self.tokenizer, request.stop, request.tokens[-CONTEXT:])
                self.waiting.append(request)
            self.changed.notify_all()

    def _check(self, x: Request) -> None:
        """Raise for a request that can't be computed: an error in a step would end all requests."""
        if not 0 < len(x.tokens) <= self.max_length - x.max_tokens or x.max_tokens < 1:
            raise ValueError(
                f"{len(x.tokens)} tokens of prompt and max_tokens={x.max_tokens} must each be at least "
                f"1, and together at most max_length={self.max_length}"
            )
        if not x.embeds and not self.has_head:
            raise ValueError("the model has no head over the vocabulary: it only computes requests with embeds=True")
        if not 0 <= min(x.tokens) <= max(x.tokens) < self.vocab_size:
            raise ValueError(
                f"tokens from {min(x.tokens)} to {max(x.tokens)} must be in the vocabulary, 0 to {self.vocab_size - 1}"
            )
        if not (0 <= x.temperature < math.inf and 0 < x.top_p <= 1 and x.top_k >= 0 and 0 <= x.seed < 2**32):
            raise ValueError(
                f"temperature={x.temperature} must be finite and at least 0, top_p={x.top_p} above 0 and at most 1, "
                f"top_k={x.top_k} at least 0, seed={x.seed} from 0 to 2**32 - 1"
            )
        if not (-2 <= x.frequency_penalty <= 2 and -2 <= x.presence_penalty <= 2):
            raise ValueError(
                f"frequency_penalty={x.frequency_penalty} and presence_penalty={x.presence_penalty} must be from -2 "
                f"to 2"
            )
        if x.logprobs is not None and not (isinstance(x.logprobs, int) and 0 <= x.logprobs <= MOST_LIKELY):
            raise ValueError(f"logprobs={x.logprobs} must be an int from 0 to {MOST_LIKELY}, or None")
        if x.constraint is not None and x.ignore_eos:
            raise ValueError("ignore_eos=True must be False with a constraint, which says where the answer may end")

    def cancel(self, *requests: Request) -> None:
        """Cancel requests before the next step, such as requests of disconnected clients; from any thread."""
        for request in requests:
            request.is_cancelled = True

    def stop(self, error: str = "the server is shutting down") -> None:
        """End `run`, and all requests with an error; from any thread."""
        with self.changed:
            self.is_stopped = True
            self.changed.notify_all()
            for request in [*self.running, *self.waiting]:
                self._fail(request, error)
            self.waiting.clear()

    def _fail(self, request: Request, error: str) -> None:
        self.counts["finished_error"] += 1
        request.emit(Delta(error, finish_reason="error"))
        self._release(request)

    def run(self) -> None:
        """Step while there are requests, wait for them while there are none, until `stop`."""
        while not self.is_stopped:
            try:
                if not self.step():
                    with self.changed:
                        self.changed.wait_for(lambda: self.is_stopped or self.waiting)
            except BaseException as error:
                self.failure = error
                self.stop(f"{type(error).__name__}: {error}")  # the caches may be gone: donated, and not returned
                raise

    def warm(self) -> None:
        """Compile the programs, by steps without tokens."""
        for size in (self.rows, *self.chunks):
            self._call(self._batch({}, size))
            release_memory()  # of the compiler, before the next program needs as much
        self._copy_pages([])
        release_memory()

    def step(self) -> bool:
        """Compute one batch; False if there was nothing to compute."""
        with self.changed:
            runs = self._schedule()
        if not runs:
            return False
        if self.copies:
            self._copy_pages(self.copies)
            self.copies.clear()
        total = sum(runs.values())
        is_packed = max(runs.values()) > 1
        size = next(n for n in self.chunks if n >= total) if is_packed else self.rows
        result = self._call(self._batch(runs, size))
        self.counts.update(steps=1, tokens=total)
        with self.changed:
            for request in () if self.is_stopped else runs:
                if request.embeds:
                    self._pool(request, result)
                elif not request.pending:
                    self._advance(request, result)
        return True

    def _schedule(self) -> dict[Request, int]:
        """The number of tokens of each request that the next step computes; allocates their pages."""
        for request in [x for x in [*self.running, *self.waiting] if x.is_cancelled]:
            self.counts["cancelled"] += 1
            self._release(request)
        self.waiting = collections.deque(x for x in self.waiting if not x.is_cancelled)
        self.pages.filling.clear()
        runs: dict[Request, int] = {}
        left, preempted = self.chunks[-1], self.counts["preempted"]
        # Requests that generate come first, so that no prompt delays them.
        for request in sorted(self.running, key=lambda x: (x.pending > 1, x.number)):
            count = min(request.pending, left)
            if request.row >= 0 and count and self._grow(request, request.computed + count):
                runs[request] = count
                left -= count
        runs = {request: count for request, count in runs.items() if request.row >= 0}
        for request, count in runs.items():
            self._compute(request, count)
        while self.waiting and left and self.counts["preempted"] == preempted:
            request = self.waiting[0]
            if len(self.running) == self.rows or not self._admit(request):
                break
            self.waiting.popleft()
            count = min(request.pending, left)
            self._grow(request, request.computed + count)
            runs[request] = count
            left -= count
            self._compute(request, count)
        return runs

    def _admit(self, request: Request) -> bool:
        """Give a request a row and the shared pages of its first tokens, if there are enough pages for all its
        tokens.
        """
        size, tokens = self.pages.size, request.tokens
        # The last token is always computed, for the logits of the next.
        # Hidden states are not in pages, so that a mean needs all tokens too.
        found = [] if request.embeds and self.pooling == "mean" else tokens[:-1]
        pages, key = self.pages.find(found)
        part, count = self.pages.find_part(key, found[len(pages) * size :])
        count *= count >= size // 2  # copying a page for fewer tokens is not worth it
        held = [*pages, part] if count else pages
        for page in held:
            self.pages.hold(page)
        # One more page for each running request, so that the next step does not preempt this one.
        needed = math.ceil(len(tokens) / size) - len(pages) + len(self.running)
        if count and self.pages.available < needed:  # if ``part`` is not held, one more page may be available
            self.pages.drop(held.pop())
            count = 0
        if self.pages.available < needed:
            for page in reversed(held):
                self.pages.drop(page)
            return False
        request.row = min(set(range(self.rows)) - {x.row for x in self.running})
        self.running.append(request)
        request.pages, request.key, request.shared = list(pages), key, len(pages)
        if count:  # a page that is shared in part is copied, since this row writes the rest of it
            request.pages.append(self.pages.take())
            self.copies.append((part, request.pages[-1]))
            self.pages.drop(part)
        self.table[request.row, : len(request.pages)] = request.pages
        request.computed = request.shared * size + count
        request.cached = max(request.cached, min(request.computed, request.prompt_length))
        self.counts["shared"] += request.computed
        return True

    def _grow(self, request: Request, length: int) -> bool:
        """Allocate pages for this many tokens of a request; False if it was preempted because there are too few."""
        while len(request.pages) * self.pages.size < length:
            if not self.pages.available:
                youngest = max(self.running, key=lambda x: x.number)
                self._release(youngest)
                self.waiting.appendleft(youngest)
                self.counts["preempted"] += 1
                if youngest is request:
                    return False
                continue
            self.table[request.row, len(request.pages)] = page = self.pages.take()
            request.pages.append(page)
        return True

    def _compute(self, request: Request, count: int) -> None:
        """Count ``count`` tokens as computed by this step, and register the pages that they fill, to be shared."""
        request.computed += count
        size = self.pages.size
        for i in range(request.shared, request.computed // size):
            request.key = self.pages.register(request.key, request.tokens[i * size : (i + 1) * size], request.pages[i])
        request.shared = request.computed // size

    def _release(self, request: Request) -> None:
        """Release the row and the pages of a request."""
        if request.row < 0:
            return
        for page in reversed(request.pages):  # the end of a prefix is forgotten before its beginning
            self.pages.drop(page)
        self.table[request.row] = -1
        self.running.remove(request)
        request.row, request.computed, request.pages, request.key, request.shared = -1, 0, [], b"", 0
        request.pooled = None

    def _batch(self, runs: dict[Request, int], size: int) -> StepBatch:
        R = self.rows
        tokens = np.zeros(size, np.int32)
        by_row = [np.zeros(R, t) for t in (np.int32, np.int32, np.float32, np.int32, np.float32, np.uint32, np.int32)]
        counts, lengths, temperature, top_k, top_p, seed, index = by_row
        top_p[:] = 1
        frequency, presence, has_logprobs, has_grammar = (np.zeros(R, t) for t in (np.float32, np.float32, bool, bool))
        generated: np.ndarray | jax.Array = self.none_generated
        allowed: np.ndarray | jax.Array = self.no_grammar
        start = 0
        for x, count in sorted(runs.items(), key=lambda item: item[0].row):
            r, first = x.row, start if size > R else x.row
            tokens[first : first + count] = x.tokens[x.computed - count : x.computed]
            start, counts[r], lengths[r] = start + count, count, x.computed - count
            temperature[r], top_k[r], top_p[r], seed[r] = x.temperature, min(x.top_k, self.vocab_size), x.top_p, x.seed
            index[r], has_logprobs[r] = x.count, x.logprobs is not None
            if x.frequency_penalty or x.presence_penalty:
                frequency[r], presence[r] = x.frequency_penalty, x.presence_penalty
                if generated is self.none_generated:
                    generated = np.full((R, self.max_length), self.vocab_size, np.int32)
                generated[r, : x.count] = x.tokens[x.prompt_length :]
            if x.constraint is not None and not x.pending:
                has_grammar[r] = True
                if allowed is self.no_grammar:
                    allowed = np.zeros(self.no_grammar.shape, np.uint32)
                allowed[r] = x.constraint.allowed
        return StepBatch(
            tokens, counts, lengths, self.table.copy(), temperature, top_k, top_p, seed, index, frequency, presence,
            generated, has_logprobs, allowed, has_grammar,
        )  # fmt: skip

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        padded = np.asarray(copies + [(-1, -1)] * (self.rows - len(copies)), np.int32)
        self.caches = self._copy(self.caches, PageCopies(jnp.asarray(padded[:, 0]), jnp.asarray(padded[:, 1])))
        self.counts["copied"] += len(copies)

    def _call(self, batch: StepBatch) -> StepResult:
        results, self.caches = self._step(self.state, self.caches, batch)
        pooled = results.pooled  # stays on the device, unless a row asks for it
        results = jax.device_get(results._replace(pooled=None))._replace(pooled=pooled)
        if results.has_overflowed:
            raise RuntimeError("a token had no page, so the tables of pages are wrong")
        return results

    def _pool(self, request: Request, result: StepResult) -> None:
        """Add the hidden states of a step to a request, and emit its embedding after the last one."""
        pooled = np.asarray(result.pooled)[request.row]
        if request.pooled is None or self.pooling == "last":
            request.pooled = pooled
        else:
            request.pooled = request.pooled + pooled
        if request.pending:
            return
        length = np.linalg.norm(request.pooled.astype(np.float64))
        if not 0 < length < np.inf:
            self._fail(request, f"the pooled hidden states have length {length}, and can't be scaled to length 1")
            return
        embedding = (request.pooled / length).astype(np.float32)
        self.counts.update(prompt_tokens=request.prompt_length, finished_stop=1)
        self._release(request)
        request.emit(Delta("", "stop", embedding=embedding))

    def _advance(self, request: Request, result: StepResult) -> None:
        """Add the token that was drawn to a request, and emit the text that it adds."""
        token, start = int(result.tokens[request.row]), request.text.length
        request.tokens.append(token)
        self.counts["generation_tokens"] += 1
        if request.first is None:
            request.first = time.monotonic()
            self.counts["prompt_tokens"] += request.prompt_length
        is_end = token in self.eos_ids and not request.ignore_eos
        text = "" if is_end else request.text.push(token)
        if request.logprobs is not None and not is_end:
            sampled, ids, values = (x[request.row] for x in result.logprobs)
            likely = (np.array(x[: request.logprobs]) for x in (ids, values))  # views would keep the arrays of all rows
            request.hidden.append(TokenLogprob(token, float(sampled), start, *likely))
        is_full = request.count == request.max_tokens
        is_complete = request.ends is not None and request.ends(text)
        if request.constraint is not None and not is_end:
            request.constraint.push(token)
            is_complete, failure = is_complete or request.constraint.is_complete, request.constraint.failure
            if failure is not None and not (is_full or is_complete or request.text.stopped):
                self._fail(request, f"the answer can't be continued as its format says: {failure}")
                return
        reason = "stop" if is_end or is_complete or request.text.stopped else "length" if is_full else None
        if reason is not None:
            text += request.text.finish()
            self.counts[f"finished_{reason}"] += 1
            self._release(request)
        # Tokens after a stop string are in no answer; others are, at the latest when the text ends.
        is_whole = reason is not None and not request.text.stopped
        shown = [x for x in request.hidden if is_whole or x.start < len(request.text.text)]
        del request.hidden[: len(shown)]
        request.emit(Delta(text, reason, shown))


def _check_sizes(context: int, rows: int, pages: int, page_size: int, max_length: int, chunks: Sequence[int]) -> None:
    if min(rows, page_size, max_length) < 1:
        raise ValueError(f"rows={rows}, page_size={page_size} and max_length={max_length} must each be at least 1")
    if pages * page_size < max_length:
        raise ValueError(f"pages={pages} of {page_size} tokens must hold one request of max_length={max_length}")
    if max_length > context:
        raise ValueError(f"max_length={max_length} must be at most the model's context, {context} tokens")
    if not chunks or min(chunks) <= rows:
        raise ValueError(f"chunks={chunks} must be more than rows={rows}: prompts advance while others generate")
