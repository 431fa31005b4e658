"""The server's endpoints, through the client library of that API and through plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import jax
import openai
import pytest
import uvicorn
from lm_server import CHUNK, LENGTH, PAGE, PAGES, check_pages

from attnops_lm import load_test
from attnops_lm.serve import Engine, Request, application, load_model
from attnops_lm.testing import Characters, small


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """The URL of a server of an engine, in a thread."""
    # Listens before the thread starts: a client that comes first waits until it is accepted.
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(application(engine, "small"), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(small(), Characters(), rows=4, pages=PAGES, page_size=PAGE, max_length=LENGTH, chunks=[CHUNK])  # type: ignore[arg-type]
    engine.warm()
    return engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def wait_until_empty(url: str, within: float = 60) -> dict[str, Any]:
    """The server's health, when nothing runs or waits."""
    for _ in range(int(within / 0.02)):
        health: dict[str, Any] = httpx.get(f"{url}/health").json()
        if not health["running"] + health["waiting"]:
            return health
        time.sleep(0.02)
    raise AssertionError(f"requests are left: {health}")


def check_nothing_is_left(arrays: int) -> None:
    # The engine's thread may not have left its last step yet.
    deadline = time.monotonic() + 10
    while len(jax.live_arrays()) > arrays and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(jax.live_arrays()) == arrays


@pytest.mark.slow
def test_streamed_and_whole_completions_are_equal(client: openai.OpenAI):
    options: dict[str, Any] = {"model": "small", "prompt": "Hello", "max_tokens": 12}
    whole = client.completions.create(**options)
    assert len(whole.choices[0].text) == 12
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    events = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(x.choices[0].text for x in events if x.choices) == whole.choices[0].text
    assert [x.choices[0].finish_reason for x in events if x.choices][-2:] == [None, "length"]
    assert events[-1].usage is not None
    assert events[-1].usage.total_tokens == 17


def test_streamed_and_whole_chats_are_equal_and_continue_the_chat_template(client: openai.OpenAI):
    options: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}
    options |= {"temperature": 1.0, "top_p": 0.9, "seed": 3, "max_completion_tokens": 9}
    whole = client.chat.completions.create(**options)
    events = list(client.chat.completions.create(**options, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    content = "".join(x.choices[0].delta.content or "" for x in events)
    assert content == whole.choices[0].message.content
    options["messages"] = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert client.chat.completions.create(**options).choices[0].message.content == content
    options.pop("messages")
    options["max_tokens"] = options.pop("max_completion_tokens")
    assert client.completions.create(**options, prompt="<user>Hi").choices[0].text == content


def test_several_prompts_of_text_or_tokens_have_a_choice_each(client: openai.OpenAI):
    prompts = ["Hello", "World!"]
    each = [client.completions.create(model="small", prompt=x).choices[0].text for x in prompts]
    tokens = [Characters().encode(x) for x in prompts]
    for given in (prompts, tokens):
        choices = client.completions.create(model="small", prompt=given).choices
        assert [(x.index, x.text) for x in choices] == list(enumerate(each))


def test_stop_strings_and_logits_options_reach_the_engine(client: openai.OpenAI):
    text = client.completions.create(model="small", prompt="Hello", max_tokens=12).choices[0].text
    choice = client.completions.create(model="small", prompt="Hello", max_tokens=12, stop=[text[4:6]]).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(text[4:6])], "stop")
    options: dict[str, Any] = {"model": "small", "prompt": "Hello", "max_tokens": 12, "temperature": 2.0}
    one = client.completions.create(**options, extra_body={"top_k": 1}).choices[0].text
    assert one == text == client.completions.create(**options, top_p=1e-6).choices[0].text
    drawn = {client.completions.create(**options).choices[0].text for _ in range(2)}
    assert len(drawn) == 2  # without a seed, each draws with its own


def test_options_that_ask_for_nothing_are_taken(url: str):
    nothing: dict[str, Any] = {
        "n": 1,
        "stop": None,
        "logprobs": None,
        "logit_bias": {},
        "frequency_penalty": 0,
        "seed": None,
    }
    completion = {"prompt": "Hello", "echo": False, "best_of": 1, "suffix": None}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": False, "top_logprobs": None, "tools": []}
    chat["response_format"] = {"type": "text"}
    for path, own in (("completions", completion), ("chat/completions", chat)):
        assert httpx.post(f"{url}/v1/{path}", json={"model": "small", **nothing, **own}).status_code == 200


def test_the_models_are_listed_and_the_health_has_the_pages(client: openai.OpenAI, url: str):
    assert [x.id for x in client.models.list()] == ["small"]
    assert wait_until_empty(url)["pages_free"] == PAGES


GOOD: dict[str, Any] = {"model": "small", "prompt": "a"}
CHAT: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": "small"}, "prompt"),
        ({"prompt": "a"}, "model"),
        (GOOD | {"prompt": 3}, "prompt"),
        (GOOD | {"prompt": ""}, "prompt"),
        (GOOD | {"prompt": [1, "a"]}, "prompt"),
        (GOOD | {"prompt": [1, 96]}, "prompt"),
        (GOOD | {"prompt": "a" * LENGTH}, "prompt"),
        (GOOD | {"max_tokens": LENGTH}, "max_tokens"),
        (GOOD | {"max_tokens": 0}, "max_tokens"),
        (GOOD | {"max_tokens": "4"}, "max_tokens"),
        (GOOD | {"temperature": -1}, "temperature"),
        (GOOD | {"top_p": 0}, "top_p"),
        (GOOD | {"top_k": -1}, "top_k"),
        (GOOD | {"stop": ["a", ""]}, "stop"),
        (GOOD | {"n": 0}, "n"),
        (GOOD | {"presence_penalty": 3}, "presence_penalty"),
        (GOOD | {"logit_bias": {"5": 1.0}}, "logit_bias"),
        (GOOD | {"logprobs": 6}, "logprobs"),
        (GOOD | {"stream_options": {"x": 1}}, "stream_options.x"),
        (GOOD | {"n": True}, "n"),
        (GOOD | {"stream_options": {"include_usage": True}}, "stream_options"),
        (GOOD | {"stream_options": {"a-b": 1}}, "stream_options.a-b"),
        (GOOD | {"beams": 4}, "beams"),
        (GOOD | {"max-tokens": 4}, "max-tokens"),
        (GOOD | {"str": 4}, "str"),
        ({"model": "small", "messages": []}, "messages"),
        ({"model": "small", "messages": [{"role": "user"}]}, "messages[0].content"),
        ({"model": "small", "messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (CHAT | {"messages": [*CHAT["messages"], {"role": "x", "content": "a"}]}, "messages[1].role"),
        (CHAT | {"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools"),
        (CHAT | {"max_completion_tokens": LENGTH}, "max_completion_tokens"),
        (CHAT | {"max_completion_tokens": 4, "max_tokens": 5}, "max_tokens"),
    ],
    ids=lambda x: None if isinstance(x, str) else "",
)
def test_a_malformed_request_gets_status_400_and_the_name_of_its_field(url: str, body: dict[str, Any], field: str):
    path = "chat/completions" if "messages" in body else "completions"
    response = httpx.post(f"{url}/v1/{path}", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(field.split("[")[0])
    assert error["type"] == "invalid_request_error"


def test_other_errors_have_the_same_format(client: openai.OpenAI, url: str, engine: Engine):
    with pytest.raises(openai.NotFoundError, match="'large' is not served, but 'small'"):
        client.completions.create(model="large", prompt="a")
    assert httpx.post(f"{url}/v1/completions", content=b"{").json()["error"]["code"] == "json_invalid"
    for response, status in ((httpx.get(f"{url}/v1/nothing"), 404), (httpx.get(f"{url}/v1/completions"), 405)):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"
    engine.max_waiting = 0
    with pytest.raises(openai.BadRequestError, match="prompt: 2 prompts in a call must be at most 0"):
        client.completions.create(model="small", prompt=["a", "b"])
    engine.max_waiting, waiting = 1, Request([1], 1)
    engine.step = lambda: False  # type: ignore[method-assign]
    engine.submit(waiting)
    with pytest.raises(
        openai.RateLimitError, match="1 requests wait, and 1 more would be above max_waiting=1; send th"
    ):
        client.completions.create(model="small", prompt="a")
    engine.max_waiting = 256
    del engine.step
    wait_until_empty(url)


def test_extreme_options_leave_the_server_running(client: openai.OpenAI, url: str):
    greedy = client.completions.create(model="small", prompt="a", max_tokens=3, temperature=0)
    for options in ({"top_k": 10**12}, {"top_k": 2**31}, {"seed": -(10**40)}):
        client.completions.create(model="small", prompt="a", max_tokens=3, temperature=1, extra_body=options)
    for options in ({"temperature": 1e-37}, {"temperature": 1e-320}, {"temperature": 1, "top_p": 1e-320}):
        found = client.completions.create(model="small", prompt="a", max_tokens=3, **options)  # type: ignore[call-overload]
        assert found.choices[0].text == greedy.choices[0].text
    assert httpx.get(f"{url}/health").json()["status"] == "ok"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_request(url: str, engine: Engine, stream: bool):
    cancelled, step, cancel = engine.counts["cancelled"], engine.step, engine.cancel
    asked, steps = threading.Event(), itertools.count()
    # The engine makes a few tokens, and then waits until the server has noticed, however slow either is.
    engine.step = lambda: (next(steps) < 6 or asked.wait(60), step())[1]  # type: ignore[method-assign]
    engine.cancel = lambda *requests: (cancel(*requests), asked.set())[0]  # type: ignore[method-assign]
    content = json.dumps(GOOD | {"max_tokens": 60, "stream": stream})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    host, port = url.removeprefix("http://").split(":")
    try:
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{content}".encode())
            if stream:
                assert b"200 OK" in connection.recv(4096)
            while not httpx.get(f"{url}/health").json()["running"]:
                time.sleep(0.02)
        assert wait_until_empty(url)["pages_free"] == PAGES
    finally:
        del engine.step, engine.cancel
    assert engine.counts["cancelled"] == cancelled + 1


def check_load(url: str, prompts: Sequence[str], max_tokens: Sequence[int], requests: int) -> None:
    """Requests 16 at a time, some of which are cancelled, equal those of their prompts alone."""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=None) as client:
            options: dict[str, Any] = {"max_tokens": max_tokens}
            one = await load_test.load(client, "small", prompts, requests=len(prompts), concurrency=1, **options)
            options["cancel_every"] = 7
            many = await load_test.load(client, "small", prompts, requests=requests, concurrency=16, **options)
            alone = {x.prompt: x.text for x in one.answers}
            assert len(set(alone.values())) > len(prompts) // 2
            assert many.agreement(alone) == (requests - requests // 7, requests - requests // 7)

    asyncio.run(run())


@pytest.mark.slow
def test_two_hundred_requests_at_once_equal_each_alone_and_leave_nothing(engine: Engine, url: str):
    arrays, preempted = len(jax.live_arrays()), engine.counts["preempted"]
    prompts = [f"{'A prefix that is shared; ' * (i % 2)}prompt {i}" for i in range(25)]
    check_load(url, prompts, [6, 25, 14, 20], 200)
    health = wait_until_empty(url)
    assert (health["pages_free"], health["pages"]) == (PAGES, PAGES)
    assert engine.counts["preempted"] > preempted + 3  # the pool is too small for all
    assert engine.counts["traces"] == 2
    check_nothing_is_left(arrays)
    check_pages(engine)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.optimised
def test_two_hundred_requests_of_smollm2_equal_each_alone():
    engine = Engine(*load_model(None, "flash"), pages=40, page_size=4, max_length=64)
    engine.warm()
    arrays = len(jax.live_arrays())
    with serving(engine) as url:
        check_load(url, load_test.PROMPTS[:10], [6, 20, 9, 14], 200)
        assert wait_until_empty(url)["pages_free"] == 40
    assert engine.counts["preempted"] > 0
    assert engine.counts["traces"] == 3
    check_nothing_is_left(arrays)
