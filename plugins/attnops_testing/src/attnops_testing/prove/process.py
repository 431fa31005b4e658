"""Runs a step in a process of its own, so that a crash or a hang is its result and not the end."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from attnops_testing.prove.step import Ending, Result, Step

# What each process imports, once: a server that has imported it, and has not initialised JAX's backends, forks.
_WORK: Final = "attnops_testing.prove.work"
# Before the limit, a process prints its Python stack, the innermost call first; after it, it is killed.
_BEFORE: Final = 2.0
_AFTER: Final = 60
# The first and the last lines of its output that are kept.
_LINES: Final = 30
# How long a killed process may take to end. One in a driver's call may never end, and the others go on without it.
_END: Final = 10.0
# Python asks how each process ended when it starts one: if two threads ask at once, one of them loses the answer.
_LOCK: Final = threading.Lock()


def run(step: Step, stopped: threading.Event | None = None) -> Result:
    """Run a step in a process of its own.

    The process, and what it started, are killed after ``step.seconds``. Its output is kept, and is part of the result
    if it crashed or hung. No process is started once ``stopped`` is set: set it before `kill_all`.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer, output = Path(folder, "answer"), Path(folder, "output")
        start = time.perf_counter()
        process = _context().Process(target=_child, args=(dataclasses.asdict(step), str(answer), str(output)))
        with _LOCK:
            if stopped is not None and stopped.is_set():
                return Result(Ending.CRASH, "the run was stopped before this step", 0.0)
            process.start()
        try:
            wait([process.sentinel], step.seconds)
            with _LOCK:
                hung = process.is_alive()
        finally:  # also where this process is stopped
            ended = _kill(process)
        seconds = time.perf_counter() - start
        if answer.exists() and not hung:
            given = json.loads(answer.read_text())
            return Result(Ending(given["ending"]), given["detail"], seconds, given["value"])
        printed = output.read_text(errors="replace") if output.exists() else ""
        lines = printed.splitlines()
        left = [f"… {len(lines) - 2 * _LINES} lines …"] if len(lines) > 2 * _LINES else []
        last = "\n".join((*lines[:_LINES], *left, *lines[_LINES:][-_LINES:]))
        if hung:
            what = "was killed" if ended else "can't be killed: a driver may hold it, and the device"
            return Result(Ending.HANG, f"did not end in {step.seconds:g} s and {what}", seconds, output=last)
        return Result(Ending.CRASH, _exit(process.exitcode), seconds, output=last)


def _kill(process: BaseProcess) -> bool:
    """Kill a process and all that it started, such as compilers; whether it ended."""
    if process.pid is not None and hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has no group yet, or all ended
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(_END)
    if process.is_alive():
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # Python waits for them at its end
    return not process.is_alive()


def kill_all() -> None:
    """Kill the processes of all steps that run."""
    with _LOCK:
        processes = multiprocessing.active_children()
    for process in processes:
        _kill(process)


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"the process died of {signal.Signals(-code).name}"
        except ValueError:
            return f"the process died of signal {-code}"
    return f"the process ended with status {code}"


@functools.cache
def _context() -> ForkServerContext | SpawnContext:
    if sys.platform != "linux":  # macOS's frameworks do not survive a fork
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_WORK])
    return context


def _child(step: dict[str, Any], answer: str, output: str) -> None:
    """Run the step's function, and write its answer as a whole; everything printed goes to the file ``output``."""
    if hasattr(os, "setsid"):  # a group of its own, which is killed as a whole
        os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    if hasattr(signal, "alarm"):  # it ends even where the process that would kill it is gone
        signal.alarm(math.ceil(step["seconds"]) + _AFTER)
    faulthandler.enable(2)
    faulthandler.dump_traceback_later(max(step["seconds"] - _BEFORE, 0.5 * step["seconds"]), file=2)
    from attnops_testing.prove import work

    ending, detail, value = getattr(work, step["work"])(**step["arguments"])
    faulthandler.cancel_dump_traceback_later()
    text = json.dumps({"ending": ending, "detail": detail, "value": value}, default=str)
    part = Path(answer).with_suffix(".part")
    part.write_text(text)
    part.rename(answer)
    os._exit(0)  # destructors of a device's library may hang or crash after the answer is known
