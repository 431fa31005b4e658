"""CPU devices for meshes."""

from __future__ import annotations

import contextlib
import os

import jax


def make_cpu_devices() -> None:
    """Have JAX show the CPU as four devices, unless the user set a number or JAX has started."""
    unset = jax.config.jax_num_cpu_devices < 0  # type: ignore[attr-defined]
    if unset and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", 4)
