"""Prints what installing needs and this machine lacks, one line each. Runs with any Python 3, also one too old for
attnops.
"""

import importlib.util
import os
import shutil
import sys

OLDEST = (3, 11)
# What all targets together install, in bytes; the demo alone needs a third.
ROOM = 4 << 30


def lacking(folder):
    """What is missing for a virtual environment in this folder."""
    if sys.version_info[:2] < OLDEST:
        text = "attnops needs Python {}.{} or newer, but {} is {}.{}; choose one with make PYTHON=..."
        return [text.format(OLDEST[0], OLDEST[1], sys.executable, *sys.version_info[:2])]
    missing = []
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        missing.append(sys.executable + " has no venv with pip; install it (Debian, Ubuntu: apt install python3-venv)")
    where = os.path.dirname(os.path.abspath(folder))
    free = shutil.disk_usage(where).free
    if free < ROOM:
        text = "up to {:.1f} GB are installed in {}, but {:.1f} GB are free; clear some, or choose another VENV=..."
        missing.append(text.format(ROOM / 1e9, where, free / 1e9))
    if not os.access(where, os.W_OK):
        missing.append(where + " can't be written to; choose another folder with VENV=...")
    return missing


if __name__ == "__main__":
    sys.exit("\n".join(lacking(sys.argv[1])) or 0)
