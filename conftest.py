"""What all tests share: the CPU as eight devices, reproducible draws, programs kept between runs but not in memory."""

import ctypes
import functools
import gc
import importlib.metadata
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Where it is installed it serves `flash` here, and so must not take part in tests of the native forward; its own tests
# enable it.
if [*importlib.metadata.distributions(name="attnops-cpu")]:
    os.environ["ATTNOPS_DISABLE"] = ",".join(filter(None, [os.environ.get("ATTNOPS_DISABLE"), "attnops-cpu"]))

from typing import Any

import hypothesis
import jax
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir

# Programs that one run compiles and the next, such as `make test-all`, needs again; the only thing that tests leave.
_cache = Path(os.environ.get("ATTNOPS_TEST_CACHE", Path(__file__).parent / ".test_cache"))
# A machine of eight devices, for meshes; what runs on one of them is none the slower.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(_cache))
for name in ("ATTNOPS_TRITON_CACHE", "KERAS_HOME", "MPLCONFIGDIR"):  # else in the home directory
    os.environ.setdefault(name, str(_cache / name.lower()))
jax.config.update("jax_disable_most_optimizations", True)  # while modules are imported; see `module_of_its_own`
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

pytest_plugins = ["program_budget", "tiers"]

if sys.platform == "linux":
    # Twice what any test needs. Compiling some programs takes all memory that there is: it ends that worker alone.
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (12 << 30, resource.getrlimit(resource.RLIMIT_DATA)[1]))

# Without optimisations, XLA's newer emitters of fusions take twice as long as its older ones.
FAST: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}

_compile_or_get_cached = compiler.compile_or_get_cached


def _compiled(backend: Any, module: Any, devices: Any, options: Any, callbacks: Any, on: Any, *profiler: Any) -> Any:
    """Compile as fast as XLA can, and keep programs of one device only.

    On the CPU, jaxlib (0.10 and 0.12) runs the exchanges of a program that it has loaded from the cache in any order:
    a device gets the array of another exchange, or waits for ever.
    """
    given = dict(options.env_option_overrides)
    if backend.platform == "cpu" and jax.config.read("jax_disable_most_optimizations"):
        options.env_option_overrides = [*(given | FAST).items()]
    try:
        if backend.platform == "cpu" and devices.size > 1:
            return compiler.backend_compile_and_load(backend, module, on, options, callbacks)
        return _compile_or_get_cached(backend, module, devices, options, callbacks, on, *profiler)
    except jax.errors.JaxRuntimeError as error:
        unknown = [name for name in FAST if f"No such compile option: '{name}'" in str(error)]
        if not unknown:
            raise
    for name in unknown:  # which only some versions of jaxlib have
        del FAST[name]
    options.env_option_overrides = [*given.items()]
    return _compiled(backend, module, devices, options, callbacks, on, *profiler)


compiler.compile_or_get_cached = _compiled

_make_context = mlir.make_ir_context
_contexts = threading.local()


def _context() -> Any:
    """MLIR's context of a hundred programs of a thread: making one takes longer than lowering a small program to it."""
    count, context = getattr(_contexts, "used", (0, None))
    if count % 100 == 0:  # it keeps all constants of its programs
        context = _make_context()
    _contexts.used = count + 1, context
    context.allow_unregistered_dialects = False  # as in a new one
    return context


mlir.make_ir_context = _context


# Caches among what `pytest_collection_finish` takes from the collector.
_frozen: list[Any] = []


def _caches_of_attnops() -> list[Any]:
    # Not `isinstance`, which asks lazy objects, such as those of openai, for their class: they import it.
    wrappers = (x for x in gc.get_objects() if type(x) is functools._lru_cache_wrapper)
    return [x for x in wrappers if str(x.__module__).startswith("attnops")]


def pytest_collection_finish() -> None:
    """What all modules import stays: going through it after each of them takes the collector a fifth of all time."""
    gc.collect()
    _frozen.extend(_caches_of_attnops())
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def module_of_its_own(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave optimisation to modules marked ``optimised``, and let go of what a module compiled and traced.

    LLVM's optimiser takes a quarter of the time of all tests, and does not make a wrong formula right. All programs
    together take gigabytes.
    """
    jax.config.update("jax_disable_most_optimizations", request.node.get_closest_marker("optimised") is None)
    yield
    jax.clear_caches()
    for cache in (*_frozen, *_caches_of_attnops()):
        cache.cache_clear()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # else what is free stays with the process


# Compiling takes most of a draw's time, so no deadline; the same draws every time, so that a failure can be repeated.
hypothesis.settings.register_profile("attnops", deadline=None, derandomize=True, max_examples=60, database=None)
hypothesis.settings.load_profile("attnops")
