"""The HTTP endpoints of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import jinja2
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .answers import Answer, Events
from .bodies import Body, ChatBody, CompletionBody
from .engine import Engine, QueueFullError, StoppedError
from .errors import APIError
from .request import Delta, Request


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
