"""The time that a program needs on a GPU, separate from the time that the host needs to start it."""

from __future__ import annotations

import dataclasses
import time

from attnops_testing.bench.program import Ready

# The calls of a timed queue last at least this many seconds in all.
SHORTEST = 0.02


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of a call.

    Attributes:
        kernel_seconds: the time that each further call in a queue adds: the time on the GPU, or the time to start a
            call if that is longer.
        dispatch_seconds: the time that the host needs to start a call.
        latency_seconds: the time of a single call, from its start until its results are ready.
    """

    kernel_seconds: float
    dispatch_seconds: float
    latency_seconds: float

    @property
    def is_bound_by_dispatch(self) -> bool:
        """Whether the host starts calls no faster than the GPU finishes them, so that the GPU's time is not known."""
        return self.dispatch_seconds > 0.8 * self.kernel_seconds


def measure(program: Ready, rounds: int) -> Timing:
    """The shortest times of some rounds, which other work on the machine affects least.

    The time of a call is the difference between the shortest long queue and the shortest short one. The shortest of
    differences would be too short: it has the short queue that was delayed most.
    """
    _queue(program, 2)
    latency = min(_queue(program, 1)[1] for _ in range(max(3, rounds)))
    calls = max(4, round(SHORTEST / latency))
    # They take turns, so that a slower clock affects both.
    short, long = zip(*((_queue(program, calls), _queue(program, 3 * calls)) for _ in range(rounds)), strict=True)
    kernel = (min(x for _, x in long) - min(x for _, x in short)) / (2 * calls)
    return Timing(kernel, min(x for x, _ in short) / calls, latency)


def _queue(program: Ready, calls: int) -> tuple[float, float]:
    """The seconds until this many calls were started, and until the last one was finished."""
    start = time.perf_counter()
    for _ in range(calls):
        outputs = program.run()
    started = time.perf_counter() - start
    program.wait(outputs)
    return started, time.perf_counter() - start
