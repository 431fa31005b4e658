"""Steps of a cache on a mesh that spans two processes: each process compares its shards with one device's.

The arguments are the coordinator's address, the index of this process, and a name of `CASES`.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import Cache, DenseCache, PagedCache, Quantized, sharded

B, S, H, K, D, PAGE = 4, 8, 4, 2, 8, 4
STEPS, PROCESSES = 2, 2
# Of 4 pages in each of two shards; the single cache has all 8.
TABLE = np.array([[1, 3], [2, 0], [3, 0], [1, 2]])

# The mesh axes and the storage.
CASES: dict[str, tuple[tuple[str, str], str]] = {
    "rows and kv heads of int8 pages": (("dp", "tp"), "paged"),
    "context and kv heads": (("sp", "tp"), "dense"),
}


def create(storage: str) -> Cache:
    """An empty cache."""
    sizes: dict[str, Any] = {"batch": B, "kv_heads": K, "head_dim": D, "dtype": jnp.float32, "starts": [0, 1, 0, 2]}
    if storage == "dense":
        return DenseCache.create(length=S, **sizes)
    return PagedCache.create(
        pages=8, page_size=PAGE, max_pages=S // PAGE, table=TABLE, codec=Quantized("int8"), **sizes
    )


def mesh_of(axes: tuple[str, str]) -> Mesh:
    """2 × 2 devices of which those along either axis belong to different processes."""
    (a, b), (c, d) = (
        [device for device in jax.devices() if device.process_index == process] for process in range(PROCESSES)
    )
    return Mesh(np.array([[a, c], [d, b]]), axes)


def steps(operation: Any, cache: Cache) -> tuple[Any, ...]:
    """A prompt of ragged rows and decoded tokens: outputs, logsumexps, and the cache afterwards."""
    rng = np.random.default_rng(0)  # the same in every process

    def tokens(T: int, *lead: int) -> list[np.ndarray]:
        return [rng.normal(size=(*lead, B, T, heads, D)).astype(np.float32) for heads in (H, K, K)]

    prompt, rest = tokens(3), tokens(1, STEPS)

    def run(cache: Cache) -> Any:
        def step(cache: Cache, qkv: Any) -> tuple[Cache, Any]:
            out, cache = operation.step(*qkv, cache, mask=Causal(), return_lse=True)
            return cache, (out.attention_outputs, out.logsumexp)

        lengths = np.array([3, 2, 1, 3])
        first, cache = operation.step(*prompt, cache, mask=Causal(), query_lengths=lengths, return_lse=True)
        cache, others = lax.scan(step, cache, tuple(rest))
        return first.attention_outputs, first.logsumexp, *others, cache

    result: tuple[Any, ...] = jax.jit(run)(cache)
    return result


def worst(found: jax.Array, wanted: np.ndarray) -> float:
    """The largest difference of this process's shards; NaN where one is."""
    assert not found.is_fully_addressable
    errors = [0.0]
    for part in found.addressable_shards:
        x, y = np.asarray(part.data, np.float64), wanted[part.index].astype(np.float64)
        different = x != y  # infinities are equal or not
        errors.append(float(np.max(np.abs(x[different] - y[different]), initial=0)))
    return float(np.max(errors))


def check(name: str) -> None:
    """Run a case on the mesh and on one device.

    Raises:
        AssertionError: they differ.
    """
    axes, storage = CASES[name]
    mesh = mesh_of(axes)
    cache = sharded(lambda: create(storage), mesh)
    with jax.default_device(jax.local_devices()[0]):
        single = create(storage)
        if isinstance(single, PagedCache):
            single = single.with_table(TABLE + np.array([0, 0, 4, 4])[:, None])
        *wanted, after = jax.tree.map(np.asarray, steps(OperationRegistry.create("flash"), single))
    *found, placed = steps(OperationRegistry.create("flash", OperationMetadata(mesh=mesh)), cache)
    for what, x, y in zip(("prompt's output", "its logsumexp", "outputs", "logsumexps"), found, wanted, strict=True):
        assert (error := worst(x, y)) < 5e-6, f"{what}: {error} from one device"
    for x, y in zip(jax.tree.leaves(placed.store), jax.tree.leaves(after.store), strict=True):
        assert worst(x, y) == 0, "what is stored differs"
    for field in ("lengths", "overflowed"):
        assert worst(getattr(placed, field), getattr(after, field)) == 0, f"{field} differ"
    assert placed.store.key.addressable_shards[0].data.size == placed.store.key.size // 4


def main() -> None:
    """Run a case."""
    address, index, name = sys.argv[1:]
    jax.distributed.initialize(address, PROCESSES, int(index))
    check(name)
    print(f"process {jax.process_index()} of {jax.process_count()}, {jax.device_count()} devices: {name}", flush=True)


if __name__ == "__main__":
    main()
