"""Programs around the kernel over caches: exported without a TPU, donated, on meshes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import Cache, DenseCache, PagedCache, Rows, sharded
from attnops_tpu.aot import devices
from attnops_tpu.collectives import scheduled
from attnops_tpu.generations import target

pytestmark = [pytest.mark.slow, pytest.mark.optimised]

K, PAGE = 8, 64


def step(query: Any, key: Any, value: Any, cache: Cache, rows: Rows | None = None) -> tuple[Any, Cache]:
    operation = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", on_unsupported="error"))
    output, cache = operation.step(query, key, value, cache, mask=Causal(), rows=rows)
    return output.attention_outputs, cache


def arguments() -> tuple[Any, ...]:
    cache = jax.eval_shape(
        lambda: PagedCache.create(batch=8, pages=1024, page_size=PAGE, max_pages=128, kv_heads=K, head_dim=128)
    )
    query, token = (jax.ShapeDtypeStruct((8, 1, heads, 128), jnp.bfloat16) for heads in (32, K))
    return query, token, token, cache


def test_a_step_is_exported_without_a_tpu() -> None:
    *arrays, cache = arguments()
    leaves, tree = jax.tree.flatten(cache)

    def run(query: Any, key: Any, value: Any, *leaves: Any) -> list[Any]:
        return jax.tree.leaves(step(query, key, value, jax.tree.unflatten(tree, leaves)))

    with target("v6e"):
        exported = jax.export.export(jax.jit(run), platforms=["tpu"])(*arrays, *leaves)
    assert "attnops_ragged" in exported.mlir_module()


@pytest.mark.parametrize(("generation", "packed"), [("v5p", 0), ("v6e", 0), ("v6e", 64), ("v6e", 600)])
@pytest.mark.tier(every=4)
def test_a_step_updates_a_donated_cache_and_copies_none(generation: str, packed: int) -> None:
    """Of packed tokens there are queries of up to 15 tiles of 8, and with 600 of up to 6 of 256 and 82 of 8."""
    place = jax.sharding.SingleDeviceSharding(devices(generation)[0])
    given = arguments()
    if packed:
        tokens = [jax.ShapeDtypeStruct((1, packed, *x.shape[2:]), x.dtype) for x in given[:3]]
        rows = Rows(*(jax.ShapeDtypeStruct((n,), jnp.int32) for n in (9, 8)))  # type: ignore[arg-type]
        given = *tokens, given[3], rows
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), given)
    with target(generation):
        lowered = jax.jit(step, donate_argnums=3).trace(*placed).lower(lowering_platforms=("tpu",))
        memory = lowered.compile().memory_analysis()
    store = placed[3].store
    assert memory.alias_size_in_bytes >= 2 * store.key.size
    tile, queries = 512 * K * 128 * 2 * 2, packed * 32 * 128 * 2
    assert memory.temp_size_in_bytes < tile + 8 * queries < store.key.size


def exchanges(
    generation: str, topology: str, axes: dict[str, int], make: Callable[[], Cache], steps: bool = False
) -> list[str]:
    """The exchanges of a call over a cache on a mesh, or of a step, in the order of the program."""
    shape = tuple(axes.values())
    mesh = jax.sharding.Mesh(
        np.array(devices(generation, topology)).reshape(shape), tuple(axes),
        axis_types=(jax.sharding.AxisType.Auto,) * len(shape),
    )  # fmt: skip
    cache = jax.eval_shape(lambda: sharded(make, mesh))
    heads = "tp" if "tp" in axes else None
    query = jax.ShapeDtypeStruct(
        (8, 1, 32, 128), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P("dp", None, heads))
    )
    placed = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec)),
        cache, cache.specs,
    )  # fmt: skip
    operation = OperationRegistry.create(
        "attnops-tpu:flash", OperationMetadata(platform="tpu", on_unsupported="error", mesh=mesh)
    )

    def run(query: jax.Array, cache: Cache) -> jax.Array:
        return operation(query, cache, mask=Causal()).attention_outputs

    def step(query: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        key = query[:, :, :: 32 // K]
        output, cache = operation.step(query, key, key, cache, mask=Causal())
        return output.attention_outputs, cache

    with target(generation):
        jitted = jax.jit(step if steps else run, donate_argnums=(1,) * steps)
        lowered = jitted.trace(query, placed).lower(lowering_platforms=("tpu",))
    compiled, program = scheduled(lowered, generation)
    assert "attnops_ragged" in program
    if steps:
        memory, devices_of = compiled.memory_analysis(), mesh.size
        assert memory.alias_size_in_bytes >= 2 * cache.store.key.size // devices_of
        assert memory.temp_size_in_bytes < 1 << 20
        assert "while" not in program  # `append` is a loop over rows
    return re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", program)


@pytest.mark.parametrize(("topology", "axes"), [("v5p:2x2x1", {"dp": 2, "tp": 2}), ("v5p:2x2x2", {"dp": 2, "tp": 4})])
@pytest.mark.tier(every=2)
def test_pages_over_rows_and_heads_are_read_without_an_exchange(topology: str, axes: dict[str, int]) -> None:
    def make() -> Cache:
        return PagedCache.create(batch=8, pages=1024, page_size=PAGE, max_pages=128, kv_heads=K, head_dim=128)

    assert exchanges("v5p", topology, axes, make) == []


@pytest.mark.parametrize(("topology", "axes"), [("v5p:2x2x1", {"dp": 2, "tp": 2}), ("v5p:2x2x2", {"dp": 2, "tp": 4})])
def test_a_step_on_a_mesh_is_one_kernel_that_copies_nothing(topology: str, axes: dict[str, int]) -> None:
    def make() -> Cache:
        return PagedCache.create(batch=8, pages=1024, page_size=PAGE, max_pages=128, kv_heads=K, head_dim=128)

    assert exchanges("v5p", topology, axes, make, steps=True) == []


@pytest.mark.parametrize(("topology", "axes"), [("v6e:2x2", {"dp": 2, "sp": 2}), ("v6e:2x4", {"dp": 2, "sp": 4})])
@pytest.mark.tier(every=2)
def test_a_context_that_is_cut_is_merged_in_one_exchange(topology: str, axes: dict[str, int]) -> None:
    def make() -> Cache:
        return DenseCache.create(batch=8, length=8192, kv_heads=K, head_dim=128)

    assert exchanges("v6e", topology, axes, make) == ["all-gather"]
