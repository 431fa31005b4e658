"""A third party's operation whose requirements are not met, so that it is never imported."""

import os
from pathlib import Path

# Tells the tests that this module was imported.
Path(os.environ["ATTNOPS_TEST_IMPORTS"], __name__).touch()

Operation = None
