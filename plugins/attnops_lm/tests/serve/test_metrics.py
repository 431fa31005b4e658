"""``/metrics`` has the engine's numbers, in a registry of each server."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from lm_server import FakeEngine, running
from prometheus_client.parser import text_string_to_metric_families

from attnops_lm.serve import Request

PAGES = 64


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(pages=PAGES, page_size=16, max_length=256, seconds=0.002)


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with running(engine) as (_, url, _):
        yield url


def metrics(url: str) -> dict[str, float]:
    """The samples of a server, by name, and by reason where they have one."""
    response = httpx.get(f"{url}/metrics")
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "fake"
            if "le" not in labels:
                found["/".join([sample.name.removeprefix("attnops:"), *labels.values()])] = sample.value
    return found


def complete(url: str, **body: object) -> None:
    body = {"model": "fake", "prompt": "a" * 10, "max_tokens": 5} | body
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


def test_a_server_counts_its_requests_tokens_and_times(url: str) -> None:
    before = metrics(url)
    assert before["prompt_tokens_total"] == before["request_success_total/length"] == 0
    begun = time.monotonic()
    complete(url, prompt=["a" * 10, "b" * 20], stream=True)
    complete(url, stop="!!")
    complete(url, max_tokens=1)
    seconds = time.monotonic() - begun
    found = metrics(url)
    assert found["prompt_tokens_total"] == 10 + 20 + 10 + 10
    assert found["generation_tokens_total"] == 5 + 5 + 2 + 1
    reasons = {x: found[f"request_success_total/{x}"] for x in ("length", "stop", "error", "abort")}
    assert reasons == {"length": 3, "stop": 1, "error": 0, "abort": 0}
    first, token, whole = (
        f"{x}_seconds" for x in ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency")
    )
    assert [found[f"{x}_count"] for x in (first, token, whole)] == [4, 3, 4]  # one has no second token
    assert 0 < found[f"{first}_sum"] < found[f"{whole}_sum"] < 4 * seconds
    # A request's tokens after the first take what is left of its latency.
    assert found[f"{token}_sum"] < found[f"{whole}_sum"] - found[f"{first}_sum"] < 4 * found[f"{token}_sum"]
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (0, 0)
    assert (found["kv_cache_usage_perc"], found["kv_cache_pages"], found["kv_cache_pages_used"]) == (0, PAGES, 0)


def test_requests_that_run_wait_and_are_cancelled_are_counted(url: str, engine: FakeEngine) -> None:
    engine.step = lambda: not time.sleep(0.002)  # type: ignore[func-returns-value,method-assign]
    requests = [Request([1] * 20, 5) for _ in range(5)]
    engine.submit(*requests)
    assert (metrics(url)["num_requests_waiting"], metrics(url)["num_requests_running"]) == (5, 0)
    schedule = engine._schedule()
    found = metrics(url)
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (len(schedule), 5 - len(schedule))
    used = len({page for x in schedule for page in x.pages})
    assert (found["kv_cache_pages_used"], found["kv_cache_usage_perc"]) == (used, used / PAGES)
    engine.cancel(*requests)
    del engine.step
    while engine.running or engine.waiting:
        time.sleep(0.01)
    assert metrics(url)["request_success_total/abort"] == 5


def test_an_engine_that_stops_ends_requests_with_an_error(engine: FakeEngine) -> None:
    with running(engine) as (_, url, _):
        engine.seconds = 0.05
        host, port = url.removeprefix("http://").split(":")
        content = json.dumps({"model": "fake", "prompt": "a", "max_tokens": 200})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall((head + content).encode())
            while not engine.running:
                time.sleep(0.01)
            engine.stop()
            assert engine.counts["finished_error"] == 1


def test_two_servers_in_one_process_count_apart(url: str) -> None:
    with running(FakeEngine()) as (_, other, _):
        complete(other)
        assert metrics(other)["generation_tokens_total"] == 5
    assert metrics(url)["generation_tokens_total"] == 0
    text = httpx.get(f"{url}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert text.headers["Content-Type"].startswith("application/openmetrics-text")
    assert text.text.endswith("# EOF\n")
    for accept in ("text/plain; version=x.y", "application/openmetrics-text; version=abc"):
        answer = httpx.get(f"{url}/metrics", headers={"Accept": accept})
        assert (answer.status_code, answer.headers["Content-Type"].partition(";")[0]) == (200, "text/plain")
