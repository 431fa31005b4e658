"""Linear attention and its convolution are those of transformers' models in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from attnops_linear import CausalConv1d, LinearAttention

TOLERANCE = 1e-4  # relative to the largest element


def draw(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32))


def to_jax(x: torch.Tensor) -> jax.Array:
    return jnp.asarray(x.numpy())


def assert_close(found: Any, expected: torch.Tensor) -> None:
    exact = expected.numpy()
    assert exact.std() > 0.01
    np.testing.assert_allclose(found, exact, rtol=0, atol=TOLERANCE * np.abs(exact).max())


@pytest.mark.parametrize("rule", [qwen3_next.torch_chunk_gated_delta_rule, qwen3_next.torch_recurrent_gated_delta_rule])
def test_qwen3_nexts_gated_delta_rule(rule: Callable[..., Any]) -> None:
    query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (draw(2, 75, 2, 8), draw(2, 75, 2, 8).flip(1)))
    value, state = draw(2, 75, 4, 12), draw(2, 4, 8, 12)
    decay, beta = -torch.nn.functional.softplus(draw(2, 75, 4)), torch.sigmoid(draw(2, 75, 4).flip(1))
    outputs, last = rule(query, key, value, decay, beta, initial_state=state, output_final_state=True)
    found = LinearAttention()(
        *map(to_jax, (query, key, value)), decay=to_jax(decay), beta=to_jax(beta), initial_state=to_jax(state),
        return_state=True,
    )  # fmt: skip
    assert_close(found.attention_outputs, outputs)
    assert_close(found.state, last)


def test_mamba2s_scan() -> None:
    x, B, C = draw(2, 43, 4, 12), draw(2, 43, 2, 8), draw(2, 43, 2, 8).flip(1)
    dt, A, D = torch.nn.functional.softplus(draw(2, 43, 4)), -torch.exp(draw(4)), draw(4).flip(0)
    outputs, last = mamba2.mamba2_chunk_scan(x, dt, A, B, C, chunk_size=16, D=D, return_final_states=True)
    found = LinearAttention()(
        to_jax(C), to_jax(B), to_jax(x * dt[..., None]), decay=to_jax(dt * A), scale=1.0, return_state=True
    )
    assert_close(found.attention_outputs + to_jax(D[:, None] * x), outputs)
    assert_close(jnp.swapaxes(found.state, -1, -2), last)  # type: ignore[arg-type]


def test_the_convolution() -> None:
    x, weight, bias, state = draw(2, 9, 6), draw(6, 4), draw(6), draw(2, 3, 6)
    expected = qwen3_next.causal_conv1d_fn(x.mT, weight, bias).mT
    assert_close(CausalConv1d()(*map(to_jax, (x, weight)), bias=to_jax(bias)).outputs, expected)
    before = state.mT.contiguous()
    expected = qwen3_next.causal_conv1d_update(x.mT, before, weight, bias).mT
    found = CausalConv1d()(*map(to_jax, (x, weight)), bias=to_jax(bias), state=to_jax(state), return_state=True)
    assert_close(found.outputs, expected)
    assert_close(found.state, before.mT)
