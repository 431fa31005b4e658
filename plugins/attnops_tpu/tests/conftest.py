"""What the tests of attnops-tpu need: a compiler that asks for no TPU, before JAX starts."""

import os
from pathlib import Path

import pytest
from attnops_tpu.aot import environment

os.environ.update(environment())

import jax

jax.config.update("jax_num_cpu_devices", 8)
HERE = Path(__file__).parent / "flash"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter takes seconds a problem: a few of the suite's checks are quick here, every pair is exhaustive."""
    suite = [item for item in items if item.path == HERE / "test_conformance.py"]
    quick = [item for item in suite if "test_sampled_pair" in item.name][::20]
    quick += [item for item in suite if item.name == "test_behaviour[refusals are listed]"]
    features = [item for item in suite if "test_feature" in item.name]
    for item in suite:
        # Every third feature alone is slow; pairs take too long for every run. Of memory the compiler says more.
        again = "_pair" in item.name or "memory_growth" in item.name or (item not in features[::3] and item in features)
        if again and item not in quick:
            item.add_marker(pytest.mark.exhaustive)
        if item.cls is not None and item not in quick:
            item.add_marker(pytest.mark.slow)
