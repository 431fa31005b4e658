"""No import of a plugin, or of its toolchain, has what JAX traced before traced again."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

# In a process that has imported no plugin: each function, and its gradient, is called or traced three times, and all of
# them once more at the end, so that an import for one that had another traced again would be seen too, where JAX's own
# imports have none.
PROCESS = """
import collections, json, sys
import jax, jax.numpy as jnp, numpy as np
from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ALiBi
from attnops_caches import DenseCache
from attnops.masks import Causal
from attnops.sharding import AxisRules

traced, again = collections.Counter(), []
slopes = jnp.ones(2)

def three(name, run, function, *args):
    def counted(*args):
        traced[name] += 1
        return function(*args)
    program = jax.jit(counted)
    again.append(lambda: run(program, *args))
    for _ in range(3):
        again[-1]()

def both(name, run, operation, dtype="float32", T=16, D=16, **options):
    x = jnp.ones((1, T, 2, D), dtype)
    def attend(q, k, v):
        return operation(q, k, v, mask=Causal(), **options).attention_outputs
    three(name, run, attend, x, x, x)
    total = lambda *x: attend(*x).astype(jnp.float32).sum()
    three(name + ", gradient", run, jax.grad(total, argnums=(0, 1, 2)), x, x, x)

def call(program, *args):
    return program(*args)

def trace(program, *args):
    return program.trace(*args)

def make(name, **fields):
    return OperationRegistry.create(name, OperationMetadata(**fields))

for name in ("vanilla", "auto", "flash", "sdpa"):
    both(name, call if name == "auto" else trace, make(name))
mesh = jax.make_mesh((2,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
rules = AxisRules(query_length="s", kv_length="s")
both("ring", trace, make("ring", mesh=mesh, axis_rules=rules))
for platform in sys.argv[1:]:
    both(f"flash, {platform}, interpreted", trace, make("flash", platform=platform, interpret=True))
    both(f"flash, {platform}", trace, make("flash", platform=platform), "bfloat16", 128, 64)
    both(f"auto, {platform}", trace, make("auto", platform=platform), "bfloat16", 128, 64, bias=ALiBi(slopes))
    operation = make("flash", platform=platform, interpret=True)
    cache = DenseCache.create(batch=1, length=64, kv_heads=2, head_dim=64, dtype="float32")
    x = jnp.ones((1, 1, 2, 64))
    step = lambda q, c: operation.step(q, q, q, c, mask=Causal())[0].attention_outputs
    three(f"step, {platform}", trace, step, x, cache)
first = dict(traced)
for run in again:
    run()
# From 0.12 on Pallas makes contexts of JAX when it is first imported, by whoever it is.
of_pallas = "pallas_grid_context" in getattr(jax._src.config, "trace_context_names", tuple)()
print(json.dumps([first, {} if of_pallas else dict(traced)]))
"""

PLUGINS = {"tpu": "attnops_tpu", "cuda": "attnops_triton"}


@pytest.mark.slow
def test_each_program_is_traced_once_whatever_is_imported_for_another() -> None:
    platforms = [platform for platform, package in PLUGINS.items() if importlib.util.find_spec(package)]
    if importlib.util.find_spec("attnops_ring") is None:
        pytest.skip("attnops-ring is not installed")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    command = [sys.executable, "-W", "ignore", "-c", PROCESS, *platforms]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    first, after_all = json.loads(result.stdout)
    assert len(first) == 2 * 5 + 7 * len(platforms)
    assert set(first.values()) == {1}, first
    assert after_all in ({}, first)
