"""Suppresses what other libraries print while they are imported or look for devices."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
from collections.abc import Iterator

__all__ = ["find_devices", "quiet"]


class Kept:
    """The handle of a context of `quiet`; `show` prints what was printed in the context."""

    def __init__(self) -> None:
        self.shown = False

    def show(self) -> None:
        """Print, when the context ends, what was printed in it."""
        self.shown = True


@contextlib.contextmanager
def quiet(verbose: bool = False) -> Iterator[Kept]:
    """A context in which file descriptor 2 is a temporary file, also for C++ libraries, such as libtpu without a TPU.

    The file is printed at the end if the context raises, if `Kept.show` is called, or if ``verbose``. If the process
    crashes, Python's traceback is printed.
    """
    kept = Kept()
    try:
        sys.stderr.flush()
        stderr = os.dup(2)
    except (OSError, ValueError, AttributeError):  # there is no stderr
        yield kept
        return
    was_enabled = faulthandler.is_enabled()
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        if not was_enabled:
            faulthandler.enable(stderr)
        try:
            yield kept
        except BaseException:
            kept.show()
            raise
        finally:
            if not was_enabled:
                faulthandler.disable()
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            if verbose or kept.shown:
                file.seek(0)
                with contextlib.suppress(OSError):
                    os.write(2, file.read())


def find_devices() -> None:
    """Have JAX look for its devices; what its libraries print is shown only if that fails."""
    import jax

    with quiet() as noise:
        try:
            jax.devices()
        except RuntimeError:  # the command will report it
            noise.show()
