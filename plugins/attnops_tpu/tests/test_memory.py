"""The memory of compiled programs: of kernels, and what moves around them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_tpu.aot import devices
from attnops_tpu.collectives import scheduled
from attnops_tpu.generations import target
from attnops_tpu.memory import KernelMemory, kernel_bytes, kernels, outside_bytes

MiB = 1 << 20

PROGRAM = """HloModule jit_f

%body (x: (f32[8])) -> (f32[8]) {
  %x = (f32[8]{0}) parameter(0)
  %a = f32[8]{0} get-tuple-element(%x), index=0
  %b = f32[8]{0:T(128)S(1)} copy(%a), metadata={}
  ROOT %t = (f32[8]{0:T(128)S(1)}) tuple(%b)
}

ENTRY %main.7 (q.1: bf16[4,128], k.1: bf16[4,128]) -> f32[4,128] {
  %q.1 = bf16[4,128]{1,0:T(8,128)(2,1)} parameter(0)
  %k.1 = bf16[4,128]{1,0:T(8,128)(2,1)} parameter(1)
  %copy-start = (bf16[4,128]{1,0:S(1)}, bf16[4,128]{1,0}, u32[]{:S(2)}) copy-start(%q.1)
  %copy-done = bf16[4,128]{1,0:S(1)} copy-done(%copy-start)
  %slice-start = ((bf16[4,128]{1,0}), bf16[2,128]{1,0:S(1)}, s32[]{:S(2)}) async-start(%k.1), calls=%c
  %slice-done = bf16[2,128]{1,0:S(1)} async-done(%slice-start)
  %fusion = (f32[4,128]{1,0}, f32[4,128]{1,0:S(1)}) fusion(%copy-done, /*index=1*/%k.1), kind=kLoop, calls=%g
  %part = f32[4,128]{1,0} get-tuple-element(%fusion), index=0
  %loop = (f32[8]{0}) while(%part), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %k.2 = f32[4,128]{1,0} custom-call(%part), custom_call_target="tpu_custom_call", backend_config={"scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"900"}],"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"70"}]}
}
"""  # noqa: E501


def test_only_arrays_in_main_memory_are_moved() -> None:
    copy, half, fusion, loop = 4 * 128 * 2, 2 * 128 * 2, 4 * 128 * (2 + 4), 5 * 8 * 4
    assert outside_bytes(PROGRAM) == copy + half + fusion + loop
    assert kernels(PROGRAM) == [KernelMemory("k", limit=900, used=70)]
    assert kernel_bytes(PROGRAM) == {"k.2": 2 * (4 * 128 * 4)}
    with pytest.raises(ValueError, match="no ENTRY"):
        outside_bytes("nothing")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiles", "most"),
    [
        pytest.param({"block_q": 1024, "block_k": 1024}, 20, id="1024"),
        pytest.param({}, 40, marks=pytest.mark.exhaustive, id="2048"),
    ],
)
@pytest.mark.exhaustive
def test_a_program_keeps_its_arrays_in_vector_memory(tiles: dict[str, int], most: int) -> None:
    """Each input is read and each output written once; a kernel that withholds vector memory makes it several times."""
    attention = OperationRegistry.create("attnops-tpu:flash", OperationMetadata(platform="tpu", **tiles))  # type: ignore[arg-type]
    place = jax.sharding.SingleDeviceSharding(devices("v6e")[0])
    x = jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16, sharding=place)

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, d: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(lambda *qkv: attention(*qkv, mask=Causal()).attention_outputs, q, k, v)[1](d)

    with target("v6e"):
        lowered = jax.jit(gradients).trace(x, x, x, x).lower(lowering_platforms=("tpu",))
    compiled, program = scheduled(lowered, "v6e")
    array = 4096 * 8 * 128 * 2
    assert compiled.memory_analysis().temp_size_in_bytes <= MiB
    assert outside_bytes(program) <= 7 * array + MiB
    for kernel in kernels(program):
        assert kernel.used <= 0.75 * kernel.limit, "a margin for what the compiler adds"
        assert kernel.limit <= most * MiB, "the rest is left to the program's arrays"
