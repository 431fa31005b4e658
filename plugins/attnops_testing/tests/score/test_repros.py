"""Scripts that show faults of the JAX libraries that tests have; `make parity` runs those of PyTorch's."""

from __future__ import annotations

import pytest
from repros import check

pytestmark = pytest.mark.slow


def test_each_script_shows_what_it_says() -> None:
    assert check("jax", "flax", "keras", "equinox")
