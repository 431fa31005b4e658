"""The default device of JAX."""

from __future__ import annotations

from typing import Any

import jax


def default_device() -> jax.Device | None:
    """The device that computes with uncommitted arrays: ``jax_default_device``, else the first local device."""
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device
