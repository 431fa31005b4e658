"""What the tests keep compiled; see conftest.py."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attnops.sharding import create_mesh


@pytest.mark.parametrize("devices", [1, 2])
def test_programs_of_one_device_alone_are_kept(devices: int) -> None:
    mesh = create_mesh((devices,), ("dp",), devices=jax.devices()[:devices])
    x = jax.device_put(np.arange(4.0), NamedSharding(mesh, P("dp")))

    def kept_by_tests(x: jax.Array) -> jax.Array:
        return x.sum() * (2 + devices)

    kept_by_tests.__name__ = name = f"kept_by_tests_{devices}"
    assert jax.jit(kept_by_tests)(x) == 6 * (2 + devices)
    found = list(Path(jax.config.jax_compilation_cache_dir).glob(f"jit_{name}-*"))
    assert bool(found) == (devices == 1)
