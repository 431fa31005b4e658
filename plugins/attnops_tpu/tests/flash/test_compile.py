"""Every case of the catalogue is compiled for every generation, by the real compiler, with no TPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from attnops_testing.catalogue import CASES as ALL
from attnops_testing.catalogue import CompileCase, one_target_each
from attnops_tpu.aot import TOPOLOGIES, compile_for

# What is compiled for a TPU is what a TPU would run.
pytestmark = pytest.mark.optimised

CASES = {name: case for name, case in ALL.items() if case.dtype != jnp.float16}  # which is refused

# Compiled in the quick tests, each for one generation: what is likeliest to break, and the least memory.
QUICK = {("everything", "v5p"), ("D 576, Dv 512", "v4"), ("T 1", "tpu7x")}


# The exhaustive tests alone have what takes minutes, and what the schedules' tests compile too.
ELSEWHERE = {"dense mask", "D 5, Dv 3", "documents", *(name for name, _ in QUICK)}
SLOW = {name: generation for name, generation in one_target_each(TOPOLOGIES).items() if name not in ELSEWHERE}


def marks(name: str, generation: str) -> list[pytest.MarkDecorator]:
    """The slow tests compile each distinct case for one generation, the exhaustive ones all for all."""
    if (name, generation) in QUICK:
        return []
    return [pytest.mark.slow] if SLOW.get(name) == generation else [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Compiled programs are large, and none is needed twice."""
    yield
    jax.clear_caches()


def temporaries(case: CompileCase, generation: str) -> int:
    """Bytes; raises what the compiler does."""
    compiled = compile_for(case.program("attnops-tpu:flash", "tpu"), case.example, generation)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        pytest.param(name, generation, marks=marks(name, generation))
        for (i, generation), (j, name) in itertools.product(enumerate(TOPOLOGIES), enumerate(CASES))
        if (name, generation) in QUICK or SLOW.get(name) == generation or (i + j) % len(TOPOLOGIES) == 0
    ],
)
@pytest.mark.tier(every=7, quick=["D 576, Dv 512-v4"])
def test_a_case_compiles_with_temporaries_linear_in_tokens(name: str, generation: str) -> None:
    case = CASES[name]
    S, Dv = case.S or case.T, case.Dv or case.D
    # Copies in the kernels' layout, gradients in float32 and such: linear in tokens, and far from T × S.
    # In main memory a row is padded to a multiple of 128 lanes.
    tokens = case.B * (case.T * case.H + S * case.K) * sum(-(-d // 128) * 128 for d in (case.D, Dv))
    arrays = sum(4 * x.size for x in (*case.learnt, *case.traced) if x.ndim == 4 and min(x.shape[2:]) > 1)
    assert temporaries(case, generation) <= 16 * tokens + 2 * arrays + 2**22


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "causal",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("documents", "relative position", "window", "lengths", "ALiBi", "MaskFn")
        ),
    ],
)
@pytest.mark.exhaustive
def test_temporaries_grow_linearly(name: str) -> None:
    """On v4, and on long sequences: the compiler keeps arrays of shorter ones in vector memory, outside of kernels."""
    case = CASES[name]

    def at(length: int) -> int:
        traced = tuple(x if x.shape[-1] != case.T else type(x)((*x.shape[:-1], length), x.dtype) for x in case.traced)
        return temporaries(dataclasses.replace(case, T=length, traced=traced), "v4")

    small, large = at(65536), at(131072)
    assert large <= 2.01 * small, f"{small} bytes at 65,536 tokens, {large} at 131,072"


@pytest.mark.slow
def test_an_unknown_generation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"v9.*use one of"):
        compile_for(lambda x: x, (), "v9")
