"""A server in one file: requests join and leave a batch between steps, over pages, in the API of OpenAI's clients.

``python -m examples.causal_lm.serve --help``. From below: `Pages`, the bookkeeping of pages; `Engine`, which forms a
batch for every step; `application`, the HTTP endpoints.

Dimensions: `R` rows, the requests that run at a time; `M` pages a row; `N` tokens a step; `V` vocabulary.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jinja2
import numpy as np
import uvicorn
from flax import nnx
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from attnops.caches import PageCopies, Quantized, Rows

from .generation.sampling import Sampling, sample
from .generation.text import TextOfRow

if TYPE_CHECKING:
    from .model import CausalLM
    from .tokenizer import Tokenizer

CONTEXT = 4  # last tokens of a prompt, after which the text of the next is looked for

# --- Requests and their text ------------------------------------------------------------------------------------------


class Delta(NamedTuple):
    """What a step adds to a request."""

    text: str
    finish_reason: str | None = None  # "stop", "length", "error"


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt to be continued, and how far it is.

    Attributes:
        tokens: the prompt's, followed by those that were generated.
        emit: called with every `Delta`, from the engine's thread.
        top_k: of how many tokens one is drawn; 0: of all.
        computed: how many tokens have their keys and values in ``pages``.
        key: of the prefix that the first ``shared`` pages hold.
    """

    tokens: list[int]
    max_tokens: int
    emit: Callable[[Delta], object] = lambda delta: None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    row: int = -1
    number: int = -1
    computed: int = 0
    cached: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    key: bytes = b""
    shared: int = 0
    text: TextOfRow = dataclasses.field(init=False)
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens without keys and values: those of the prompt, or the last one that was generated."""
        return len(self.tokens) - self.computed


# --- Pages ------------------------------------------------------------------------------------------------------------


class Pages:
    """Which pages are free, how many rows hold each, and which prefix each has.

    On the host, in place of `attnops.caches.PagePool` on the device: these numbers decide before every step which
    requests run, and reading them from the device would wait for it. The key of a full page is a hash of all tokens up
    to its end. Pages that no row holds keep their contents until they are taken.
    """

    def __init__(self, count: int, size: int, sharing: bool = True) -> None:
        self.count, self.size, self.sharing = count, size, sharing
        self.references = [0] * count
        self.free = list(range(count - 1, -1, -1))
        self.unused: dict[int, None] = {}  # held by no row, but with a key; least recently used first
        self.page_of: dict[bytes, int] = {}
        self.content: dict[int, tuple[bytes, bytes, list[int]]] = {}  # page -> key of the pages before, key, tokens
        self.filling: set[int] = set()  # pages that become full in this step
        self.after: dict[bytes, dict[int, None]] = collections.defaultdict(dict)  # key -> pages that come next

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return len(self.free) + len(self.unused)

    def take(self) -> int:
        """A page for one row; there must be one."""
        if not self.free:
            page = next(iter(self.unused))
            del self.unused[page]
            before, key, _ = self.content.pop(page)
            del self.page_of[key], self.after[before][page]
            if not self.after[before]:
                del self.after[before]
            self.free.append(page)
        page = self.free.pop()
        self.references[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more row holds a page."""
        self.references[page] += 1
        self.unused.pop(page, None)

    def drop(self, page: int) -> None:
        """One row less holds a page."""
        self.references[page] -= 1
        if not self.references[page]:
            if page in self.content:
                self.unused[page] = None
            else:
                self.free.append(page)

    def name(self, before: bytes, tokens: list[int], page: int) -> bytes:
        """The key of a page that is now full; of pages with equal keys the first is found by it."""
        key = _key(before, tokens)
        self.filling.add(page)
        if self.sharing and key not in self.page_of:
            self.page_of[key], self.content[page] = page, (before, key, tokens)
            self.after[before][page] = None
        return key

    def find(self, tokens: list[int]) -> tuple[list[int], bytes]:
        """Full pages that have the first of these tokens, and the key of the last."""
        pages, key = [], b""
        for i in range(len(tokens) // self.size):
            longer = _key(key, tokens[i * self.size : (i + 1) * self.size])
            if longer not in self.page_of:
                break
            key = longer
            pages.append(self.page_of[key])
        return pages, key

    def find_part(self, key: bytes, tokens: list[int]) -> tuple[int, int]:
        """The page after ``key`` that begins with most of these tokens, and with how many.

        A page can be shared whole in the step that fills it, which appends all tokens before any attends; but not
        copied, since copies are made before.
        """
        pages = [page for page in self.after.get(key, ()) if page not in self.filling]
        found = ((_common(self.content[page][2], tokens), page) for page in pages)
        count, page = max(found, default=(0, -1))
        return page, count


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _key(before: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(before + np.asarray(tokens, np.int32).tobytes()).digest()


# --- The engine -------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """What one step computes; arrays by row have R entries, and a row that does nothing has count 0."""

    tokens: Any  # int32 [N], packed; [R] where each row has one
    counts: Any  # int32 [R], tokens a row
    lengths: Any  # int32 [R], tokens that the row's pages hold already
    table: Any  # int32 [R, M]
    temperature: Any  # float32 [R]; 0 is greedy
    top_k: Any  # int32 [R]
    top_p: Any  # float32 [R]
    seed: Any  # uint32 [R]
    index: Any  # int32 [R], of the token among those generated


class QueueFullError(Exception):
    """As many requests wait as may."""


class StoppedError(Exception):
    """The engine does not run any more."""


class Engine:
    """Continuous batching: every step is one call of the model, on whichever rows have tokens to compute.

    A step has at most N tokens: one of each row that generates, and for the rest chunks of prompts. It is one of few
    programs: [R, 1] if no row has more than one token, else packed tokens, of the least size that holds them. What
    differs between steps is data. Pages are taken as tokens come; if there is none, the youngest request is put back,
    and computed again when there is room: its text is the same.

    Args:
        model: its weights are read here, once.
        tokenizer: for the text of tokens.
        rows: R, requests that run at a time.
        pages: pages of all requests together.
        page_size: tokens a page.
        max_length: most tokens of a request, prompt included, at most the model's context; rounded up to whole pages.
        chunks: sizes of packed steps, each larger than R; the largest is N.
        max_waiting: most requests that wait; more are a `QueueFullError`.
        prefix_sharing: whether requests with the same first tokens share the pages of them.
        codec: how keys and values are stored; None: as they are.

    Raises:
        ValueError: a size is not positive, a request of ``max_length`` does not fit into pages or the model's context,
            or a step has no room for a prompt.
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
    ) -> None:
        _check_sizes(model.config.max_position_embeddings, rows, pages, page_size, max_length, chunks)
        width = math.ceil(max_length / page_size)  # M
        self.tokenizer, self.rows, self.chunks, self.max_waiting = tokenizer, rows, sorted(chunks), max_waiting
        self.vocab_size, self.max_length = model.config.vocab_size, width * page_size
        self.eos_ids = frozenset(tokenizer.eos_ids)
        self.pages = Pages(pages, page_size, prefix_sharing)
        self.table = np.full((rows, width), -1, np.int32)
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []
        self.copies: list[tuple[int, int]] = []  # pages to copy before the next step
        self.counts: collections.Counter[str] = collections.Counter()  # traces, steps, preempted, copied, ...
        self.changed = threading.Condition()
        self.is_stopped = False
        self.numbers = itertools.count()
        graph, self.state = nnx.split(model)
        self.caches, _ = model.init_ragged_pages(
            batch_size=rows, pages=pages, page_size=page_size, max_model_length=self.max_length, codec=codec
        )

        def step(state: Any, caches: Any, batch: Batch) -> tuple[Any, Any]:
            self.counts["traces"] += 1
            # Lengths and table are the host's; the device keeps the tokens.
            caches = tuple(dataclasses.replace(c.with_table(batch.table), lengths=batch.lengths) for c in caches)
            ends = jnp.cumsum(batch.counts)
            if batch.tokens.shape[0] > rows:
                slots = jnp.arange(rows, dtype=jnp.int32)
                given: dict[str, Any] = {"rows": Rows(jnp.concatenate([jnp.zeros(1, ends.dtype), ends]), slots)}
                tokens, last = batch.tokens[None], jnp.maximum(ends - 1, 0)[None]
            else:
                given = {"query_lengths": batch.counts}
                tokens, last = batch.tokens[:, None], jnp.zeros((rows, 1), jnp.int32)
            out = nnx.merge(graph, state)(tokens, past_key_values=caches, logits_at=last, **given)
            keys = jax.vmap(lambda seed, i: jax.random.fold_in(jax.random.key(seed), i))(batch.seed, batch.index)
            sampling = Sampling(batch.temperature, batch.top_k, batch.top_p, jnp.zeros(rows))
            tokens = sample(out.logits.reshape(rows, -1), keys, sampling)
            assert out.past_key_values is not None
            return (tokens, out.past_key_values[0].overflowed.any()), out.past_key_values

        self._step = jax.jit(step, donate_argnums=1)
        self._copy = jax.jit(lambda caches, copies: tuple(c.copy_pages(copies) for c in caches), donate_argnums=0)

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none; from any thread.

        Raises:
            QueueFullError: too many wait.
            StoppedError: the engine has stopped.
            ValueError: one can never be served.
        """
        for request in requests:
            self._check(request)
        with self.changed:
            if self.is_stopped:
                raise StoppedError("the engine has stopped")
            if len(self.waiting) + len(requests) > self.max_waiting:
                raise QueueFullError(f"{len(self.waiting)} requests wait, and at most {self.max_waiting} may")
            for request in requests:
                request.number = next(self.numbers)
                request.text = TextOfRow(self.tokenizer, request.stop, request.tokens[-CONTEXT:])
                self.waiting.append(request)
            self.changed.notify_all()

    def _check(self, x: Request) -> None:
        """Raise for what can't be computed: an error in a step would end all requests."""
        if not 0 < len(x.tokens) <= self.max_length - x.max_tokens or x.max_tokens < 1:
            raise ValueError(
                f"{len(x.tokens)} tokens of prompt and max_tokens={x.max_tokens} must each be at least "
                f"1, and together at most max_length={self.max_length}"
            )
        if not 0 <= min(x.tokens) <= max(x.tokens) < self.vocab_size:
            raise ValueError(
                f"tokens from {min(x.tokens)} to {max(x.tokens)} must be of the vocabulary, 0 to {self.vocab_size - 1}"
            )
        if not (0 <= x.temperature < math.inf and 0 < x.top_p <= 1 and x.top_k >= 0 and 0 <= x.seed < 2**32):
            raise ValueError(
                f"temperature={x.temperature} must be finite and at least 0, top_p={x.top_p} above 0 and at most 1, "
                f"top_k={x.top_k} at least 0, seed={x.seed} from 0 to 2**32 - 1"
            )

    def cancel(self, *requests: Request) -> None:
        """Give up requests, such as those whose client has gone, before the next step; from any thread."""
        for request in requests:
            request.is_cancelled = True

    def stop(self, error: str = "the server is shutting down") -> None:
        """End `run`, and all requests with an error; from any thread."""
        with self.changed:
            self.is_stopped = True
            self.changed.notify_all()
            for request in [*self.running, *self.waiting]:
                request.emit(Delta(error, finish_reason="error"))
                self._release(request)
            self.waiting.clear()

    def run(self) -> None:
        """Step while there are requests, wait for them while there are none, until `stop`."""
        while not self.is_stopped:
            try:
                if not self.step():
                    with self.changed:
                        self.changed.wait_for(lambda: self.is_stopped or self.waiting)
            except Exception as error:
                self.stop(f"{type(error).__name__}: {error}")  # the caches may be gone: donated, and not returned
                raise

    def warm(self) -> None:
        """Compile the programs, by steps without tokens."""
        for size in (self.rows, *self.chunks):
            self._call(self._batch({}, size))
        self._copy_pages([])

    def step(self) -> bool:
        """Compute one batch. False: there was nothing to compute."""
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
        tokens = self._call(self._batch(runs, size))
        self.counts.update(steps=1, tokens=total)
        with self.changed:
            for request in runs:
                if not request.pending and not self.is_stopped:
                    self._advance(request, int(tokens[request.row]))
        return True

    def _schedule(self) -> dict[Request, int]:
        """How many tokens of which requests the next step computes; their pages are taken."""
        for request in [x for x in [*self.running, *self.waiting] if x.is_cancelled]:
            self.counts["cancelled"] += 1
            self._release(request)
        self.waiting = collections.deque(x for x in self.waiting if not x.is_cancelled)
        self.pages.filling.clear()
        runs: dict[Request, int] = {}
        left, preempted = self.chunks[-1], self.counts["preempted"]
        # Those that generate come first, so that no prompt delays them.
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
        """Give a request a row and the pages that have its first tokens, if there are pages for all its tokens."""
        size, tokens = self.pages.size, request.tokens
        # The last token is computed in any case, for the logits of the next.
        pages, key = self.pages.find(tokens[:-1])
        part, count = self.pages.find_part(key, tokens[len(pages) * size : -1])
        count *= count >= size // 2  # a copy for fewer is not worth it
        held = [*pages, part] if count else pages
        for page in held:
            self.pages.hold(page)
        # And a page for each that runs, so that the next step does not put it back.
        needed = math.ceil(len(tokens) / size) - len(pages) + len(self.running)
        if count and self.pages.available < needed:  # the page to copy from may be one of these
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
        """Pages for this many tokens of a request; False if it was put back for the want of them."""
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
        """The step will compute ``count`` tokens; the pages that this fills get their keys."""
        request.computed += count
        size = self.pages.size
        for i in range(request.shared, request.computed // size):
            request.key = self.pages.name(request.key, request.tokens[i * size : (i + 1) * size], request.pages[i])
        request.shared = request.computed // size

    def _release(self, request: Request) -> None:
        """Take its row and pages from a request."""
        if request.row < 0:
            return
        for page in reversed(request.pages):  # the end of a prefix is forgotten before its beginning
            self.pages.drop(page)
        self.table[request.row] = -1
        self.running.remove(request)
        request.row, request.computed, request.pages, request.key, request.shared = -1, 0, [], b"", 0

    def _batch(self, runs: dict[Request, int], size: int) -> Batch:
        R = self.rows
        tokens = np.zeros(size, np.int32)
        by_row = [np.zeros(R, t) for t in (np.int32, np.int32, np.float32, np.int32, np.float32, np.uint32, np.int32)]
        counts, lengths, temperature, top_k, top_p, seed, index = by_row
        top_p[:] = 1
        start = 0
        for x, count in sorted(runs.items(), key=lambda item: item[0].row):
            r, first = x.row, start if size > R else x.row
            tokens[first : first + count] = x.tokens[x.computed - count : x.computed]
            start, counts[r], lengths[r] = start + count, count, x.computed - count
            temperature[r], top_k[r], top_p[r], seed[r] = x.temperature, min(x.top_k, self.vocab_size), x.top_p, x.seed
            index[r] = len(x.tokens) - x.prompt_length
        return Batch(tokens, counts, lengths, self.table, temperature, top_k, top_p, seed, index)

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        padded = np.asarray(copies + [(-1, -1)] * (self.rows - len(copies)), np.int32)
        self.caches = self._copy(self.caches, PageCopies(jnp.asarray(padded[:, 0]), jnp.asarray(padded[:, 1])))
        self.counts["copied"] += len(copies)

    def _call(self, batch: Batch) -> np.ndarray:
        results, self.caches = self._step(self.state, self.caches, batch)
        tokens: np.ndarray
        tokens, has_overflowed = jax.device_get(results)
        if has_overflowed:
            raise RuntimeError("a token had no page, so the tables of pages are wrong")
        return tokens

    def _advance(self, request: Request, token: int) -> None:
        """Add a token to a request, and what it adds to its text."""
        request.tokens.append(token)
        is_end = token in self.eos_ids and not request.ignore_eos
        text = "" if is_end else request.text.push(token)
        is_full = len(request.tokens) - request.prompt_length == request.max_tokens
        reason = "stop" if is_end or request.text.stopped else "length" if is_full else None
        if reason is not None:
            text += request.text.finish()
            self._release(request)
        request.emit(Delta(text, reason))


def _check_sizes(context: int, rows: int, pages: int, page_size: int, max_length: int, chunks: Sequence[int]) -> None:
    if min(rows, page_size, max_length) < 1:
        raise ValueError(f"rows={rows}, page_size={page_size} and max_length={max_length} must each be at least 1")
    if pages * page_size < max_length:
        raise ValueError(f"pages={pages} of {page_size} tokens must hold one request of max_length={max_length}")
    if max_length > context:
        raise ValueError(f"max_length={max_length} must be at most the model's context, {context} tokens")
    if not chunks or min(chunks) <= rows:
        raise ValueError(f"chunks={chunks} must be more than rows={rows}: prompts advance while others generate")


# --- The endpoints ----------------------------------------------------------------------------------------------------

Stop = Annotated[str, Field(min_length=1)]
One = Annotated[int, Field(ge=1, le=1)]
Nothing = Annotated[float, Field(ge=0, le=0)]  # options of that API that are not served


class Strict(BaseModel):
    """JSON whose fields have exactly these types, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """Whether the last event of a stream has the numbers of tokens."""

    include_usage: bool = False


class Part(Strict):
    """A part of a turn's content; images and sound are not served."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[Part], Field(min_length=1)]

    def for_template(self) -> dict[str, str]:
        """With the content as one text, a line a part."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


class TextFormat(Strict):
    """The format of an answer: text; JSON by a schema is not served."""

    type: Literal["text"]


class Body(Strict):
    """What both endpoints take; of an option that is not served, the value that asks for nothing."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: One | None = 1
    frequency_penalty: Nothing | None = None
    presence_penalty: Nothing | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: str | None = None


class CompletionBody(Body):
    """``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: Literal[False] | None = None
    best_of: One | None = None
    logprobs: None = None
    suffix: None = None


class ChatBody(Body):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    tools: Annotated[list[object], Field(max_length=0)] | None = None
    response_format: TextFormat | None = None


class APIError(Exception):
    """An error in that API's format."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status = status
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @classmethod
    def of_body(cls, error: ValidationError) -> APIError:
        """The first of what is wrong in a body, with the name of the field."""

        def name(loc: tuple[int | str, ...]) -> str | None:  # without the types that were tried, such as list[int]
            path = itertools.takewhile(lambda x: isinstance(x, int) or (x.isidentifier() and x != "str"), loc)
            return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in path).lstrip(".") or None

        errors = error.errors()
        *parents, last = errors[0]["loc"] or ("",)
        param = name(errors[0]["loc"])
        if errors[0]["type"] == "extra_forbidden":  # whatever the client calls it
            param = f"{name(tuple(parents)) or ''}.{last}".lstrip(".")
            return cls(400, f"{param}: no such field", param, errors[0]["type"])
        message = ", or ".join(dict.fromkeys(x["msg"] for x in errors if name(x["loc"]) == param))
        return cls(400, f"{param}: {message}" if param else message, param, errors[0]["type"])


class Server:
    """The endpoints of an engine."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name, self.started = engine, name, int(time.time())
        self.thread = threading.Thread(target=engine.run, name="engine", daemon=True)

    async def health(self, _: HTTPRequest) -> Response:
        """Whether the engine runs, and how full it is."""
        engine = self.engine
        is_up = self.thread.is_alive() and not engine.is_stopped
        content = {
            "status": "ok" if is_up else "stopped", "running": len(engine.running), "waiting": len(engine.waiting),
            "pages": engine.pages.count, "pages_free": engine.pages.available, **engine.counts,
        }  # fmt: skip
        return JSONResponse(content, 200 if is_up else 503)

    async def models(self, _: HTTPRequest) -> Response:
        """The one model."""
        model = {"id": self.name, "object": "model", "created": self.started, "owned_by": "attnops"}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, http: HTTPRequest) -> Response:
        """Continue a prompt, or several."""
        body = await self._body(http, CompletionBody)
        prompt, encode = body.prompt, functools.partial(self.engine.tokenizer.encode, add_special_tokens=True)
        if isinstance(prompt, str):
            prompts = [encode(prompt)]
        elif prompt and isinstance(prompt[0], int):
            prompts = [prompt]
        else:
            prompts = [encode(x) if isinstance(x, str) else x for x in prompt]
        if not prompts or not all(prompts):
            raise APIError(400, "prompt: it has no tokens", "prompt")
        if not all(0 <= token < self.engine.vocab_size for x in prompts for token in x):
            raise APIError(400, f"prompt: token ids must be from 0 to {self.engine.vocab_size - 1}", "prompt")
        requests = [self._request(body, x, "prompt", body.max_tokens or 16) for x in prompts]
        return await self._respond(http, body, requests)

    async def chat(self, http: HTTPRequest) -> Response:
        """Answer a conversation."""
        body = await self._body(http, ChatBody)
        try:
            text = self.engine.tokenizer.chat([x.for_template() for x in body.messages])
        except (ValueError, jinja2.TemplateError) as error:  # such as roles that do not alternate
            raise APIError(400, f"messages: {error}", "messages") from None
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            message = "max_tokens: it is the old name of max_completion_tokens, which is given too; leave one out"
            raise APIError(400, message, "max_tokens")
        tokens = self.engine.tokenizer.encode(text)
        if not tokens:
            raise APIError(400, "messages: they have no tokens", "messages")
        most = body.max_completion_tokens or body.max_tokens or max(self.engine.max_length - len(tokens), 1)
        request = self._request(body, tokens, "messages", most)
        return await self._respond(http, body, [request])

    async def _body(self, http: HTTPRequest, kind: type[Any]) -> Any:
        try:
            body = kind.model_validate_json(await http.body())
        except ValidationError as error:
            raise APIError.of_body(error) from None
        if body.model != self.name:
            raise APIError(404, f"model: {body.model!r} is not served, but {self.name!r}", "model", "model_not_found")
        if body.stream_options is not None and not body.stream:
            raise APIError(400, "stream_options: it is for stream=true alone", "stream_options")
        return body

    def _request(self, body: Body, tokens: list[int], param: str, max_tokens: int) -> Request:
        most = self.engine.max_length
        if len(tokens) + max_tokens > most:
            name = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) else "max_tokens"
            field = param if len(tokens) >= most else name
            message = f"{field}: {len(tokens)} tokens of {param} and {name}={max_tokens} are more than {most}"
            raise APIError(400, message, field, "context_length_exceeded")
        seed = secrets.randbits(32) if body.seed is None else body.seed % 2**32
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return Request(
            list(tokens), max_tokens, temperature=body.temperature or 0.0, top_k=body.top_k,
            top_p=1.0 if body.top_p is None else body.top_p, seed=seed, stop=stop, ignore_eos=body.ignore_eos,
        )  # fmt: skip

    async def _respond(self, http: HTTPRequest, body: Body, requests: list[Request]) -> Response:
        queue: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(index: int, delta: Delta) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, (index, delta))

        for i, request in enumerate(requests):
            request.emit = functools.partial(emit, i)
        try:
            self.engine.submit(*requests)
        except QueueFullError as error:
            raise APIError(429, str(error), code="queue_full") from None
        except StoppedError as error:
            raise APIError(503, str(error), code="stopped") from None
        except ValueError as error:
            raise APIError(400, str(error)) from None
        answer = Answer(self, body, requests, queue)
        if body.stream:
            return Events(answer)
        try:
            return await answer.whole(http)
        finally:
            self.engine.cancel(*requests)


class Answer:
    """What becomes of the requests of one call, in the format of its endpoint."""

    def __init__(self, server: Server, body: Body, requests: list[Request], queue: asyncio.Queue[Any]) -> None:
        self.server, self.body, self.requests, self.queue = server, body, requests, queue
        self.is_chat = isinstance(body, ChatBody)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Every delta, with the number of its request."""
        left = len(self.requests)
        while left:
            i, delta = await self.queue.get()
            if delta.finish_reason == "error":
                raise APIError(500, delta.text)
            left -= delta.finish_reason is not None
            yield i, delta

    async def whole(self, http: HTTPRequest) -> Response:
        """The whole text in one response; given up if the client goes."""
        parts: list[list[Delta]] = [[] for _ in self.requests]

        async def collect() -> None:
            async for i, delta in self.deltas():
                parts[i].append(delta)

        async def gone() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.ensure_future(x) for x in (collect(), gone())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                return Response(status_code=499)
            tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
        choices = [self.choice(i, deltas, False) for i, deltas in enumerate(parts)]
        return JSONResponse(self.envelope(choices, False) | {"usage": self.usage()})

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events of the deltas."""
        has_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        empty = {"usage": None} if has_usage else {}
        try:
            if self.is_chat:
                yield _event(self.envelope([self.choice(0, [Delta("")], True, is_first=True)], True) | empty)
            async for i, delta in self.deltas():
                if delta.text or delta.finish_reason:
                    yield _event(self.envelope([self.choice(i, [delta], True)], True) | empty)
            if has_usage:
                yield _event(self.envelope([], True) | {"usage": self.usage()})
            yield "data: [DONE]\n\n"
        except APIError as error:
            yield _event(error.content)

    def envelope(self, choices: list[Any], is_part: bool) -> dict[str, Any]:
        """What is around the choices."""
        kind = f"chat.completion{'.chunk' * is_part}" if self.is_chat else "text_completion"
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.server.name, "choices": choices
        }  # fmt: skip

    def choice(self, i: int, deltas: list[Delta], is_part: bool, is_first: bool = False) -> dict[str, Any]:
        """Deltas of request i, joined."""
        text = "".join(x.text for x in deltas)
        choice = {"index": i, "finish_reason": deltas[-1].finish_reason, "logprobs": None}
        if not self.is_chat:
            return choice | {"text": text}
        if not is_part:
            return choice | {"message": {"role": "assistant", "content": text}}
        delta = {"role": "assistant", "content": ""} if is_first else {"content": text} if text else {}
        return choice | {"delta": delta}

    def usage(self) -> dict[str, Any]:
        """How many tokens there were."""
        prompt = sum(x.prompt_length for x in self.requests)
        total = sum(len(x.tokens) for x in self.requests)
        cached = sum(x.cached for x in self.requests)
        return {
            "prompt_tokens": prompt, "completion_tokens": total - prompt, "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip


class Events(StreamingResponse):
    """A stream whose requests are given up when it ends, for whatever reason."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.server.engine.cancel(*self.answer.requests)


def _event(content: dict[str, Any]) -> str:
    return f"data: {JSONResponse(content).body.decode()}\n\n"  # type: ignore[union-attr]


def application(engine: Engine, name: str) -> Starlette:
    """The ASGI application, which runs the engine in a thread while it is up."""
    server = Server(engine, name)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        server.thread.start()
        yield
        engine.stop()
        await asyncio.to_thread(server.thread.join)

    async def refuse(_: HTTPRequest, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = APIError(error.status_code, error.detail)
        assert isinstance(error, APIError)
        return JSONResponse(error.content, error.status)

    routes = [
        Route("/health", server.health),
        Route("/v1/models", server.models),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={APIError: refuse, HTTPException: refuse}, lifespan=lifespan)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve SmolLM2-135M-Instruct, or a checkpoint."""
    parser = argparse.ArgumentParser(prog="serve", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint", help="a directory in Hugging Face's format; without one, SmolLM2-135M-Instruct")
    parser.add_argument("--name", default="smollm2-135m-instruct", help="the model's name for clients")
    parser.add_argument("--operation", default="flash", help="the attention, of any installed distribution")
    parser.add_argument(
        "--codec", choices=["int8", "float8_e4m3fn", "float8_e5m2"], help="how keys and values are stored"
    )
    for name, default, text in (
        ("rows", 16, "requests that run at a time"), ("pages", 1024, "pages of all requests together"),
        ("page-size", 16, "tokens a page"), ("max-length", 2048, "most tokens of a request, prompt included"),
        ("max-waiting", 256, "most requests that wait; more get status 429"),
        ("port", 8000, "0 for any that is free"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256], help="tokens a step, each a program")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--no-prefix-sharing", action="store_true", help="compute every prompt from its first token")
    given = parser.parse_args(arguments)
    model, tokenizer = load_model(given.checkpoint, given.operation)
    engine = Engine(
        model, tokenizer, rows=given.rows, pages=given.pages, page_size=given.page_size, max_length=given.max_length,
        chunks=given.chunks, max_waiting=given.max_waiting, prefix_sharing=not given.no_prefix_sharing,
        codec=Quantized(given.codec) if given.codec else None,
    )  # fmt: skip
    engine.warm()
    uvicorn.run(application(engine, given.name), host=given.host, port=given.port, log_level="info")


def load_model(checkpoint: str | None, operation: str) -> tuple[CausalLM, Tokenizer]:
    """A model and its tokenizer: of a directory in Hugging Face's format, or SmolLM2-135M-Instruct."""
    from .gguf_file import load_smollm2
    from .model import CausalLM
    from .tokenizer import Tokenizer

    if checkpoint is None:
        return load_smollm2(operation=operation)
    model = CausalLM.from_pretrained(checkpoint, operation=operation)
    return model, Tokenizer.from_pretrained(checkpoint, model.config.eos_token_ids)


if __name__ == "__main__":
    main()
