"""How a server ends, with real sockets: streams end with an error, and it does not wait for ever for clients."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from lm_server import FakeEngine, running

from attnops_lm.serve.process import HTTPServer, serve

SUPPORT = Path(__file__).parents[1] / "support"
STREAM: dict[str, Any] = {"model": "fake", "prompt": "a", "max_tokens": 4000, "stream": True}


def events_of(response: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in response.iter_lines() if line)


def check_end(events: list[str], message: str) -> None:
    """Assert that a stream ends with an event with the error, and then with the usual last event."""
    assert events[-1] == "[DONE]"
    assert message in json.loads(events[-2])["error"]["message"]


def test_a_signal_ends_open_streams_with_an_error_and_then_the_server() -> None:
    with running(FakeEngine(seconds=0.01)) as (server, url, thread):
        with httpx.stream("POST", f"{url}/v1/completions", json=STREAM, timeout=60) as response:
            events = events_of(response)
            first = [next(events) for _ in range(3)]
            server.handle_exit(signal.SIGTERM, None)
            check_end([*first, *events], "the server is shutting down")
        thread.join(60)
        assert not thread.is_alive()
        server._captured_signals.clear()


def test_an_answer_that_is_not_streamed_is_503_when_the_server_ends() -> None:
    engine = FakeEngine(seconds=0.01)
    with running(engine) as (server, url, _), futures.ThreadPoolExecutor() as pool:
        body = STREAM | {"stream": False}
        waiting = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        while not engine.counts["steps"]:
            time.sleep(0.01)
        server.should_exit = True
        assert waiting.result().status_code == 503
        assert waiting.result().json()["error"]["message"] == "the server is shutting down"


@pytest.mark.slow
def test_openais_client_raises_what_ended_its_stream() -> None:
    with (
        running(FakeEngine(seconds=0.01)) as (server, url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(**STREAM)
        next(iter(stream))
        server.engine.stop()
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_engine_fails_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    startup = HTTPServer.startup

    async def recorded(self: HTTPServer, sockets: Any = None) -> None:
        await startup(self, sockets)
        started.append(self.servers[0].sockets[0].getsockname()[1])
        up.set()

    up, status = threading.Event(), []
    monkeypatch.setattr(HTTPServer, "startup", recorded)
    engine = FakeEngine(fails_after=3)
    thread = threading.Thread(target=lambda: status.append(serve(engine, "fake", port=0)))
    thread.start()
    try:
        assert up.wait(60)
        body = STREAM | {"stream": False}
        response = httpx.post(f"http://127.0.0.1:{started[0]}/v1/completions", json=body, timeout=60)
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        assert "RuntimeError: the device is lost" in response.text
        thread.join(60)
        assert status == [1]
    finally:
        engine.stop()
        thread.join(60)


@contextlib.contextmanager
def process(**options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a separate process, and its URL."""
    code = (
        "import sys; from attnops_lm.serve.process import serve\n"
        "from lm_server import FakeEngine\n"
        f"sys.exit(serve(FakeEngine(**{options!r}), 'fake', port=0))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=SUPPORT, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield server, read_until(server, r"running on (http://\S+)")
        finally:
            server.kill()


def read_until(server: subprocess.Popen[str], pattern: str) -> str:
    assert server.stderr is not None
    seen = []
    for line in server.stderr:
        seen.append(line)
        if found := re.search(pattern, line):
            return found[found.re.groups]
    raise AssertionError("".join(seen))


def end_of(server: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit status, and the rest of stderr."""
    assert server.stderr is not None
    status = server.wait(60)
    return status, server.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_process_ends_by_a_signal_during_a_stream(sent: signal.Signals, status: int) -> None:
    with process(seconds=0.05) as (server, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=STREAM, timeout=60) as response:
            events = events_of(response)
            first = [next(events) for _ in range(3)]
            server.send_signal(sent)
            check_end([*first, *events], "the server is shutting down")
        found, text = end_of(server)
        assert found == status
        assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_a_client_that_sends_no_end_is_waited_for_until_a_limit_or_a_second_signal(signals: int) -> None:
    with process() as (server, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            httpx.get(f"{url}/health")  # answered after the request above was read
            server.send_signal(signal.SIGINT)
            read_until(server, "Waiting for")
            if signals == 2:
                server.send_signal(signal.SIGINT)
            status, text = end_of(server)
        assert status == (0 if signals == 1 else 128 + signal.SIGINT)
        assert "Traceback" not in text


@pytest.mark.slow
def test_a_process_whose_engine_fails_has_a_status_for_its_supervisor() -> None:
    with process(fails_after=3) as (server, url):
        assert httpx.post(f"{url}/v1/completions", json=STREAM | {"stream": False}, timeout=60).status_code == 500
        status, text = end_of(server)
        assert status == 1
        assert "RuntimeError: the device is lost" in text
