"""A soak test of a running server: for minutes clients ask at random times, some leave early, two never read at all,
and some send bodies that are too large or wrong::

    attnops serve --rows 8 --pages 16 --max-length 128 --chunks 64 &
    python -m attnops_lm.soak_test --pid $! --minutes 20

Exits with 1 if an answer differs from the answer to its prompt alone, if a status is 500 or above, if a refusal has
another status than it should, or if the server's memory grows. ``--pages`` should be about a third of what the rows
need, so that requests are preempted. Needs Linux.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import httpx
import typer

from attnops_lm.load_test import PROMPTS

LENGTHS: Final = (8, 24, 48, 96)  # tokens of an answer, in turn
_WARM: Final = 0.25  # the share of the time after which memory may not grow
_TOLERANCE: Final = 32 << 20


class Soak:
    """The clients of one run, and what they found."""

    def __init__(self, client: httpx.AsyncClient, model: str, seed: int) -> None:
        self.client, self.model, self.random = client, model, random.Random(seed)
        self.alone: dict[str, str] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []

    def body(self, prompt: str) -> dict[str, Any]:
        """A request for the answer to a prompt, which is as long at each time."""
        tokens = LENGTHS[PROMPTS.index(prompt) % len(LENGTHS)]
        return {"model": self.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}

    async def answer(self, prompt: str, most: int | None = None) -> str:
        """The text, or its first ``most`` pieces, after which the connection is closed."""
        pieces: list[str] = []
        async with self.client.stream("POST", "/v1/completions", json=self.body(prompt)) as response:
            if response.status_code != 200:
                await response.aread()
                self.faults.append(f"status {response.status_code} for {prompt!r}: {response.text[:200]}")
                return ""
            async for line in response.aiter_lines():
                if len(pieces) == most:
                    break
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        self.faults.append(f"{prompt!r} ended with {event['error']['message']}")
                        return ""
                    pieces.append(event["choices"][0]["text"])
        return "".join(pieces)

    async def ask(self, prompt: str) -> None:
        """Ask for one answer; a fifth of the clients leave after some pieces."""
        if self.random.random() < 0.2:
            await self.answer(prompt, self.random.randrange(8))
            self.counts["cancelled"] += 1
        else:
            text = await self.answer(prompt)
            self.counts["answered"] += 1
            if text != self.alone[prompt]:
                self.faults.append(f"{prompt!r} has {text!r}, but alone {self.alone[prompt]!r}")

    async def refused(self, status: int, **fields: Any) -> None:
        """Send what the server must refuse."""
        response = await self.client.post("/v1/completions", json=self.body(PROMPTS[0]) | fields)
        self.counts[f"status {response.status_code}"] += 1
        if response.status_code != status:
            self.faults.append(f"status {response.status_code} for {list(fields)}, which needs {status}")

    async def checked(self, call: Coroutine[Any, Any, None]) -> None:
        """Await a call; a connection that fails is a fault."""
        try:
            await call
        except httpx.HTTPError as error:
            self.faults.append(f"{type(error).__name__}: {error}")

    async def never_reads(self) -> None:
        """Ask for a stream of some 800 kB, and never read it; the system takes few bytes of it."""
        address = urlsplit(str(self.client.base_url))
        text = json.dumps(self.body(PROMPTS[3]) | {"n": 4, "logprobs": 20})
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect((address.hostname, address.port))
        _, writer = await asyncio.open_connection(sock=connection, limit=1)
        key = self.client.headers.get("Authorization", "none")
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(text)}"
        )
        writer.write(f"{head}\r\n\r\n{text}".encode())
        try:
            await asyncio.sleep(3600)
        finally:
            writer.close()

    async def run(self, requests: int, seconds: float, memory: Any) -> list[int]:
        """Send the requests at random times; returns the memory at each tenth of the time after `_WARM` of it."""
        for prompt in PROMPTS:
            self.alone[prompt] = await self.answer(prompt)
        times: list[float] = []
        while len(times) < requests:  # clients come alone and in crowds
            times += [self.random.uniform(0, seconds)] * min(self.random.randint(1, 24), requests - len(times))
        times.sort()
        begin, tasks, readings = time.monotonic(), [asyncio.create_task(self.never_reads()) for _ in range(2)], []
        idle = len(tasks)
        for i, at in enumerate(times):
            await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
            calls = [self.ask(PROMPTS[i % len(PROMPTS)])]
            if i % 25 == 0:
                calls += [self.refused(413, prompt="a" * 2_000_000), self.refused(400, temperature=-1)]
            tasks += [asyncio.create_task(self.checked(call)) for call in calls]
            if i >= _WARM * requests and i % max(requests // 10, 1) == 0:
                readings.append(memory())
        await asyncio.gather(*tasks[idle:])
        readings.append(memory())
        for task in tasks[:idle]:
            task.cancel()
        return readings


def resident(pid: int) -> int:
    """The bytes of a process in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(
    pid: Annotated[int, typer.Option(help="The server's process.")],
    url: Annotated[str, typer.Option(help="Its address.")] = "http://127.0.0.1:8000",
    requests: Annotated[int, typer.Option(min=1)] = 500,
    minutes: Annotated[float, typer.Option(min=0.0)] = 20.0,
    seed: int = 0,
) -> None:
    """Send requests for some minutes, and check each answer and the server's memory."""

    async def soak() -> Soak:
        headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None) as client:
            model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
            found = Soak(client, model, seed)
            memory = await found.run(requests, 60 * minutes, lambda: resident(pid))
            print("memory, MB: " + ", ".join(f"{x / 1e6:.0f}" for x in memory))
            if memory[-1] > memory[0] + _TOLERANCE:
                found.faults.append(f"memory grew from {memory[0] / 1e6:.0f} to {memory[-1] / 1e6:.0f} MB")
            metrics = (await client.get("/metrics")).text
            shown = ("attnops:num_preemptions", "attnops:request_success")
            print("\n".join(line for line in metrics.splitlines() if line.startswith(shown)))
            return found

    found = asyncio.run(soak())
    print(", ".join(f"{count} {name}" for name, count in sorted(found.counts.items())))
    for fault in found.faults[:20]:
        print(f"fault: {fault}", file=sys.stderr)
    print(f"{len(found.faults)} faults")
    raise typer.Exit(bool(found.faults))


if __name__ == "__main__":
    typer.run(main)
