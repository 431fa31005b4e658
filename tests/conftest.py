"""What all tests share: the CPU as eight devices, reproducible draws, and compiled programs kept between runs."""

import os
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis
import jax

_cache = Path(os.environ.get("ATTNOPS_TEST_CACHE", Path(tempfile.gettempdir()) / "attnops-test-cache"))
# A machine of eight devices, for meshes; what runs on one of them is none the slower.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(_cache))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

# Compiling takes most of a draw's time, so no deadline; the same draws every time, so that a failure can be repeated.
hypothesis.settings.register_profile("attnops", deadline=None, derandomize=True, max_examples=60, database=None)
hypothesis.settings.load_profile("attnops")
