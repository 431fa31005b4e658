"""Scripts about the JAX libraries that tests have; `make parity` runs the scripts about PyTorch and transformers."""

from __future__ import annotations

import pytest
from repros import check

pytestmark = pytest.mark.slow


def test_each_script_shows_what_it_says() -> None:
    assert check("jax", "flax")
