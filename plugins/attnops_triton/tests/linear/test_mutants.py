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
BFLOAT16 = ("four blocks",)


@functools.cache
def compiled(case: str) -> Callable[[], None]:
    """A function that runs the program of a case, and asserts that its results are right."""
    dtype = jnp.bfloat16 if case in BFLOAT16 else jnp.float32
    (query, key, value), options = CASES[case](np.random.default_rng(0))
    mask = options.pop("mask", None)
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in options.items()}
    arrays |= {name: jnp.asarray(x, dtype) for name, x in (("query", query), ("key", key), ("value", value))}
    operation: Any = TritonLinearAttention(OperationMetadata(platform="cuda", interpret=True))
    native: Any = LinearAttention()
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
    "beta is left out of the system": ("four blocks", "found[c] * betas[b][:, None]", "found[c]"),
    "beta is left out of the inverse": ("chunks", "found[c] * betas[c][None, :]", "found[c]"),
    "blocks are solved to first order": ("chunks", "range(_BLOCK - 1)", "range(1)"),
    "a block between two is left out": (
        "four blocks", "for m in tl.static_range(c + 1, b)", "for m in tl.static_range(b, b)"
    ),
    "bfloat16 parts are one": ("four blocks", "if i + j > 0 and i + j < count:", "if i + j > 99:"),
    "the delta rule does not ask the state": ("chunks", "value.to(tl.float32) - past", "value.to(tl.float32)"),
    "what is asked does not decay": ("chunks", "past = past * kept[:, None]", "pass"),
    "updates do not decay": ("chunks", "update = update * tl.load(token + options.tiles.C)[:, None]", "pass"),
    "the state does not decay": ("chunks", "state = state * tl.load(", "state = state + 0.0 * tl.load("),
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
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
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
