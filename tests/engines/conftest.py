"""Tests of engines: each in an environment of its own (`make engines`)."""

import os

# libtpu is a compiler alone here, and asks no metadata server.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
