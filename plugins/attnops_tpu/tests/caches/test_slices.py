"""Steps over pages whose context eight TPU cores share: compiled for slices without a TPU, and interpreted."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, SlidingWindow
from attnops_caches import PagedCache, Quantized, Rows, in_place_reasons, sharded
from attnops_tpu.aot import devices
from attnops_tpu.collectives import KERNEL, exchanges, scheduled
from attnops_tpu.generations import target

# What is compiled for a TPU is what a TPU would run.
pytestmark = [pytest.mark.optimised, pytest.mark.slow]

LATENT = {"kv_heads": 1, "head_dim": 576, "latent": 512, "width": 640}


@pytest.mark.parametrize(
    ("generation", "topology", "options", "packed"),
    [
        ("v6e", "v6e:2x4", {}, False),
        pytest.param("v6e", "v6e:2x4", {"codec": Quantized("int8")}, True, marks=pytest.mark.exhaustive),
        pytest.param("tpu7x", "tpu7x:2x2x1", LATENT, False, marks=pytest.mark.exhaustive),
        ("tpu7x", "tpu7x:2x2x1", {}, True),
    ],
)
def test_one_exchange_a_step(generation: str, topology: str, options: dict[str, Any], packed: bool) -> None:
    chips = devices(generation, topology)
    assert len(chips) == 8
    mesh = Mesh(np.array(chips), ("sp",))
    sizes: dict[str, Any] = {"kv_heads": 2, "head_dim": 128, "dtype": jnp.bfloat16} | options

    def make() -> PagedCache:
        return PagedCache.create(batch=8, pages=512, page_size=8 * 128, max_pages=64, **sizes)

    shape = jax.eval_shape(lambda: sharded(make, mesh))
    assert shape.placement.slots == "sp"
    cache = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), shape, shape.specs
    )
    op: Any = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", on_unsupported="error"))
    lead, H = (1, 8) if packed else (8, 1), 8 * cache.kv_heads
    shapes = (H, cache.head_dim), (cache.kv_heads, cache.head_dim), (cache.kv_heads, cache.value_head_dim)
    q, k, v = (jax.ShapeDtypeStruct((*lead, *x), jnp.bfloat16) for x in shapes)
    rows = Rows(np.array([0, 1, 2, 8]), np.array([3, 0, 7])) if packed else None
    assert not in_place_reasons(op, "tpu", op.request(q, cache, mask=Causal(), rows=rows))

    def step(q: Any, k: Any, v: Any, cache: Any) -> Any:
        given = {"rows": rows} if packed else {}
        return op.step(q, k, None if cache.is_latent else v, cache, mask=Causal(), **given)

    with target(generation):
        lowered = jax.jit(step, donate_argnums=3).trace(q, k, v, cache).lower(lowering_platforms=("tpu",))
    compiled, program = scheduled(lowered, generation)
    events = [event for events in exchanges(program).values() for event in events]
    sent = [event.what for event in events if event.kind in ("start", "whole")]
    assert sent == ["all-gather"]
    assert KERNEL in program
    memory = compiled.memory_analysis()
    a_device = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.store)) / 8
    assert memory.alias_size_in_bytes >= a_device
    assert memory.temp_size_in_bytes < a_device / 8  # no copy of the pages


@pytest.mark.parametrize("packed", [False, True])
def test_values_of_the_interpreted_kernel(packed: bool) -> None:
    mesh = jax.make_mesh((2,), ("sp",), devices=jax.devices()[:2])
    table = np.random.default_rng(1).permutation(8).reshape(2, 4)
    make = functools.partial(
        PagedCache.create, batch=2, pages=8, page_size=16, max_pages=4, table=table, kv_heads=1, head_dim=128,
        dtype=jnp.float32, starts=[0, 3],
    )  # fmt: skip
    rng = np.random.default_rng(0)

    def arrays(*lead: int) -> list[jax.Array]:
        return [jnp.asarray(rng.normal(size=(*lead, n, 128)), jnp.float32) for n in (2, 1, 1)]

    _, key, value = arrays(2, 40)
    single, placed = make().append(key, value, [40, 21]), sharded(make, mesh).append(key, value, [40, 21])
    q, k, v = arrays(*((1, 6) if packed else (2, 1)))
    options: Any = {"rows": Rows(np.array([0, 1, 6]), np.array([1, 0]))} if packed else {}
    mask = Causal() & SlidingWindow(24, 0)
    metadata = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error")
    kernel: Any = OperationRegistry.create("attnops-tpu:flash", metadata)
    vanilla: Any = OperationRegistry.create("vanilla", OperationMetadata())
    found = jax.jit(lambda *given: kernel.step(*given, mask=mask, **options)[0].attention_outputs)(q, k, v, placed)
    wanted = jax.jit(lambda *given: vanilla.step(*given, mask=mask, **options)[0].attention_outputs)(q, k, v, single)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
