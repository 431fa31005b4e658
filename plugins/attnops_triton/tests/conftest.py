"""What the tests of attnops-triton need: a JAX that looks for no GPU, and an order of patience."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
HERE = Path(__file__).parent / "flash"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter takes seconds a problem: some of the suite's checks are quick here, every pair is exhaustive."""
    suite = [item for item in items if item.path == HERE / "test_conformance.py" and item.cls is not None]
    sampled = [item for item in suite if "test_sampled_pair" in item.name]
    quick = sampled[::12] + [item for item in suite if "refusals" in item.name]
    features = [item for item in suite if "test_feature" in item.name]
    for item in suite:
        if item not in quick:
            item.add_marker(pytest.mark.slow)
            # Every other feature alone is for every run.
            if "_pair" in item.name or item in features[1::2]:
                item.add_marker(pytest.mark.exhaustive)
