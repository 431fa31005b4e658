"""Tests of engines: each in an environment of its own (`make engines`)."""

import os

import pytest

# libtpu is a compiler alone here, and asks no metadata server.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}


def pytest_configure(config: pytest.Config) -> None:
    """A plugin that can't be used is an error: else the native forward would pass for its kernel."""
    config.addinivalue_line("filterwarnings", "error::attnops.errors.PluginWarning")
