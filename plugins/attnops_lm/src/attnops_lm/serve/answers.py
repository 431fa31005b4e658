"""The answer to one HTTP call: a whole response, or a stream of events."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from attnops_lm.serve.bodies import Body, ChatBody
from attnops_lm.serve.errors import APIError
from attnops_lm.serve.logprobs import chat_logprobs, completion_logprobs
from attnops_lm.serve.request import Delta, Request
from attnops_lm.serve.text_of_json import encoded
from attnops_lm.serve.tools import ToolParser

if TYPE_CHECKING:
    from attnops_lm.serve.endpoints import Server
    from attnops_lm.serve.limits import Client


class Answer:
    """The answer to one HTTP call, which subclasses give the format of their endpoint."""

    def __init__(self, server: Server, client: Client, requests: list[Request], queue: asyncio.Queue[Any]) -> None:
        self.server, self.client, self.requests, self.queue = server, client, requests, queue
        self.prompts = requests  # what counts once as a prompt

    def response(self, parts: list[list[Delta]]) -> Response:
        """The response, from the deltas of each request."""
        raise NotImplementedError

    def end(self) -> None:
        """Cancel what is left of the requests."""
        self.server.engine.cancel(*self.requests)
        self.client.end_answers(len(self.requests))

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Every delta, with the index of its request."""
        left = len(self.requests)
        while left:
            i, delta = await self.queue.get()
            if delta.finish_reason == "error":
                engine = self.server.engine  # it has stopped, or failed, or can't continue this answer
                raise APIError(503 if engine.is_stopped and engine.failure is None else 500, delta.text)
            left -= delta.finish_reason is not None
            yield i, delta

    async def whole(self, http: HTTPRequest) -> Response:
        """All in one response; the requests are cancelled if the client disconnects."""
        parts: list[list[Delta]] = [[] for _ in self.requests]

        async def collect() -> None:
            async for i, delta in self.deltas():
                parts[i].append(delta)

        async def disconnected() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.ensure_future(x) for x in (collect(), disconnected())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                return Response(status_code=499)
            tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
        return await asyncio.to_thread(self.response, parts)  # log-probabilities of long texts take long to encode


class TextAnswer(Answer):
    """The answer of an endpoint that generates text."""

    def __init__(
        self, server: Server, client: Client, body: Body, requests: list[Request], queue: asyncio.Queue[Any]
    ) -> None:
        super().__init__(server, client, requests, queue)
        self.body = body
        self.prompts = requests[:: body.n or 1]  # a prompt with several answers counts once
        self.is_chat = isinstance(body, ChatBody)
        tools = body.callable_tools if isinstance(body, ChatBody) else []
        names = {x.function.name for x in tools}
        several = not isinstance(body, ChatBody) or body.parallel_tool_calls is not False
        self.parsers = [ToolParser(names, several=several) for _ in requests] if names else None
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def response(self, parts: list[list[Delta]]) -> Response:
        """The whole text of each request, from its deltas."""
        choices = [self.choice(i, deltas, False) for i, deltas in enumerate(parts)]
        content = encoded(self.envelope(choices, False) | {"usage": self.usage()})
        return Response(content, media_type="application/json")

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events of the deltas."""
        has_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        empty = {"usage": None} if has_usage else {}
        try:
            begun: set[int] = set()
            async for i, delta in self.deltas():
                choice = self.choice(i, [delta], True)
                if choice.get("text") or choice.get("delta") or choice["finish_reason"] or choice["logprobs"]:
                    if self.is_chat and i not in begun:  # not sooner: clients take the time of the first event
                        yield _event(self.envelope([self.choice(i, [Delta("")], True, is_first=True)], True) | empty)
                        begun.add(i)
                    yield _event(self.envelope([choice], True) | empty)
            if has_usage:
                yield _event(self.envelope([], True) | {"usage": self.usage()})
        except APIError as error:
            yield _event(error.content)
        yield "data: [DONE]\n\n"

    def envelope(self, choices: list[Any], is_part: bool) -> dict[str, Any]:
        """The fields of the JSON around the choices."""
        kind = f"chat.completion{'.chunk' * is_part}" if self.is_chat else "text_completion"
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.server.name, "choices": choices
        }  # fmt: skip

    def choice(self, i: int, deltas: list[Delta], is_part: bool, is_first: bool = False) -> dict[str, Any]:
        """The JSON of request i's deltas, joined."""
        text = "".join(x.text for x in deltas)
        tokens = [token for x in deltas for token in x.logprobs]
        logprobs = None
        if tokens or (self.body.most_likely is not None and not is_part):
            logprobs = (chat_logprobs if self.is_chat else completion_logprobs)(tokens, self.server.engine.tokenizer)
        reason = deltas[-1].finish_reason
        calls: list[dict[str, Any]] = []
        if self.parsers is not None and not is_first:
            text, calls = self.parsers[i].push(text, is_last=reason is not None)
            reason = "tool_calls" if reason == "stop" and self.parsers[i].count else reason
        choice = {"index": i, "finish_reason": reason, "logprobs": logprobs}
        if not self.is_chat:
            return choice | {"text": text}
        if not is_part:
            for call in calls:
                del call["index"]  # of a stream alone
            message = {"role": "assistant", "content": text or None if calls else text}
            return choice | {"message": message | ({"tool_calls": calls} if calls else {})}
        delta = {"role": "assistant", "content": ""} if is_first else {"content": text} if text else {}
        return choice | {"delta": delta | ({"tool_calls": calls} if calls else {})}

    def usage(self) -> dict[str, Any]:
        """The numbers of tokens."""
        prompt, generated = sum(x.prompt_length for x in self.prompts), sum(x.count for x in self.requests)
        cached = sum(x.cached for x in self.prompts)
        return {
            "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip


class Events(StreamingResponse):
    """A stream that cancels its requests when it ends, for whatever reason."""

    def __init__(self, answer: TextAnswer) -> None:
        super().__init__(answer.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.end()


def _event(content: dict[str, Any]) -> str:
    return f"data: {JSONResponse(content).body.decode()}\n\n"  # type: ignore[union-attr]
