"""Measurements: all contenders are checked first, then timed in turns."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, TypeVar

import jax

from attnops.errors import pass_interrupt
from attnops_testing.bench.cache_truth import CacheTruth
from attnops_testing.bench.caches import CacheCase
from attnops_testing.bench.case import Case, Refused
from attnops_testing.bench.program import Contender, Ready
from attnops_testing.bench.truth import Truth

# A timing lasts at least this many seconds, so that the clock's cost and resolution are negligible.
_SHORTEST: Final = 0.01

Status = Literal["ok", "wrong", "refused", "failed"]
Side = TypeVar("Side")


@dataclasses.dataclass
class Measurement:
    """The result of one contender in one case.

    Attributes:
        name: the contender's name.
        is_peer: whether the contender is another library's.
        case: the case.
        status: "ok", "wrong" (by the oracle), "refused" (before it ran) or "failed" (with an error); only ok is timed.
        reason: why the status is not "ok".
        what: what ran, for people to read.
        seconds: the time of a call in each round.
        temp_bytes: memory in addition to inputs and outputs, in bytes; None if unknown.
        compile_seconds: the time of tracing and compiling; None if nothing is compiled.
        checked_rows: the number of queries that were compared with the oracle, for each batch and head that is
            compared; over a cache, in all rows.
        bytes_seen: over a cache, the bytes of the tokens that queries see, as the program reads them.
    """

    name: str
    is_peer: bool
    case: Case | CacheCase
    status: Status = "ok"
    reason: str = ""
    what: str = ""
    seconds: list[float] = dataclasses.field(default_factory=list)
    temp_bytes: int | None = None
    compile_seconds: float | None = None
    checked_rows: int = 0
    bytes_seen: int | None = None

    @property
    def best(self) -> float | None:
        """The shortest time, which is least affected by other work on the machine."""
        return min(self.seconds, default=None)

    @property
    def median(self) -> float | None:
        """The median time."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of the tokens that queries see, in the shortest time."""
        return self.bytes_seen / self.best if self.bytes_seen and self.best else None

    def to_json(self) -> dict[str, object]:
        """Every field, for a program to read."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "case"}
        return self.case.to_json() | fields | {"best_seconds": self.best, "median_seconds": self.median}


def measure(
    entries: Sequence[tuple[Case | CacheCase, Contender]],
    *,
    rounds: int = 5,
    most_seconds: float = 30.0,
    shortest: float = _SHORTEST,
    progress: Callable[[str, int], None] = lambda what, steps: None,
) -> list[Measurement]:
    """Prepare and check all, then time them in turns, so that a slow period of the machine affects all.

    Args:
        entries: the contenders and their cases; entries that are to be compared must be in one call.
        rounds: the number of timings of each entry.
        most_seconds: an entry is not timed again after at least two timings that together lasted this long.
        shortest: the least seconds per timing. 0: a timing is one call, and the calls of other entries before it have
            replaced the contents of the processor's caches.
        progress: called with the next step and the number of completed steps, of ``len(entries) * (rounds + 1)``.
    """
    measurements, ready = [], []
    for case, contender in entries:
        progress(f"{contender.name}: checking", 0)
        measurement = Measurement(contender.name, contender.is_peer, case)
        program = _prepare(measurement, contender, case.truth)
        measurements.append(measurement)
        if program is not None:
            ready.append((measurement, program, _calls(program, shortest)))
        progress(f"{contender.name}: {measurement.status}", 1 if program else 1 + rounds)
    times = in_turns(
        {i: functools.partial(_time, program, calls) for i, (_, program, calls) in enumerate(ready)},
        rounds,
        enough=lambda i, seconds: len(seconds) >= 2 and ready[i][2] * sum(seconds) >= most_seconds,
        progress=lambda i, steps: progress(f"{ready[i][0].name}: timing", steps),
    )
    for i, seconds in times.items():
        ready[i][0].seconds = seconds
    return measurements


def in_turns(
    sides: Mapping[Side, Callable[[], float]],
    rounds: int,
    *,
    enough: Callable[[Side, list[float]], bool] = lambda side, seconds: False,
    progress: Callable[[Side, int], None] = lambda side, steps: None,
) -> dict[Side, list[float]]:
    """The times of each side, taken in turns.

    Args:
        sides: functions that give seconds.
        rounds: the number of timings of each side.
        enough: whether a side with these seconds is not timed again.
        progress: called with a side and 0 before its turn, 1 after it.
    """
    times: dict[Side, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, timed in sides.items():
            progress(side, 0)
            if not enough(side, times[side]):
                times[side].append(timed())
            progress(side, 1)
    return times


def _prepare(measurement: Measurement, contender: Contender, truth: Truth | CacheTruth) -> Ready | None:
    """The program if it exists and is right; otherwise None, with the reason in the measurement."""
    try:
        program = contender.prepare(measurement.case)
        measurement.what = program.what
        measurement.compile_seconds, measurement.temp_bytes = program.compile_seconds, program.temp_bytes
        measurement.bytes_seen = program.bytes_seen
        if program.results is None:
            return program
        results = program.results(truth.d_out)
    except Refused as error:
        measurement.status, measurement.reason = "refused", str(error)
        return None
    except BaseException as error:  # another library may raise anything
        pass_interrupt(error)
        first_line = next(iter(str(error).splitlines()), "")
        measurement.status, measurement.reason = "failed", f"{type(error).__name__}: {first_line}"
        return None
    try:
        truth.check(results)
    except AssertionError as error:
        measurement.status, measurement.reason = "wrong", str(error)
        return None
    except ValueError as error:  # the oracle overflows in this dtype, so that nothing can be compared with it
        measurement.status, measurement.reason = "failed", str(error)
        return None
    measurement.checked_rows = len(truth.rows)
    return program


def _calls(program: Ready, shortest: float) -> int:
    """The number of calls in a timing, from one call, which also warms up."""
    once = max(_time(program, 1), 1e-6)
    return max(1, round(shortest / once))


def _time(program: Ready, calls: int) -> float:
    # An accelerator runs calls one after another and is kept busy; a CPU would run them concurrently.
    wait_each = jax.default_backend() == "cpu"
    start = time.perf_counter()
    for _ in range(calls):
        outputs = program.run()
        if wait_each:
            program.wait(outputs)
    program.wait(outputs)
    return (time.perf_counter() - start) / calls
