"""Load tests: requests to a server as clients send them, and the time that shared prefixes save.

``python -m attnops_lm.load_test requests`` sends completions to a running server, C at a time; if the server has keys,
with the one in OPENAI_API_KEY;
``python -m attnops_lm.load_test prefix`` times first tokens of requests with one prefix, without a server.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import openai

if TYPE_CHECKING:
    from attnops_lm.serve import Engine

SUBJECTS = ("the sea", "a fox", "winter", "Paris", "bread", "the moon", "a violin", "rain", "chess", "a bridge")
PROMPTS = tuple(f"{verb} {subject}" for verb in ("Write about", "A poem on", "What is") for subject in SUBJECTS)


@dataclasses.dataclass(frozen=True)
class RequestOutcome:
    """The outcome of one request.

    Attributes:
        prompt: the prompt that was sent.
        text: the text that was received.
        pieces: the number of events with text.
        first: seconds until the first of these events; nan if there was none.
        total: seconds until the end of the answer.
        is_cancelled: whether the client closed the connection, after the first event with text.
    """

    prompt: str
    text: str
    pieces: int
    first: float
    total: float
    is_cancelled: bool


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """All answers, and the seconds that all of them took."""

    answers: tuple[RequestOutcome, ...]
    seconds: float

    def agreement(self, alone: dict[str, str]) -> tuple[int, int]:
        """The number of answers that equal ``alone[prompt]``, and the number that were not cancelled."""
        ended = [x for x in self.answers if not x.is_cancelled]
        return sum(x.text == alone[x.prompt] for x in ended), len(ended)

    def print(self) -> None:
        """Print requests and pieces of text per second, and the time to first tokens."""
        first = np.array([x.first for x in self.answers if x.pieces])
        ended = sum(not x.is_cancelled for x in self.answers)
        pieces = sum(x.pieces for x in self.answers)
        print(
            f"{ended} requests answered, {len(self.answers) - ended} cancelled, in {self.seconds:.1f} s: "
            f"{ended / self.seconds:.1f} requests/s, {pieces / self.seconds:.0f} tokens/s; first token after "
            f"{np.median(first):.2f} s (median), {np.quantile(first, 0.95):.2f} s (95 %)"
        )


async def ask(
    client: openai.AsyncOpenAI, model: str, prompt: str, max_tokens: int, cancel: bool = False
) -> RequestOutcome:
    """Request one streamed completion; if ``cancel``, close it after its first piece of text."""
    begin, first = time.perf_counter(), float("nan")
    pieces: list[str] = []
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
    )
    async with stream:
        async for event in stream:
            if text := event.choices[0].text:
                first = first if pieces else time.perf_counter() - begin
                pieces.append(text)
                if cancel:
                    break
    return RequestOutcome(prompt, "".join(pieces), len(pieces), first, time.perf_counter() - begin, cancel)


async def load(
    client: openai.AsyncOpenAI,
    model: str,
    prompts: Sequence[str],
    *,
    requests: int,
    concurrency: int,
    max_tokens: Sequence[int] = (16,),
    cancel_every: int = 0,
) -> LoadReport:
    """Send requests, ``concurrency`` at a time.

    Args:
        client: a client of the server.
        model: the model's name.
        prompts: used in turn.
        requests: the number of requests.
        concurrency: the number of requests at a time.
        max_tokens: the limit of each answer, used in turn.
        cancel_every: every n-th request is closed after its first piece of text; 0: none.
    """
    numbers = iter(range(requests))
    lengths = dict(zip(prompts, itertools.cycle(max_tokens), strict=False))
    answers: list[RequestOutcome] = []

    async def worker() -> None:
        for i in numbers:
            prompt = prompts[i % len(prompts)]
            cancel = cancel_every > 0 and i % cancel_every == cancel_every - 1
            answers.append(await ask(client, model, prompt, lengths[prompt], cancel))

    begin = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return LoadReport(tuple(answers), time.perf_counter() - begin)


def first_tokens(engine: Engine, prefix: Sequence[int], ends: Sequence[Sequence[int]]) -> list[float]:
    """Seconds until the first token of each of the requests ``prefix + end``, submitted together to an idle engine."""
    from attnops_lm.serve import Request

    seconds: list[float] = []
    begin = time.perf_counter()
    engine.submit(
        *(Request([*prefix, *end], 1, emit=lambda _: seconds.append(time.perf_counter() - begin)) for end in ends)
    )
    while engine.step():
        pass
    return seconds


def measure_prefix(engine: Engine, *, requests: int = 16, length: int = 1024) -> dict[bool, list[float]]:
    """`first_tokens` by whether the engine shares prefixes; each time with a prefix that is new to it.

    Args:
        engine: idle, with room for requests of ``length`` + 8 tokens.
        requests: the number of requests.
        length: tokens of the prefix.
    """
    generator = np.random.default_rng(0)
    engine.warm()
    results, sharing = {}, engine.pages.sharing
    for engine.pages.sharing in (False, True):
        prefix = generator.integers(0, engine.vocab_size, length).tolist()
        ends = generator.integers(0, engine.vocab_size, (requests, 8)).tolist()
        results[engine.pages.sharing] = first_tokens(engine, prefix, ends)
    engine.pages.sharing = sharing
    return results


async def _requests(url: str, requests: int, concurrency: int, max_tokens: int, cancel_every: int) -> None:
    async with openai.AsyncOpenAI(
        base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"), timeout=None
    ) as client:
        model = (await client.models.list()).data[0].id
        alone = await load(client, model, PROMPTS, requests=len(PROMPTS), concurrency=1, max_tokens=(max_tokens,))
        print("One at a time: ", end="")
        alone.print()
        report = await load(
            client, model, PROMPTS, requests=requests, concurrency=concurrency, max_tokens=(max_tokens,),
            cancel_every=cancel_every,
        )  # fmt: skip
        print(f"{concurrency} at a time: ", end="")
        report.print()
        same, ended = report.agreement({x.prompt: x.text for x in alone.answers})
        print(f"{same} of {ended} answers equal the answer to their prompt alone")


def _prefix(requests: int, length: int, operation: str) -> None:
    from attnops_lm.serve import Engine, load_model

    pages = (length // 16 + 2) * requests
    engine = Engine(*load_model(None, operation), rows=requests, pages=pages, max_length=length + 16)
    results = measure_prefix(engine, requests=requests, length=length)
    for sharing, seconds in results.items():
        print(
            f"{requests} requests {'share' if sharing else 'do not share'} a prefix of {length} tokens: first tokens "
            f"after {np.mean(seconds):.2f} s (mean), {max(seconds):.2f} s (last)"
        )
    apart, shared = results[False], results[True]
    print(f"{np.mean(apart) / np.mean(shared):.1f} times sooner (mean), {max(apart) / max(shared):.1f} times (last)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the two measurements."""
    parser = argparse.ArgumentParser(prog="load_test", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    load_ = kinds.add_parser("requests", help="send completions to a running server")
    load_.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the address of the server")
    load_.add_argument("-n", "--requests", type=int, default=200, help="the number of requests")
    load_.add_argument("-c", "--concurrency", type=int, default=16, help="requests at a time")
    load_.add_argument("--max-tokens", type=int, default=16, help="the most tokens per answer")
    load_.add_argument("--cancel-every", type=int, default=0, help="close every n-th request; 0: none")
    prefix = kinds.add_parser("prefix", help="time first tokens with and without a shared prefix")
    prefix.add_argument("-n", "--requests", type=int, default=16, help="the number of requests")
    prefix.add_argument("--length", type=int, default=1024, help="tokens of the prefix")
    prefix.add_argument("--operation", default="flash", help="the attention operation")
    given = parser.parse_args(arguments)
    if given.kind == "prefix":
        _prefix(given.requests, given.length, given.operation)
    else:
        asyncio.run(_requests(given.url, given.requests, given.concurrency, given.max_tokens, given.cancel_every))


if __name__ == "__main__":
    main()
