"""Limits per client: what is above them gets status 429 and when to come again, and other clients go on."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from lm_server import FakeEngine, running

from attnops_lm.serve.limits import Bucket, Clients, LimitError, Limits

KEYS = ["one", "two"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def complete(url: str, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    given = {"model": "fake", "prompt": "a" * 10, "max_tokens": 5}
    return httpx.post(f"{url}/v1/completions", json=given | body, headers=headers, timeout=60)


def refused(response: httpx.Response, message: str) -> int:
    """Assert that a response is 429; the seconds after which to come again."""
    assert response.status_code == 429
    error = response.json()["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert message in error["message"]
    return int(response.headers["Retry-After"])


def counts(url: str) -> dict[str, float]:
    lines = [x for x in httpx.get(f"{url}/metrics").text.splitlines() if x.startswith("attnops:requests_refused_total")]
    return {x.split('reason="')[1].split('"')[0]: float(x.split()[-1]) for x in lines if not x.endswith(" 0.0")}


def test_a_bucket_refills_steadily_and_is_never_more_than_full() -> None:
    clock = Clock()
    bucket = Bucket(120, clock)
    clock.now = 1000.0
    assert (bucket.wait(), bucket.take(120)) == (0, 0)
    assert bucket.wait() == 0.5
    clock.now += 0.5
    assert bucket.wait() == 0
    assert bucket.take(61) == -60
    assert bucket.wait() == 30.5
    clock.now += 30.5
    assert (bucket.wait(), bucket.take(0)) == (0, 1)


def test_a_client_that_is_refused_is_served_after_the_time_that_it_was_told() -> None:
    clock = Clock()
    client = Clients(Limits(calls=3, tokens=100), clock).find("a")
    for _ in range(3):
        client.begin_call()
    with pytest.raises(LimitError, match="used its 3 calls per minute; send it again in 20 s") as caught:
        client.begin_call()
    clock.now += float(caught.value.headers["Retry-After"]) - 0.01
    with pytest.raises(LimitError):
        client.begin_call()
    clock.now += 0.01
    client.begin_call()
    client.use(200)  # a prompt may overdraw
    clock.now += 40
    with pytest.raises(LimitError, match="used its 100 tokens per minute; send it again in") as caught:
        client.begin_call()
    clock.now += float(caught.value.headers["Retry-After"])
    client.begin_call()


def test_clients_that_use_nothing_are_forgotten_when_there_are_many() -> None:
    clock = Clock()
    clients = Clients(Limits(answers=2, calls=60), clock)
    clients.most = 3
    busy, calling, idle = (clients.find(x) for x in "abc")
    busy.begin_answers(1)
    clock.now = 5.0
    calling.begin_call()
    clients.find("d")
    assert set(clients.clients) == {"a", "b", "d"}
    assert clients.find("a") is busy
    busy.end_answers(1)
    clock.now, clients.most = 10.0, 3
    assert set((clients.find("e"), clients.clients)[1]) == {"e"}
    assert idle.is_idle


@pytest.mark.parametrize("name", ["answers", "calls", "tokens"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1, or None for no limit"):
        Limits(**{name: 0})


def test_each_key_has_limits_of_its_own_however_it_is_written() -> None:
    with running(FakeEngine(), api_keys=KEYS, limits=Limits(calls=2)) as (_, url, _):
        assert [complete(url, "one").status_code for _ in range(2)] == [200, 200]
        for key in ("one", " one", "  one"):
            assert (
                25 <= refused(complete(url, key), "this client has used its 2 calls per minute; send it again in") <= 30
            )
        assert complete(url, "two").status_code == 200
        assert complete(url, "three").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer one"}).status_code == 200
        assert counts(url) == {"calls_per_minute": 3}


def test_tokens_of_prompts_and_answers_are_counted_without_keys_by_address() -> None:
    with running(FakeEngine(), limits=Limits(tokens=60)) as (_, url, _):
        # 10 tokens of a prompt, which both answers share, and 5 of each answer; then 210 of prompts, and 10
        assert complete(url, n=2).status_code == 200
        assert complete(url, prompt=["a" * 10, "b" * 200]).status_code == 200
        # Of 60 tokens 240 are used, and one a second is added.
        assert 60 < refused(complete(url), "this client has used its 60 tokens per minute") <= 181
        assert counts(url) == {"tokens_per_minute": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_at_a_time_are_counted_until_they_end(stream: bool) -> None:
    engine = FakeEngine(seconds=0.02)
    with running(engine, api_keys=KEYS, limits=Limits(answers=3)) as (_, url, _):
        assert complete(url, "one", n=4).status_code == 400
        body = {"model": "fake", "prompt": "a", "max_tokens": 4000, "n": 2, "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers={"Authorization": "Bearer one"}
        ) as response:
            assert response.status_code == 200
            assert (
                refused(complete(url, "one", n=2, stream=stream), "has 2 answers at a time, and 2 more would be") == 1
            )
            assert complete(url, "one", stream=stream, max_tokens=1).status_code == 200
            assert complete(url, "two", n=3, max_tokens=1).status_code == 200
        deadline = time.monotonic() + 60  # the server has to notice that the client has gone
        while complete(url, "one", n=3, max_tokens=1, stream=stream).status_code == 429 and time.monotonic() < deadline:
            time.sleep(0.05)
        for _ in range(3):  # errors give their answers back too
            assert complete(url, "one", n=3, prompt=[[1] * 5000]).status_code == 400
        engine.max_waiting = 0
        assert complete(url, "one", stream=stream).status_code == 400
        engine.max_waiting = 256
        assert complete(url, "one", n=3, max_tokens=1).status_code == 200
        assert counts(url)["answers_at_a_time"] >= 1


def test_a_full_queue_says_when_to_come_again_and_gives_its_answers_back() -> None:
    engine = FakeEngine(max_waiting=1)
    engine.step = lambda: bool(time.sleep(0.002))  # type: ignore[func-returns-value,method-assign]
    with running(engine, limits=Limits(answers=2)) as (_, url, _):
        body = {"model": "fake", "prompt": "a", "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body):
            for _ in range(2):
                response = complete(url, stream=True)
                assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
                assert response.json()["error"]["code"] == "queue_full"
        assert counts(url) == {"queue_full": 2}
