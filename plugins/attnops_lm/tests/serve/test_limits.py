"""What a server can't hold is refused with the right status, and what takes long holds up nobody else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import httpx
import pytest
from lm_server import FakeEngine, running

from attnops_lm.serve.endpoints import REST_BYTES, TOKEN_BYTES

CONTEXT, ROWS = 256, 2


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(max_length=CONTEXT, rows=ROWS, max_waiting=8)


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with running(engine) as (_, url, _):
        yield f"{url}/v1"


def complete(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/completions", json={"model": "fake", "prompt": "a"} | body, timeout=60)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_larger_than_the_context_allows_is_413(url: str, chunked: bool) -> None:
    largest = REST_BYTES + TOKEN_BYTES * CONTEXT * ROWS
    content = json.dumps({"model": "fake", "prompt": "a" * 40 * largest}).encode()
    parts = (content[i : i + 1000] for i in range(0, len(content), 1000))
    response = httpx.post(f"{url}/completions", content=parts if chunked else content, timeout=60)
    error = error_of(response, 413)
    assert f"must be at most {largest} bytes, for {ROWS} prompts of {CONTEXT} tokens" in error["message"]
    assert error["type"] == "invalid_request_error"
    # Just within, it is told of its tokens.
    assert error_of(complete(url, prompt="a" * (largest - 100)), 400)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("name", ["encode", "chat"])
def test_others_are_answered_while_a_text_is_tokenised(
    url: str, engine: FakeEngine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, own = threading.Event(), threading.Event(), getattr(engine.tokenizer, name)

    def slow(*given: Any, **options: Any) -> Any:
        began.set()
        assert go_on.wait(60)
        return own(*given, **options)

    monkeypatch.setattr(engine.tokenizer, name, slow)
    body: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    with futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(httpx.post, f"{url}/chat/completions", json=body, timeout=60)
        try:
            assert began.wait(60)
            assert httpx.get(f"{url}/models", timeout=20).status_code == 200
            assert complete(url, prompt=[1, 2], max_tokens=2).json()["choices"][0]["text"] == "!!"
            assert not waiting.done()
        finally:
            go_on.set()
        assert waiting.result().status_code == 200


def test_more_prompts_than_may_ever_wait_are_400_and_not_to_be_tried_again(url: str) -> None:
    error = error_of(complete(url, prompt=["a"] * 9), 400)
    assert error["param"] == "prompt"
    assert error["message"] == "prompt: 9 prompts in a call must be at most 8; send several calls"
    assert len(complete(url, prompt=["a"] * 8).json()["choices"]) == 8


def test_an_answer_without_a_limit_has_the_room_that_is_left(url: str) -> None:
    answer = complete(url, prompt="a" * (CONTEXT - 5)).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("!!!!!", "length")
    assert complete(url).json()["usage"]["completion_tokens"] == 16
    error = error_of(complete(url, prompt="a" * CONTEXT), 400)
    assert error["param"] == "prompt"
    assert error["message"] == "prompt: its 256 tokens must be fewer than the context, 256; send less text"
    error = error_of(complete(url, prompt="a" * 250, max_tokens=7), 400)
    assert error["param"] == "max_tokens"
    assert error["message"].endswith("7 and 250 tokens of prompt must be at most 256 together; ask for at most 6")


def test_a_model_is_found_by_its_name(url: str) -> None:
    model = httpx.get(f"{url}/models/fake").json()
    assert (model["id"], model["object"]) == ("fake", "model")
    assert [model] == httpx.get(f"{url}/models").json()["data"]
    error = error_of(httpx.get(f"{url}/models/a/b"), 404)
    assert (error["code"], error["message"]) == ("model_not_found", "model: 'a/b' is not served, but 'fake'")
