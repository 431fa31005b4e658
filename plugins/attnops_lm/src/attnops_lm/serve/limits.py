"""Limits per client: answers at a time, calls and tokens per minute."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Hashable

from attnops_lm.serve.errors import APIError

_FEW = 4096  # clients that are remembered without looking for ones that can be forgotten


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one client may use; None: without a limit.

    Attributes:
        answers: answers at a time, waiting ones included; a call has ``n`` of them for each prompt.
        calls: calls per minute.
        tokens: tokens of prompts and answers per minute.

    Raises:
        ValueError: a limit is less than 1.
    """

    answers: int | None = None
    calls: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1, or None for no limit")


NO_LIMITS = Limits()


class LimitError(APIError):
    """A client has reached a limit: status 429. ``reason`` is its name."""

    def __init__(self, reason: str, message: str, seconds: float) -> None:
        after = max(math.ceil(seconds), 1)
        super().__init__(429, f"{message}; send it again in {after} s", code="rate_limit_exceeded", retry_after=after)
        self.reason = reason


class Bucket:
    """A token bucket: it is full at first, with an amount for one minute, and refills steadily. It may be overdrawn."""

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self.size, self.clock, self.lock = size, clock, threading.Lock()
        self._level, self._at = float(size), clock()

    def take(self, amount: int) -> float:
        """Take an amount; what is left, perhaps less than nothing."""
        with self.lock:  # threads of the engine and of HTTP
            now = self.clock()
            self._level = min(self._level + (now - self._at) * self.size / 60, self.size) - amount
            self._at = now
            return self._level

    def wait(self) -> float:
        """Seconds until at least 1 is left."""
        return max(1 - self.take(0), 0) * 60 / self.size


class Client:
    """What one client uses."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.limits, self.answers = limits, 0
        self.calls = None if limits.calls is None else Bucket(limits.calls, clock)
        self.tokens = None if limits.tokens is None else Bucket(limits.tokens, clock)

    @property
    def is_idle(self) -> bool:
        """Whether nothing would change if the client was forgotten."""
        return not self.answers and all(x is None or x.take(0) >= x.size for x in (self.calls, self.tokens))

    def begin_call(self) -> None:
        """Count a call.

        Raises:
            LimitError: a limit is reached; the call is not counted.
        """
        self._check_answers(1)
        for name, bucket in (("calls", self.calls), ("tokens", self.tokens)):
            if bucket is not None and (seconds := bucket.wait()) > 0:
                message = f"this client has used its {bucket.size} {name} per minute"
                raise LimitError(f"{name}_per_minute", message, seconds)
        if self.calls is not None:
            self.calls.take(1)

    def begin_answers(self, count: int) -> None:
        """Count answers that begin.

        Raises:
            APIError: there are more answers than the client may ever have.
            LimitError: there are too many for now; nothing is counted.
        """
        self._check_answers(count)
        self.answers += count

    def _check_answers(self, count: int) -> None:
        most = self.limits.answers
        if most is not None and count > most:
            raise APIError(400, f"{count} answers in a call must be at most {most}; ask for fewer", code="too_many")
        if most is not None and self.answers + count > most:
            message = f"this client has {self.answers} answers at a time, and {count} more would be above {most}"
            raise LimitError("answers_at_a_time", message, 1)

    def use(self, tokens: int) -> None:
        """Count tokens; from any thread."""
        if self.tokens is not None:
            self.tokens.take(tokens)

    def end_answers(self, count: int) -> None:
        """Count answers that have ended, or whose client has gone."""
        self.answers -= count


class Clients:
    """The clients of a server, by API key or address. A client that uses nothing is forgotten when there are many."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.clock, self.most = limits, clock, _FEW
        self.clients: dict[Hashable, Client] = {}

    def find(self, name: Hashable) -> Client:
        """The client of this name, a new one if there is none."""
        if name not in self.clients:
            if len(self.clients) >= self.most:
                self.clients = {key: x for key, x in self.clients.items() if not x.is_idle}
                self.most = max(_FEW, 2 * len(self.clients))
            self.clients[name] = Client(self.limits, self.clock)
        return self.clients[name]
