"""Prefill in one process and decoding in another, over HTTP on this machine; each is killed while requests run.

From the repository's root (``pip install attnops-lm safetensors``)::

    python -m examples.disaggregated

starts both processes, kills and restarts each while requests run, and exits with 1 unless every request was answered
with the tokens that one process gives. ``prefill PORT`` and ``decode PORT URL`` start one of them alone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import http.server
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .decode import Decode, wait_until
from .prefill import Prefill

MAX_LENGTH, SECONDS = 64, 300.0
PROMPTS = [[(7 * i + 3 * j) % 96 for j in range(5 + 3 * i)] for i in range(10)]
MAX_TOKENS = 24


def post(url: str, body: Any) -> bytes:
    """The answer of a server."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        data: bytes = response.read()
    return data


def serve(port: int, answer: Callable[[dict[str, Any]], bytes]) -> None:
    """Answer requests, each in a thread: 400 for wrong ones, and 503 if the other process does not answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                status, data = 200, answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            except (OSError, http.client.HTTPException) as error:
                status, data = 503, str(error).encode()
            except (KeyError, TypeError, ValueError) as error:
                status, data = 400, str(error).encode()
            with contextlib.suppress(ConnectionError):  # who asked is gone
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def model() -> Any:
    """A small random model, the same in every process."""
    from attnops_lm.testing import small

    return small("llama")


def start(role: str, port: int, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a process of this example."""
    command = [sys.executable, "-m", "examples.disaggregated", role, str(port), *arguments]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2])


def wait_for(port: int) -> None:
    """Wait until a process listens."""

    def listens() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens, SECONDS, f"that a process listens on {port}")


def alone() -> list[list[int]]:
    """The tokens of every prompt by one process."""
    computes = Prefill(model(), MAX_LENGTH)
    decode = Decode(model(), computes, max_length=MAX_LENGTH)
    threading.Thread(target=decode.run, daemon=True).start()
    return [decode(prompt, MAX_TOKENS) for prompt in PROMPTS]


def killed() -> tuple[list[list[int]], int]:
    """The tokens of every prompt by two processes, each killed once, and how often a request was sent again."""
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    again, answered, lock = [0], [0], threading.Lock()
    roles = ("prefill", ports[0]), ("decode", ports[1], urls[0])
    processes = [start(*role) for role in roles]  # type: ignore[arg-type]

    def ask(prompt: list[int]) -> list[int]:
        end = time.monotonic() + SECONDS
        while True:
            try:
                tokens: list[int] = json.loads(post(urls[1], {"tokens": prompt, "max_tokens": MAX_TOKENS}))
            except (OSError, http.client.HTTPException) as error:  # nothing is kept of this request: send it again
                if getattr(error, "code", 503) != 503 or time.monotonic() > end:
                    raise
                with lock:
                    again[0] += 1
                time.sleep(0.5)
                continue
            with lock:
                answered[0] += 1
            return tokens

    try:
        for port in ports:
            wait_for(port)
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
            asked = [pool.submit(ask, prompt) for prompt in PROMPTS]
            for i, least in ((0, 1), (1, 4)):
                wait_until(lambda least=least: answered[0] >= least, SECONDS, f"{least} answers")
                before = again[0]
                processes[i].send_signal(signal.SIGKILL)
                processes[i].wait()
                wait_until(lambda before=before: again[0] > before, SECONDS, "a failed request")
                processes[i] = start(*roles[i])  # type: ignore[arg-type]
                wait_for(ports[i])
            return [x.result(SECONDS) for x in asked], again[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    """Run a role, or the demonstration."""
    if sys.argv[1:2] == ["prefill"]:
        computes = Prefill(model(), MAX_LENGTH)
        serve(int(sys.argv[2]), lambda body: computes(body["tokens"]))
    elif sys.argv[1:2] == ["decode"]:
        # Slow enough to be killed while requests run.
        decode = Decode(model(), lambda x: post(sys.argv[3], {"tokens": x}), max_length=MAX_LENGTH, seconds=0.05)

        def answer(body: dict[str, Any]) -> bytes:
            return json.dumps(decode(body["tokens"], body["max_tokens"])).encode()

        threading.Thread(target=serve, args=(int(sys.argv[2]), answer), daemon=True).start()
        decode.run()  # here, so that an error ends the process
    wanted, (found, again) = alone(), killed()
    print(f"{sum(x == y for x, y in zip(found, wanted, strict=True))} of {len(wanted)} requests have the tokens of one "
          f"process; {again} were sent again")  # fmt: skip
    return int(found != wanted)


if __name__ == "__main__":
    sys.exit(main())
