"""The HTTP endpoints of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import jinja2
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attnops_lm.serve.answers import Answer, Events, TextAnswer
from attnops_lm.serve.bodies import Body, ChatBody, CompletionBody, ResponseFormat
from attnops_lm.serve.embeddings import EmbeddingAnswer, EmbeddingBody
from attnops_lm.serve.engine import Engine, QueueFullError, StoppedError
from attnops_lm.serve.errors import APIError
from attnops_lm.serve.grammar import Constraint, Grammars
from attnops_lm.serve.keys import KeyGuard
from attnops_lm.serve.limits import NO_LIMITS, Clients, Limits
from attnops_lm.serve.metrics import Metrics
from attnops_lm.serve.request import Delta, Request
from attnops_lm.serve.tools import ToolParser, refusal

# The limit of a body's size: bytes per token that all rows together can hold, and bytes for the rest of the JSON. Text
# has four or five bytes per token, a token id in a list up to eight, and an escape such as \u00e9 six bytes per
# character.
TOKEN_BYTES, REST_BYTES = 16, 1 << 16


class Server:
    """The endpoints of an engine."""

    def __init__(self, engine: Engine, name: str, limits: Limits) -> None:
        self.engine, self.name, self.started = engine, name, int(time.time())
        self.clients = Clients(limits)
        self.measured, self.grammars = Metrics(engine, name), Grammars(engine.tokenizer, engine.vocab_size)
        self.largest = REST_BYTES + TOKEN_BYTES * engine.max_length * engine.rows
        self.thread = threading.Thread(target=engine.run, name="engine", daemon=True)

    async def health(self, _: HTTPRequest) -> Response:
        """Whether the engine runs, and the numbers of requests and pages."""
        engine = self.engine
        is_up = self.thread.is_alive() and not engine.is_stopped
        content = {
            "status": "ok" if is_up else "stopped", "running": len(engine.running), "waiting": len(engine.waiting),
            "pages": engine.pages.count, "pages_free": engine.pages.available, **engine.counts,
        }  # fmt: skip
        return JSONResponse(content, 200 if is_up else 503)

    async def metrics(self, http: HTTPRequest) -> Response:
        """The metrics of the engine for Prometheus."""
        content, kind = self.measured.exposition(http.headers.get("accept"))
        return Response(content, headers={"Content-Type": kind})

    async def models(self, _: HTTPRequest) -> Response:
        """The list of models, which has one."""
        return JSONResponse({"object": "list", "data": [self._description()]})

    def _description(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "attnops"}

    async def model(self, http: HTTPRequest) -> Response:
        """The description of the model, if the name is its name."""
        self._check_name(http.path_params["name"])
        return JSONResponse(self._description())

    async def completions(self, http: HTTPRequest) -> Response:
        """Continue one or several prompts."""
        return await self._respond(http, self._read_completion, TextAnswer)

    async def chat(self, http: HTTPRequest) -> Response:
        """Answer a conversation."""
        return await self._respond(http, self._read_chat, TextAnswer)

    async def embeddings(self, http: HTTPRequest) -> Response:
        """The embeddings of one or several texts."""
        return await self._respond(http, self._read_embeddings, EmbeddingAnswer)

    def _read_embeddings(self, content: bytes) -> tuple[EmbeddingBody, list[Request]]:
        body: EmbeddingBody = self._parse(content, EmbeddingBody)
        if body.dimensions is not None and body.dimensions > self.engine.width:
            message = f"dimensions: {body.dimensions} must be at most the model's width, {self.engine.width}"
            raise APIError(400, f"{message}; leave it out for all", "dimensions")
        tokens = self._tokens("input", body.input)
        for x in tokens:
            self._room("input", x)
        return body, [Request(x, 1, embeds=True) for x in tokens]

    def _tokens(self, param: str, given: Any) -> list[list[int]]:
        """The tokens of each of one or several texts, which may be tokens already."""
        texts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        most = self.engine.max_waiting
        if len(texts) > most:
            message = f"{param}: {len(texts)} {param}s in a call must be at most {most}; send several calls"
            raise APIError(400, message, param)
        encode = functools.partial(self.engine.tokenizer.encode, add_special_tokens=True)
        tokens: list[list[int]] = [encode(x) if isinstance(x, str) else list(x) for x in texts]
        if not tokens or not all(tokens):
            raise APIError(400, f"{param}: it has no tokens", param)
        if not all(0 <= token < self.engine.vocab_size for x in tokens for token in x):
            raise APIError(400, f"{param}: token ids must be from 0 to {self.engine.vocab_size - 1}", param)
        return tokens

    def _room(self, param: str, tokens: list[int]) -> int:
        """How many tokens may follow these, at least 1."""
        context = self.engine.max_length
        if len(tokens) >= context:
            message = f"{param}: its {len(tokens)} tokens must be fewer than the context, {context}; send less text"
            raise APIError(400, message, param, "context_length_exceeded")
        return context - len(tokens)

    def _read_completion(self, content: bytes) -> tuple[Body, list[Request]]:
        body: CompletionBody = self._parse(content, CompletionBody)
        self._check_head()
        self._check_options(body)
        tokens = self._tokens("prompt", body.prompt)
        make = functools.partial(self._requests, body, self._constraint(body), "prompt", len(tokens), 16)
        return body, [request for x in tokens for request in make(x)]

    def _read_chat(self, content: bytes) -> tuple[Body, list[Request]]:
        body: ChatBody = self._parse(content, ChatBody)
        self._check_head()
        self._check_options(body)
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            message = "max_tokens: it is the old name of max_completion_tokens, which is given too; leave one out"
            raise APIError(400, message, "max_tokens")
        tools = self._tools(body)
        try:
            text = self.engine.tokenizer.chat([x.for_template() for x in body.messages], tools=tools)
        # Such as roles that do not alternate, or arguments of calls that are nested too deeply.
        except (ValueError, TypeError, RecursionError, jinja2.TemplateError) as error:
            raise APIError(400, f"messages: {error}", "messages") from None
        tokens = self.engine.tokenizer.encode(text)
        if not tokens:
            raise APIError(400, "messages: they have no tokens", "messages")
        return body, self._requests(body, self._constraint(body), "messages", 1, self.engine.max_length, tokens)

    def _tools(self, body: ChatBody) -> list[dict[str, Any]] | None:
        """The tools for the template; None if there are none."""
        has_calls = any(x.tool_calls or x.role == "tool" for x in body.messages)
        if not body.callable_tools and not has_calls:
            return None
        field = "tools" if body.callable_tools else "messages"
        if (reason := refusal(self.engine.tokenizer)) is not None:
            raise APIError(400, f"{field}: {reason}; leave tools out", field, "no_tools")
        if not body.callable_tools:
            return None
        field, given = body.format
        if given is not None and given != ResponseFormat(type="text"):
            message = f"{field}: an answer that may call tools has no other format; send tool_choice='none'"
            raise APIError(400, f"{message}, or leave it out", field)
        return [x.for_template() for x in body.callable_tools]

    def _parse(self, content: bytes, kind: type[Any]) -> Any:
        try:
            body = kind.model_validate_json(content)
        except ValidationError as error:
            raise APIError.of_body(error) from None
        self._check_name(body.model)
        return body

    def _check_head(self) -> None:
        """Refuse to generate by a model without a head over the vocabulary."""
        if not self.engine.has_head:
            message = f"model: {self.name!r} is for embeddings, and has no head over the vocabulary"
            raise APIError(400, f"{message}; send texts to /v1/embeddings", "model", "no_head")

    @staticmethod
    def _check_options(body: Body) -> None:
        """Refuse options that exclude each other."""
        if body.stream_options is not None and not body.stream:
            raise APIError(400, "stream_options: it needs stream=true; leave it out", "stream_options")
        if body.structured_outputs is not None and body.response_format is not None:
            message = "structured_outputs: it is another response_format, which is given too; leave one out"
            raise APIError(400, message, "structured_outputs")

    def _check_name(self, name: str) -> None:
        if name != self.name:
            raise APIError(404, f"model: {name!r} is not served, but {self.name!r}", "model", "model_not_found")

    def _requests(
        self, body: Body, constraint: Constraint | None, param: str, prompts: int, default: int, tokens: list[int]
    ) -> list[Request]:
        """``n`` requests of these tokens, which are one of several prompts; an answer has at most ``default`` tokens if
        the client gives no limit.
        """
        (field, limit), room = body.token_limit, self._room(param, tokens)
        if limit is not None and limit > room:
            context = self.engine.max_length
            message = f"{field}: {limit} and {len(tokens)} tokens of {param} must be at most {context} together"
            raise APIError(400, f"{message}; ask for at most {room}", field, "context_length_exceeded")
        n, most = body.n or 1, self.engine.max_waiting
        if n * prompts > most:
            message = f"n: {n} answers to each of {prompts} prompts must be at most {most} together"
            raise APIError(400, f"{message}; ask for at most {most // prompts}", "n")
        # Each answer draws with a seed of its own, the first with the seed that a client gives.
        seeds = [secrets.randbits(32) if body.seed is None else (body.seed + i) % 2**32 for i in range(n)]
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        names: set[str] = set()  # of tools, of which the answer may call one
        if isinstance(body, ChatBody) and body.parallel_tool_calls is False:
            names = {x.function.name for x in body.callable_tools}
        return [
            Request(
                list(tokens), min(default, room) if limit is None else limit, temperature=body.temperature or 0.0,
                top_k=body.top_k or 0, top_p=1.0 if body.top_p is None else body.top_p, seed=seed, stop=stop,
                ignore_eos=body.ignore_eos, frequency_penalty=body.frequency_penalty or 0.0,
                presence_penalty=body.presence_penalty or 0.0, logprobs=body.most_likely,
                constraint=constraint and constraint.copy(),
                ends=ToolParser(names, several=False).ends if names else None,
            )
            for seed in seeds
        ]  # fmt: skip

    def _constraint(self, body: Body) -> Constraint | None:
        """What an answer must follow, if the client says it."""
        field, given = body.format
        try:
            rule = None if given is None else given.rule
            if rule is None and isinstance(body, ChatBody):  # with both, `_tools` has refused the format
                field = "tools"
                rule = body.tool_rule
            if rule is None:
                return None
            if body.ignore_eos:
                raise ValueError("it says where an answer may end; leave ignore_eos out")
            return self.grammars.constraint(rule)
        except ValueError as error:
            raise APIError(400, f"{field}: {error}", field, "invalid_format") from None

    async def _content(self, http: HTTPRequest) -> bytes:
        """The body, if it has at most ``largest`` bytes; reading stops beyond that."""
        if (encoding := http.headers.get("content-encoding", "identity").lower()) != "identity":
            message = f"Content-Encoding: {encoding!r} is not served; send the JSON itself"
            raise APIError(415, message, code="unsupported_encoding", headers={"Accept-Encoding": "identity"})
        parts: list[bytes] = []
        size = 0
        async for part in http.stream():
            size += len(part)
            if size > self.largest:
                context, rows = self.engine.max_length, self.engine.rows
                message = f"the body must be at most {self.largest} bytes, for {rows} prompts of {context} tokens"
                raise APIError(413, f"{message}; send less text, or several calls", code="body_too_large")
            parts.append(part)
        return b"".join(parts)

    async def _respond(
        self, http: HTTPRequest, read: Callable[[bytes], tuple[Any, list[Request]]], kind: Callable[..., Answer]
    ) -> Response:
        # An API key is the client, else its address.
        name = http.scope.get("api_key") or (http.client and http.client.host)
        self.clients.find(name).begin_call()
        # In a thread: parsing, templates and tokenizers need seconds for long texts, and other clients must not wait.
        try:
            content = await self._content(http)
        except ClientDisconnect:
            return Response(status_code=499)  # to nobody
        body, requests = await asyncio.to_thread(read, content)
        queue: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(index: int, delta: Delta) -> None:
            self.measured.observe(requests[index], delta)
            client.use(delta.finish_reason != "error" and delta.embedding is None)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, (index, delta))

        for i, request in enumerate(requests):
            request.emit = functools.partial(emit, i)
        client = self.clients.find(name)
        client.begin_answers(len(requests))
        answer = kind(self, client, body, requests, queue)
        try:
            self._submit(requests)
        except APIError:
            answer.end()
            raise
        client.use(sum(x.prompt_length for x in answer.prompts))
        if isinstance(answer, TextAnswer) and answer.body.stream:
            return Events(answer)
        try:
            return await answer.whole(http)
        finally:
            answer.end()

    def _submit(self, requests: list[Request]) -> None:
        try:
            self.engine.submit(*requests)
        except QueueFullError as error:
            raise APIError(429, str(error), code="queue_full", retry_after=1) from None
        except StoppedError as error:
            raise APIError(503, str(error), code="stopped") from None
        except ValueError as error:
            raise APIError(400, str(error)) from None


class QuietEnd:
    """Middleware for requests that are cancelled because the server ends: they are not logged, and get status 503 if
    their answer has not begun.
    """

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self.app, self.engine = app, engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except asyncio.CancelledError:
            if not self.engine.is_stopped:
                raise
            if scope["type"] == "http" and not has_begun:
                error = APIError(503, "the server is shutting down", code="stopped")
                await JSONResponse(error.content, error.status)(scope, receive, send)


def application(engine: Engine, name: str, api_keys: Sequence[str] = (), limits: Limits = NO_LIMITS) -> Starlette:
    """The ASGI application, which runs the engine in a thread while it is up.

    Args:
        engine: the engine.
        name: the name of the model, for clients.
        api_keys: the keys with which ``/v1`` may be called; none: by anyone. `/health` and `/metrics` need no key.
        limits: what one client may use, by its key, or by its address without keys.

    Raises:
        ValueError: a key is empty, or has characters other than visible ASCII.
    """
    server = Server(engine, name, limits)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        server.thread.start()
        yield
        engine.stop()
        await asyncio.to_thread(server.thread.join)

    async def refuse(_: HTTPRequest, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = APIError(error.status_code, error.detail, headers=error.headers)  # such as Allow
        assert isinstance(error, APIError)
        if error.status == 429:
            server.measured.refused[error.reason] += 1
        return JSONResponse(error.content, error.status, error.headers)

    v1 = [
        Route("/models", server.models),
        Route("/models/{name:path}", server.model),
        Route("/completions", server.completions, methods=["POST"]),
        Route("/chat/completions", server.chat, methods=["POST"]),
        Route("/embeddings", server.embeddings, methods=["POST"]),
    ]
    guard = [Middleware(KeyGuard, api_keys)] if api_keys else []
    routes = [
        Route("/health", server.health),
        Route("/metrics", server.metrics),
        Mount("/v1", routes=v1, middleware=guard),
    ]
    return Starlette(
        routes=routes,
        exception_handlers={APIError: refuse, HTTPException: refuse},
        lifespan=lifespan,
        middleware=[Middleware(QuietEnd, engine)],
    )
