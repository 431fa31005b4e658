"""What HTTP itself may bring: other methods, encodings of bodies, and clients that go away while they send."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest
from lm_server import FakeEngine, running

BODY: dict[str, Any] = {"model": "fake", "prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(FakeEngine()) as (_, url, _):
        yield url


@pytest.mark.parametrize(("path", "methods"), [("completions", {"POST"}), ("models", {"GET", "HEAD"})])
def test_another_method_gets_the_ones_that_are_allowed(url: str, path: str, methods: set[str]) -> None:
    response = httpx.put(f"{url}/v1/{path}", json=BODY)
    assert response.status_code == 405
    assert set(response.headers["Allow"].split(", ")) == methods
    assert response.json()["error"]["message"] == "Method Not Allowed"


def test_a_compressed_body_is_refused_and_a_plain_one_may_say_so(url: str) -> None:
    content = json.dumps(BODY).encode()
    response = httpx.post(f"{url}/v1/completions", content=gzip.compress(content), headers={"Content-Encoding": "GZIP"})
    assert response.status_code == 415
    assert response.headers["Accept-Encoding"] == "identity"
    assert response.json()["error"]["message"] == "Content-Encoding: 'gzip' is not served; send the JSON itself"
    for headers in ({}, {"Content-Encoding": "identity"}):
        assert httpx.post(f"{url}/v1/completions", content=content, headers=headers, timeout=60).status_code == 200


class Errors(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def sending(url: str, length: str = "Content-Length: 500") -> Iterator[socket.socket]:
    """A client that has sent a part of its body."""
    address = urlparse(url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n4\r\n"
        connection.sendall(f"{head}{{".encode())
        yield connection


def test_a_client_that_goes_away_while_it_sends_is_no_error_in_the_log() -> None:
    errors, log = Errors(), logging.getLogger("uvicorn.error")
    with running(FakeEngine()) as (_, url, _):
        log.addHandler(errors)
        for length in ("Content-Length: 500", "Transfer-Encoding: chunked"):
            with sending(url, length) as connection:
                connection.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    assert connection.recv(1) == b""
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).status_code == 200
    log.removeHandler(errors)
    assert errors.texts == []


def test_a_client_that_still_sends_when_the_server_ends_gets_status_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_server.GRACE", 1)
    with running(FakeEngine()) as (server, url, _), sending(url) as connection:
        # The body is being read: its head came before that of another call.
        assert httpx.get(f"{url}/health").status_code == 200
        server.should_exit = True
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] == "the server is shutting down"
