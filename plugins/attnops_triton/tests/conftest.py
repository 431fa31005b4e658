"""What the tests of attnops-triton need: a JAX that looks for no GPU."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
