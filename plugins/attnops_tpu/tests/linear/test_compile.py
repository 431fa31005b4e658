"""The kernels are compiled for every generation, by the real compiler, with no TPU."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from attnops import OperationMetadata
from attnops.masks import Segments
from attnops_linear import LinearOutput
from attnops_tpu.aot import TOPOLOGIES, compile_for
from attnops_tpu.linear.operation import TPULinearAttention

# What is compiled for a TPU is what a TPU would run.
pytestmark = [pytest.mark.optimised, pytest.mark.slow]


@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize(
    ("T", "D", "dtype", "beta", "decay"),
    [
        (4096, 128, "bfloat16", True, "head"),
        (100, 256, "float32", True, "head"),
        (256, 64, "float32", False, "head"),
        (1, 128, "bfloat16", True, "head"),
        (2, 128, "bfloat16", True, "channel"),
        (4096, 128, "bfloat16", True, "channel"),
        (100, 256, "float32", True, "channel"),
        (256, 64, "float32", False, "channel"),
    ],
)
@pytest.mark.tier(every=4)
def test_it_compiles_and_states_are_updated_in_place(
    generation: str, T: int, D: int, dtype: str, beta: bool, decay: str
) -> None:
    B, H = 2, 16
    operation = TPULinearAttention(OperationMetadata(platform="tpu", on_unsupported="error"))
    q = jax.ShapeDtypeStruct((B, T, H // 2, D), jnp.dtype(dtype))
    v = jax.ShapeDtypeStruct((B, T, H, D), jnp.dtype(dtype))
    gate, state = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((B, T, H), (B, H, D, D)))

    def run(state: jax.Array, q: jax.Array, v: jax.Array, gate: jax.Array) -> LinearOutput:
        rates = {"beta": gate} if beta else {}
        decays = gate if decay == "head" else jnp.broadcast_to(gate[..., None], (B, T, H, D))
        return operation(q, q, v, decay=decays, initial_state=state, return_state=True, mode="prefill", **rates)

    compiled = compile_for(run, (state, q, v, gate), generation, donated=(0,))
    memory = compiled.memory_analysis()
    if D % 128 == 0:
        assert memory.alias_size_in_bytes >= 4 * B * H * D * D
    if T <= 2:
        assert memory.temp_size_in_bytes < 4 * B * H * D * D  # the state is not copied
    # Copies in the kernel's layout, and decays by channel in float32.
    arrays = 16 if decay == "head" else 24
    assert memory.temp_size_in_bytes <= arrays * B * (T + 64) * H * max(D, 128) + 2**22


@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize(
    ("T", "D", "dtype", "beta"),
    [(512, 128, "bfloat16", True), (100, 256, "float32", True), (256, 64, "float32", False)],
)
@pytest.mark.tier(every=5)
def test_gradients_compile(generation: str, T: int, D: int, dtype: str, beta: bool) -> None:
    B, H = 2, 16
    operation = TPULinearAttention(OperationMetadata(platform="tpu", on_unsupported="error"))
    q = jax.ShapeDtypeStruct((B, T, H // 2, D), jnp.dtype(dtype))
    v = jax.ShapeDtypeStruct((B, T, H, D), jnp.dtype(dtype))
    gate, state = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((B, T, H), (B, H, D, D)))

    def loss(state: jax.Array, q: jax.Array, v: jax.Array, gate: jax.Array) -> jax.Array:
        rates = {"beta": gate} if beta else {}
        output = operation(q, q, v, decay=gate, initial_state=state, mode="train", **rates)
        return output.attention_outputs.astype(jnp.float32).sum()

    compiled = compile_for(jax.grad(loss, argnums=(0, 1, 2, 3)), (state, q, v, gate), generation)
    assert "linear_attention_backward" in compiled.as_text()
    # The states before chunks, the inverses of their systems, and some ten arrays of tokens.
    width, chunks = max(D, 128), B * -(-T // 64) * H
    kept, tokens = 4 * chunks * (width**2 + 64**2 * beta), 4 * B * (T + 64) * H * width
    assert compiled.memory_analysis().temp_size_in_bytes <= kept + 10 * tokens + 2**23


@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.tier(every=5)
def test_documents_compile(generation: str, gradients: bool) -> None:
    B, T, H, D = 2, 512, 8, 128
    operation = TPULinearAttention(OperationMetadata(platform="tpu", on_unsupported="error"))
    x, gate = jax.ShapeDtypeStruct((B, T, H, D), jnp.bfloat16), jax.ShapeDtypeStruct((B, T, H), jnp.float32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, gate: jax.Array, segment: jax.Array) -> jax.Array:
        mask = Segments(segment)
        output = operation(q, k, v, decay=gate, beta=gate, mask=mask, mode="train").attention_outputs
        return output.astype(jnp.float32).sum()

    arguments = x, x, x, gate, jax.ShapeDtypeStruct((B, T), jnp.int32)
    function = jax.value_and_grad(loss, argnums=(0, 1, 2, 3)) if gradients else loss
    program = compile_for(function, arguments, generation).as_text()
    names = re.findall(r"%(linear_attention(?:_backward)?)[.\d]* = .*tpu_custom_call", program)
    # Without gradients once more where outputs are not finite, see `attnops_linear.nonfinite`.
    assert sorted(names) == ["linear_attention", "linear_attention_backward" if gradients else "linear_attention"]


def test_products_of_bfloat16_parts_have_their_precision_whatever_is_in_force() -> None:
    operation = TPULinearAttention(OperationMetadata(platform="tpu", on_unsupported="error"))
    x = jax.ShapeDtypeStruct((1, 128, 2, 128), jnp.float32)
    with jax.default_matmul_precision("highest"):
        compile_for(lambda x: operation(x, x, x, mode="prefill").attention_outputs, (x,), "v6e")
