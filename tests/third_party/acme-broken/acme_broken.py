"""A third party's operation whose module can't be imported."""

import os
from pathlib import Path

# Tells the tests that this module was imported.
Path(os.environ["ATTNOPS_TEST_IMPORTS"], __name__).touch()

raise OSError("libacme.so.2: cannot open shared object file")
