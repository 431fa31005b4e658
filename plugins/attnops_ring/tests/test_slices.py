"""Forward and backward compiled for TPU slices, without a TPU: memory, and whether computation hides transfers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_ring.orders import chunks_per_device
from attnops_tpu.aot import devices
from attnops_tpu.collectives import exchanges, exposed, scheduled
from attnops_tpu.generations import target

# Compiled with optimisations, as for a real TPU.
pytestmark = pytest.mark.optimised

TOKENS = 1_048_576
HBM = 95 * 10**9  # bytes, of a v5p


def lowered(topology: str, tokens: int, order: str) -> Any:
    """Output and gradients of causal attention, 8 heads over 2 kv heads of 128, bfloat16."""
    chips = devices("v5p", topology)
    mesh = Mesh(np.array(chips), ("sp",))
    ring: Any = OperationRegistry.create("ring", OperationMetadata(mesh=mesh, platform="tpu"))
    spec = NamedSharding(mesh, PartitionSpec(None, "sp"))
    q, kv = (jax.ShapeDtypeStruct((1, tokens, n, 128), jnp.bfloat16, sharding=spec) for n in (8, 2))

    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pull_back = jax.vjp(lambda *qkv: ring(*qkv, mask=Causal(), order=order).attention_outputs, q, k, v)
        return out, pull_back(d_out)

    with target("v5p"):
        return jax.jit(both).trace(q, kv, kv, q).lower(lowering_platforms=("tpu",))


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Compiled programs are large, and none is needed twice."""
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "chips", "order"),
    [
        pytest.param("v5p:4x4x4", 64, "zigzag", marks=pytest.mark.exhaustive),
        pytest.param("v5p:2x2x2", 8, "zigzag", marks=pytest.mark.exhaustive),
        pytest.param("v5p:2x2x2", 8, "contiguous", marks=pytest.mark.exhaustive),
        pytest.param("v5p:2x2x2", 8, "striped", marks=pytest.mark.exhaustive),
    ],
)
def test_a_million_tokens_on_a_slice(topology: str, chips: int, order: str) -> None:
    compiled, program = scheduled(lowered(topology, TOKENS, order), "v5p")
    memory = compiled.memory_analysis()
    given = memory.argument_size_in_bytes + memory.output_size_in_bytes
    print(f"{chips} chips: {memory.temp_size_in_bytes / 1e9:.1f} GB of temporaries each")
    assert given + memory.temp_size_in_bytes < HBM
    # Copies in the kernels' layouts, and gradients in float32: linear in a chip's tokens.
    assert memory.temp_size_in_bytes <= 6 * given

    found = exchanges(program)
    # Forward's loop and backward's: keys and values, a chunk at a time; and these with their gradients.
    loops = [events for events in found.values() if all(event.what != "while" for event in events)]
    assert len(loops) == 2
    for events, sent in zip(loops, (2 * chunks_per_device(order), 4), strict=True):
        print(" ".join(map(str, events)))
        kinds = [event.kind for event in events]
        kernels = kinds.count("kernel")
        assert kernels >= 1
        assert kinds == ["start"] * sent + ["kernel"] * kernels + ["done"] * sent
        assert not exposed(events)
    # Gradients of keys and values are sent home after the last computation, so that nothing hides this transfer.
    waits = [event for events in found.values() for event in exposed(events)]
    assert [event.what for event in waits] == ["collective-permute"] * 2


@pytest.mark.slow
def test_the_program_is_no_larger_for_more_chips() -> None:
    few, many = (
        lowered(topology, n * 2048, "zigzag").as_text() for topology, n in (("v5p:2x2x1", 4), ("v5p:4x4x4", 64))
    )
    assert len(many) < 1.05 * len(few)


PROGRAM = """HloModule jit_f, is_scheduled=true

%body.1 (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %kernel.3 = f32[2]{0} custom-call(%p), custom_call_target="tpu_custom_call"
  ROOT %again = f32[2]{0} add(%kernel.3, %p)
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %hidden = (f32[2]{0}, f32[2]{0}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=1
  %bare = (f32[2]{0}, f32[2]{0}) all-gather-start(%x), channel_id=2
  %gathered = f32[4]{0} all-gather-done(%bare)
  %loop = f32[2]{0} while(%x), condition=%cond, body=%body.1
  %arrived = f32[2]{0} collective-permute-done(%hidden)
  ROOT %sum = f32[2]{0} all-reduce(%arrived), channel_id=3
}
"""


def test_what_nothing_hides_is_found() -> None:
    (events,) = exchanges(PROGRAM).values()
    assert [str(event) for event in events] == [
        "start collective-permute", "start all-gather", "done all-gather", "kernel loop", "done collective-permute",
        "whole all-reduce",
    ]  # fmt: skip
    assert [event.name for event in exposed(events)] == ["bare", "sum"]
