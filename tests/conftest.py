"""What all tests share: the CPU as eight devices, reproducible draws, and compiled programs kept between runs."""

import os
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

from typing import Any

import hypothesis
import jax
from jax._src import compiler

_cache = Path(os.environ.get("ATTNOPS_TEST_CACHE", Path(tempfile.gettempdir()) / "attnops-test-cache"))
# A machine of eight devices, for meshes; what runs on one of them is none the slower.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(_cache))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

_compile_or_get_cached = compiler.compile_or_get_cached


def _compiled(backend: Any, module: Any, devices: Any, options: Any, callbacks: Any, on: Any, *profiler: Any) -> Any:
    """Keep programs of one device only.

    On the CPU, jaxlib (0.10 and 0.12) runs the exchanges of a program that it has loaded from the cache in any order:
    a device gets the array of another exchange, or waits for ever.
    """
    if backend.platform == "cpu" and devices.size > 1:
        return compiler.backend_compile_and_load(backend, module, on, options, callbacks)
    return _compile_or_get_cached(backend, module, devices, options, callbacks, on, *profiler)


compiler.compile_or_get_cached = _compiled

# Compiling takes most of a draw's time, so no deadline; the same draws every time, so that a failure can be repeated.
hypothesis.settings.register_profile("attnops", deadline=None, derandomize=True, max_examples=60, database=None)
hypothesis.settings.load_profile("attnops")
