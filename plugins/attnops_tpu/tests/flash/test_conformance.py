"""The conformance suite in Pallas's interpreter: races are detected, uninitialised memory is NaN."""

from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnops_testing import OperationConformance
from attnops_testing.behaviours import WITH_PROGRAM
from attnops_testing.runner import Status
from attnops_tpu.generations import UNKNOWN, target
from attnops_tpu.interpreter import detect_races, interpret_params


@pytest.fixture(autouse=True)
def races() -> Iterator[None]:
    with detect_races():
        yield


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    """Where the forward kernel drains once, and relative positions are rotated by rows."""
    with target("v6e"):
        yield


class TestFlashOnTPU(OperationConformance):
    operation, platform = "attnops-tpu:flash", "tpu"
    interpret = True
    strict, limit = True, 1200
    refuses = frozenset({"float16", "weights"})
    slow = WITH_PROGRAM
    exhaustive = frozenset({"test_all_pairs", "test_cache_pairs"})
    every: ClassVar = {"test_behaviour": 5, "test_memory_growth": 2, "test_caches": 5}
    test_feature = test_sampled_pair = None  # all pairs have each


@pytest.mark.slow
@pytest.mark.parametrize(
    "features",
    [
        ["RelativePosition"],
        ["sinks", "mask per batch"],
        pytest.param(["fully masked tiles"], marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.tier(every=2)
def test_several_cores_without_strided_rotation(features: list[str]) -> None:
    assert UNKNOWN.cores > 1
    assert not UNKNOWN.strided_rotation
    with target(UNKNOWN.name):
        outcome = TestFlashOnTPU.subject().check(features)
    assert outcome.status is Status.RIGHT, outcome.detail


def copy(wait: bool) -> jax.Array:
    """A kernel that copies its argument by DMA and waits for it, or does not."""

    def kernel(x: object, out: object, buffer: object, semaphore: object) -> None:
        dma = pltpu.make_async_copy(x, buffer, semaphore)
        dma.start()
        if wait:
            dma.wait()
        out[...] = buffer[...]
        if not wait:
            dma.wait()

    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    call = pl.pallas_call(
        kernel,
        out_shape=shape,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=interpret_params(True),
    )
    return jax.block_until_ready(call(jnp.ones(shape.shape, shape.dtype)))


def test_a_missing_wait_is_caught() -> None:
    with detect_races():
        assert copy(wait=True).sum() == 8 * 128
    with pytest.raises(RuntimeError, match=r"data race|RACE DETECTED"), detect_races():
        copy(wait=False)


@pytest.mark.slow
def test_uninitialised_memory_is_nan() -> None:
    def kernel(out: object, buffer: object) -> None:
        out[...] = buffer[...]

    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    scratch = [pltpu.VMEM((8, 128), jnp.float32)]
    call = pl.pallas_call(kernel, out_shape=shape, scratch_shapes=scratch, interpret=interpret_params(True))
    assert jnp.isnan(call()).all()
