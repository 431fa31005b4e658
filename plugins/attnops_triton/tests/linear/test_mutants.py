"""What the suite checks notices mistakes in the kernels: each is planted in their source."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_mistakes import with_mistakes

import attnops
from attnops import OperationMetadata
from attnops_linear import LinearAttention
from attnops_linear.testing import documents, padding, problem
from attnops_triton.language import interpreter
from attnops_triton.language.source import KernelFunction
from attnops_triton.linear.operation import TritonLinearAttention

pytestmark = pytest.mark.slow
CASES = {
    "chunks": problem(
        40, B=1, decays=(0.0, -1e4, -150.0), betas=(0.0, 2.0), mask=lambda B, T: documents(B, T) & padding(B, T)
    ),
    "four blocks": problem(64, B=1, K=1, H=1, decay="constant"),  # of 16 tokens
    "tokens": problem(
        3, K=1, H=2,
        mask=lambda B, T: attnops.masks.Segments(np.array([0, 0, 1])) & attnops.masks.KeyPadding(
            np.array([[True, False, True], [True, True, True]])
        ),
    ),
}  # fmt: skip
GRADIENTS = {
    "gradients": problem(
        40, B=1, K=1, H=2, decays=(-1e4, -150.0), betas=(0.0, 2.0), mask=lambda B, T: documents(B, T) & padding(B, T)
    ),
    "gradients without documents": problem(64, B=1, K=1, H=2),
}
BFLOAT16 = ("four blocks",)
operation: Any = TritonLinearAttention(OperationMetadata(platform="cuda", interpret=True))
native: Any = LinearAttention()


@functools.cache
def compiled(case: str) -> Callable[[], None]:
    """A function that runs the program of a case, and asserts that its results are right."""
    dtype = jnp.bfloat16 if case in BFLOAT16 else jnp.float32
    (query, key, value), options = (CASES | GRADIENTS)[case](np.random.default_rng(0))
    mask = options.pop("mask", None)
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in options.items()}
    arrays |= {name: jnp.asarray(x, dtype) for name, x in (("query", query), ("key", key), ("value", value))}
    if case in GRADIENTS:
        return gradients(arrays, mask)
    program = jax.jit(lambda x: operation(**x, mask=mask, return_state=True)).lower(arrays).compile()
    expected = native(**arrays, mask=mask, return_state=True)

    def check() -> None:
        outputs, state = program(arrays)
        np.testing.assert_allclose(state, expected.state, atol=3e-5)
        np.testing.assert_allclose(
            outputs.astype(jnp.float32), expected.attention_outputs.astype(jnp.float32),
            **({"atol": 3e-5} if dtype == jnp.float32 else {"atol": 1e-2, "rtol": 2**-7}),
        )  # fmt: skip

    return check


def gradients(arrays: dict[str, jax.Array], mask: Any) -> Callable[[], None]:
    """`compiled` of a case's gradients."""

    def slopes(operation: Any) -> Any:
        def loss(x: dict[str, jax.Array]) -> jax.Array:
            outputs, state = operation(**x, mask=mask, return_state=True)
            return jnp.sin(outputs).sum() + jnp.cos(state).sum()

        return jax.jit(jax.grad(loss)).lower(arrays).compile()

    program, expected = slopes(operation), slopes(native)(arrays)

    def check() -> None:
        for name, x in program(arrays).items():
            np.testing.assert_allclose(x, expected[name], rtol=0, atol=3e-6 * np.abs(expected[name]).max())

    return check


MISTAKES = {
    "a token's own decay is left out": ("chunks", "0, total) + coarse", "0, total) + coarse - multiple"),
    "sums of blocks begin anew": ("chunks", "coarse = coarse + tl.reduce", "coarse = 0.0 * tl.reduce"),
    "decays are summed in one float32": ("chunks", "tl.floor(decay * 1024.0 + 0.5)", "0.0 * tl.floor(decay)"),
    "a reset is passed over": (
        "chunks", "keeps = keeps & (later.resets[:, None] == earlier.resets[None, :])", "pass"
    ),
    "a reset keeps the state": ("chunks", "of_block.resets == 0", "of_block.resets >= 0"),
    "the end has no resets": ("chunks", "of_block.resets == end.resets", "of_block.resets >= 0"),
    "a token sees those after it": ("chunks", "keeps = row[:, None] >= row", "keeps = row[:, None] + 99 >= row"),
    "beta is left out of the system": ("four blocks", "found[c] * betas[c][None, :]", "found[c]"),
    "beta is left out of scores": ("chunks", "block = block * betas[c][None, :]", "pass"),
    "beta is left out of updates": ("chunks", "rest = rest * betas[b]", "pass"),
    "blocks are solved to first order": ("chunks", "range(_BLOCK - 1)", "range(1)"),
    "a block between two is left out": (
        "four blocks", "for m in tl.static_range(c + 1, b)", "for m in tl.static_range(b, b)"
    ),
    "bfloat16 parts are one": ("four blocks", "if i + j > 0 and i + j < count:", "if i + j > 99:"),
    "the delta rule does not ask the state": ("chunks", "value.to(tl.float32) - past", "value.to(tl.float32)"),
    "what is asked does not decay": ("chunks", "past = past * kept[:, None]", "pass"),
    "updates do not decay": ("chunks", "update = solved * load_gates(x, index, 1, options)[:, None]", "pass"),
    "the state does not decay": ("chunks", "state = state * load_whole(x, index, options)", "pass"),
    "key heads are those of another group": ("chunks", "program.h // options.G", "0 * program.h"),
    "padding is a token": ("chunks", "real = flags != 2", "pass"),
    "a head reads another one's state": (
        "chunks", "load_state(x.initial, program, first", "load_state(x.initial, program._replace(state=0), first"
    ),
    "the scale is left out": ("chunks", "output * options.scale", "output"),
    "a step does not decay": ("tokens", "0.0, state * kept)", "0.0, state)"),
    "a step keeps the state of another segment": ("tokens", "begins = flags == 1", "pass"),
    "a step does not update": ("tokens", "state = state + key[:, None] * update\n", "pass\n"),
    "a step ignores beta": ("tokens", "beta * (update - past)", "update - past"),
    "the last state has no gradient": ("gradients", "d_state = load_state(x.initial", "d_state = load_state(None"),
    "chunks go forward": (
        "gradients without documents", "chunk = n.chunks - 1 - i", "chunk = i"
    ),
    "the gradient of a state is that of the chunk before": (
        "gradients without documents", "load_state(x.initial, program, first, options)\n    for i",
        "load_state(x.initial, program, first, options) * 0.5\n    for i",
    ),
    "a state's gradient does not decay": ("gradients", "d_state = d_state * load_whole(x, index, options)", "pass"),
    "outputs pass nothing on to the state": ("gradients", "d_state = d_state + added", "pass"),
    "keys pass nothing on to the state": ("gradients", "d_state = d_state - added", "pass"),
    "what is passed on does not decay": ("gradients", "of_query = of_query * kept\n            of_key", "of_key"),
    "values have no gradient of the state": ("gradients", "d_value = product((key,)", "d_value = 0.0 * product((key,)"),
    "a system is not transposed": (
        "gradients without documents", "load_square(x.inverse, index, True", "load_square(x.inverse, index, False"
    ),
    "padding is a token backward": ("gradients", "tl.where(real, values, 0.0)", "values"),
    "resets are passed over backward": (
        "gradients", "(row >= column) & (resets[:, None] == resets[None, :])", "(row >= column)"
    ),
    "the system has a diagonal": ("gradients", "row > column, -of_values", "row >= column, -of_values"),
    "the delta rule's products lack their sign": ("gradients", "row > column, -of_values", "row > column, of_values"),
    "they are not symmetric": ("gradients", "of_values = of_values + tl.trans(of_values)", "pass"),
    "beta is left out of queries' gradients": ("gradients", "of_outputs = of_outputs * beta[None, :]", "pass"),
    "a decay's gradient has the token's own product": (
        "gradients", "before = tl.dot(earlier,", "before = tl.dot(earlier + tl.where(row == column, 1.0, 0.0),"
    ),
    "a decay's gradient lacks beta": ("gradients", "found = found * beta[None, :]", "pass"),
    "a decay's gradient lacks the state before": ("gradients", "of_kept += tl.reduce(", "of_kept += 0.0 * tl.reduce("),
    "a decay's gradient lacks the state after": ("gradients", "of_rest = of_rest * beta", "of_rest = of_rest * 0.0"),
    "a decay's gradient lacks the whole": (
        "gradients without documents", "of_whole += tl.reduce(", "of_whole += 0.0 * tl.reduce("
    ),
    "a beta's gradient lacks the state": ("gradients", "d_beta + of_rest", "d_beta"),
    "queries' gradients lack the scale": ("gradients", "of_query = of_query * options.scale", "pass"),
    "scores' gradients lack the scale": ("gradients", "of_outputs = of_outputs * options.scale", "pass"),
    "scores' gradients do not decay": ("gradients", "of_outputs = of_outputs * decays", "pass"),
    "keys' gradients lack the system": ("gradients", "of_update * beta[None, :] - of_key", "of_update * beta[None, :]"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES | GRADIENTS)
def test_without_a_mistake_it_is_right(case: str) -> None:
    compiled(case)()


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.tier(every=3)
def test_a_mistake_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, old, new = MISTAKES[mistake]
    check, run, found = compiled(case), interpreter.run_on_host, []

    def mutated(kernel: KernelFunction, *given: Any) -> None:
        found.append(old in kernel.text)
        run(with_mistakes(kernel, old, new) if found[-1] else kernel, *given)

    monkeypatch.setattr(interpreter, "run_on_host", mutated)
    with pytest.raises(AssertionError):
        check()
    assert any(found), "the kernels have no such line"
