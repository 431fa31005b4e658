"""Eager calls: numbers, and what functions close over, are data; other ones compile nothing anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.biases import ALiBi, ScoreFn
from attnops.masks import Causal, MaskFn, PrefixLM, SlidingWindow
from attnops.testing.oracle import attention
from attnops.testing.tolerance import assert_close, tolerance

CALLS = 200
T, S, H, D = 24, 40, 2, 8
I, J = np.ogrid[:T, :S]


def mask_over(i: int, table: Any) -> MaskFn:
    return MaskFn(lambda b, h, q, kv: (kv % (i + 2) != 0) | (table[q] == i))


def bias_over(i: int, table: Any) -> ScoreFn:
    return ScoreFn(lambda s, b, h, q, kv: s * (i / 100) + table[kv])


# By what differs: the options of call i, and what they should mean to the oracle.
KINDS: dict[str, Callable[[int], tuple[dict[str, Any], dict[str, Any]]]] = {
    "softmax scale": lambda i: ({"softmax_scale": 0.01 * (i + 1)},) * 2,
    "soft cap": lambda i: ({"logits_soft_cap": 0.5 + i / 10},) * 2,
    "window": lambda i: ({"mask": SlidingWindow(i, 0)}, {"mask": (I + 16 - i <= J) & (J <= I + 16)}),
    "offset": lambda i: ({"mask": Causal(offset=i)}, {"mask": I + i >= J}),
    "prefix": lambda i: ({"mask": PrefixLM(i)}, {"mask": (i > J) | (J <= I + 16)}),
    "offset of a bias": lambda i: (
        {"bias": ALiBi(np.array([0.5, 0.125], np.float32), offset=i)},
        {"bias": -np.array([0.5, 0.125])[:, None, None] * np.abs(J - I - i)},
    ),
    "function of a mask": lambda i: (
        {"mask": mask_over(i, jnp.arange(T) % (i + 1))},
        {"mask": (J % (i + 2) != 0) | (I % (i + 1) == i)},
    ),
    "function of a bias": lambda i: ({"bias": bias_over(i, jnp.arange(S) * (i / 1000))}, {}),
}


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """What is compiled while the test runs; programs that are found on disk count too."""
    found: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(details.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def operands(dtype: Any = np.float32) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((1, n, H, D)), dtype) for n in (T, S, S))


def check(out: jax.Array, **options: Any) -> None:
    q, k, v = operands(out.dtype)
    options = {name: x[None, None] if name == "mask" else x for name, x in options.items()}
    exact, plain = (attention(q, k, v, dtype=dtype, **options) for dtype in (np.float64, np.dtype(out.dtype)))
    assert_close("output", out, exact.out, tolerance(exact.out, plain.out, exact.out_magnitude, out.dtype, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_flash_compiles_once_for_all_numbers_of_a_kind(kind: str, compiled: list[str]) -> None:
    operation = OperationRegistry.create("attnops:flash", OperationMetadata(block_q=16, block_k=16))
    calls = [KINDS[kind](i) for i in range(CALLS)]
    jax.block_until_ready(operation(*operands(), **calls[3][0]))
    compiled.clear()
    outs = [operation(*operands(), **options).attention_outputs for options, _ in calls]
    assert compiled == []
    for i in (0, 1, 2, 15, 39, 60, CALLS - 1):
        if calls[i][1]:
            check(outs[i], **calls[i][1])


def test_what_scores_become_by_functions_with_other_numbers(compiled: list[str]) -> None:
    operation = OperationRegistry.create("attnops:flash", OperationMetadata())
    q, k, _ = operands()
    scores = np.einsum("bthd,bshd->bhts", q, k) * D**-0.5
    for i in (0, 7, 50):
        out = operation(*operands(), bias=bias_over(i, jnp.arange(S) * (i / 1000))).attention_outputs
        check(out, bias=scores * (i / 100) - scores + J * (i / 1000))


def test_gradients_share_programs_too(compiled: list[str]) -> None:
    operation = OperationRegistry.create("attnops:flash", OperationMetadata())
    q, k, v = operands()

    def gradient(i: int) -> jax.Array:
        options = {"softmax_scale": 0.1 * (i + 1), "logits_soft_cap": 2.0 + i, "mask": SlidingWindow(i, 0)}
        return jax.vjp(lambda q: operation(q, k, v, **options).attention_outputs, q)[1](q)[0]

    gradient(3).block_until_ready()
    compiled.clear()
    found = [gradient(i) for i in range(5)]
    assert compiled == []
    # Under jit numbers are part of the program.
    for i in (0, 4):
        np.testing.assert_allclose(found[i], jax.jit(lambda i=i: gradient(i))(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 0.17])
def test_bfloat16_is_the_same_to_the_bit_eager_and_compiled(scale: float) -> None:
    operation = OperationRegistry.create("attnops:flash", OperationMetadata())
    run = lambda *x: operation(*x, softmax_scale=scale).attention_outputs  # noqa: E731
    x = operands(jnp.bfloat16)
    np.testing.assert_array_equal(run(*x), jax.jit(run)(*x))
    if scale > 0:
        check(run(*x), softmax_scale=scale)


@pytest.mark.parametrize("name", ["vanilla", "sdpa"])
@pytest.mark.parametrize("kind", ["softmax scale", "soft cap", "window", "offset", "function of a mask"])
def test_operations_that_are_not_compiled_compile_no_number(name: str, kind: str, compiled: list[str]) -> None:
    if (name, kind) == ("sdpa", "soft cap"):
        return
    operation = OperationRegistry.create(f"attnops:{name}", OperationMetadata(mode="prefill"))
    jax.block_until_ready(operation(*operands(), **KINDS[kind](3)[0]))
    compiled.clear()
    for i in range(4, 20):
        operation(*operands(), **KINDS[kind](i)[0])
    assert compiled == []
