"""A limit on the seconds that a check may last."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

from attnops_testing.runner import Outcome, Status


def default_limit(interpret: bool) -> float:
    """Seconds for a case; an interpreter needs more."""
    return 300 if interpret else 100


@contextlib.contextmanager
def limited(name: str, seconds: float, report: Callable[[Outcome], None]) -> Iterator[None]:
    """A context that ends the process with status 1 if it is not left in time.

    Compiled code can't be interrupted. If it never releases Python's lock, this context can't end it either.

    Args:
        name: the name of the check.
        seconds: the time limit.
        report: is called first, in another thread, with the outcome and the stack at that time.
    """
    checking = threading.get_ident()

    def end() -> None:
        stack = "".join(traceback.format_stack(sys._current_frames()[checking]))
        if "/pdb.py" in stack:
            return  # somebody is debugging it
        try:
            report(Outcome(name, Status.WRONG, f"did not end in {seconds:g} s", "Timeout", stack))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
