"""Declarations of references: the call that is made of them, and the vector memory that they need."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops_tpu.references import ANY, Input, Output, Prefetched, call_kernel, needed


class Refs(NamedTuple):
    """Kinds of references in no particular order."""

    total: Any  # [8, 128], scratch
    x: tuple[Any, ...]  # [8, 128] each
    kept: Any  # [16, 128] in main memory, of which a row is written
    absent: Any
    out: Any  # [8, 128]
    factor: Any  # [1], in scalar memory
    arrived: Any  # a semaphore


def declared(kept: jax.Array, x: list[jax.Array]) -> Refs:
    block = pl.BlockSpec((8, 128), lambda step, *_: (step, 0))
    return Refs(
        total=pltpu.VMEM((8, 128), jnp.float32), x=tuple(Input(one, block) for one in x),
        kept=Output(jax.ShapeDtypeStruct(kept.shape, kept.dtype), ANY, over=kept), absent=None,
        out=Output(jax.ShapeDtypeStruct((16, 128), jnp.float32), block), factor=Prefetched(jnp.array([3], jnp.int32)),
        arrived=pltpu.SemaphoreType.DMA((1,)),
    )  # fmt: skip


@pytest.mark.slow
def test_a_kernel_gets_each_reference_by_its_name() -> None:
    def kernel(refs: Refs) -> None:
        assert refs.absent is None
        assert [ref.shape for ref in (refs.total, *refs.x, refs.kept, refs.out)] == [(8, 128)] * 3 + [
            (16, 128),
            (8, 128),
        ]
        refs.total[...] = refs.x[0][...] * refs.factor[0] - refs.x[1][...]
        refs.out[...] = refs.total[...]
        row = pl.ds(pl.program_id(0) * 8, 1)
        copy = pltpu.make_async_copy(refs.total.at[:1], refs.kept.at[row], refs.arrived.at[0])
        copy.start()
        copy.wait()

    x = [jnp.arange(16 * 128, dtype=jnp.float32).reshape(16, 128) + i for i in range(2)]
    kept = jnp.full((16, 128), -1.0)
    results = call_kernel(
        kernel, declared(kept, x), "test", grid=(2,), params=pltpu.CompilerParams(), interpret=True
    )  # fmt: skip
    out = np.asarray(3 * x[0] - x[1])
    np.testing.assert_array_equal(results[1], out)
    np.testing.assert_array_equal(results[0], np.where(np.arange(16)[:, None] % 8 == 0, out, -1))


def test_blocks_have_two_buffers_of_complete_registers() -> None:
    def bytes_of(dtype: Any, *block: int | None) -> int:
        return needed(Input(jax.ShapeDtypeStruct((1,), dtype), pl.BlockSpec(block, lambda: (0,))))

    assert bytes_of(jnp.bfloat16, None, None, 1024, 80) == 2 * 1024 * 128 * 2
    assert bytes_of(jnp.bfloat16, None, 2, 5, 256) == 2 * 2 * 16 * 256 * 2
    assert bytes_of(jnp.bfloat16, None, 2, 8, 256) == 2 * 2 * 8 * 256 * 2
    assert bytes_of(jnp.float32, None, None, 1, 256) == 2 * 256 * 4


def test_what_is_not_in_vector_memory_needs_none() -> None:
    x = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    refs = declared(x, [x, x])  # type: ignore[arg-type, list-item]
    assert needed(refs) == (2 * 2 + 2 + 1) * 8 * 128 * 4
    assert needed(refs._replace(total=None)) == (2 * 2 + 2) * 8 * 128 * 4
