"""What the quick tests check notices mistakes in the kernels: each is planted in their source."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_mistakes import with_mistakes

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import DenseCache, Quantized
from attnops_testing import attention
from attnops_testing.caches import cache_problem
from attnops_testing.runner import Subject
from attnops_triton.caches.tile_sizes import splits
from attnops_triton.language import interpreter
from attnops_triton.language.source import KernelFunction

SUBJECT = Subject(operation="attnops-triton:flash", platform="cuda", interpret=True)
# The first two are those of `test_kernel.py`, which shows that they are right.
WINDOW = ("paged", "window per batch", "19 queries", "GQA", "sinks", "soft cap", "logsumexp", "left padding")
PACKED = ("paged", "int8 by token_head", "Causal", "GQA", "3 queries", "packed rows", "float16", "logsumexp")
STEP = "step"


@functools.cache
def compiled(name: tuple[str, ...] | str) -> Callable[[], None]:
    """A function that runs the program of a problem, and asserts that its results are right."""
    if name == STEP:
        return full_row()
    problem = cache_problem(SUBJECT, name)
    with splits(3 if name == PACKED else 1):
        program = jax.jit(problem.program(SUBJECT.make(problem.metadata))).lower(*problem.arguments).compile()

    def check() -> None:
        out, by_query, _ = jax.tree.map(np.asarray, program(*problem.arguments))
        problem.check_output(out, by_query)

    return check


def full_row() -> Callable[[], None]:
    """A step that fills a row, whose last tile of keys reaches beyond it; scales by head."""
    cache = DenseCache.create(
        batch=2, length=40, kv_heads=2, head_dim=16, dtype=jnp.float32, codec=Quantized("int8", "head"),
        key_scale=[0.02, 0.05], value_scale=[0.04, 0.01],
    )  # fmt: skip
    query, key, value = (jax.random.normal(jax.random.key(i), (2, 40, heads, 16)) for i, heads in enumerate((4, 2, 2)))
    cache = cache.append(key[:, :39], value[:, :39], lengths=[39, 20])
    new = query[:, 39:], key[:, 39:], value[:, 39:]
    metadata = OperationMetadata(platform="cuda", interpret=True, on_unsupported="error", block_k=16)
    operation: Any = OperationRegistry.create("attnops-triton:flash", metadata)
    with splits(2):
        program = jax.jit(lambda *x: operation.step(*x, mask=Causal())).lower(*new, cache).compile()
    after = cache.append(*new[1:])
    keys, values, _, held = after.read()
    expected = attention(new[0], keys, values, mask=np.asarray(held)[:, None, None]).out

    def check() -> None:
        out, written = program(*new, cache)
        np.testing.assert_allclose(out.attention_outputs, expected, atol=1e-5)
        for got, right in zip(jax.tree.leaves(written), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(got, right)

    return check


VALUE_FACTOR = "(x.stored.key_scale if options.is_latent else x.stored.value_scale) + program.scale"
QUICK = {
    "a page is read one too far": (WINDOW, "bk)) // options.page", "bk)) // options.page + 1"),
    "a tile is read from the page of the one before": (WINDOW, "entry = after", "pass"),
    "masked scores are not": (WINDOW, 's = tl.where(ok, s, float("-inf"))', "pass"),
    "a split is left out of the denominator": (PACKED, "mask=each < n.splits,", "mask=each < n.splits - 1,"),
    "a split is left out of the sums": (PACKED, "mask=some < n.splits,", "mask=some < n.splits - 1,"),
    "scales of keys are those of another head": (PACKED, "key_scale, tile, program.k,", "key_scale, tile, 0,"),
    "scales of values are those of another token": (
        PACKED, "(tokens.value_scale, tile,", "(tokens.value_scale, tile._replace(within=tile.within // 2 * 2),"
    ),
    "scales by head are those of the first": (STEP, VALUE_FACTOR, f"{VALUE_FACTOR} * 0"),
    "the last tile has no end": (STEP, "ok = (tile.slot < n.S)[None, :] & ok", "pass"),
}  # fmt: skip
SLOW = {
    "pages are those of another row": (PACKED, "program.row.to(tl.int64) * n.pages + tl", "tl"),
    "a query sees a slot too many": (STEP, "kv < stop", "kv <= stop"),
    "a tile of a split is left out": (STEP, "each = (stop - first + n.splits - 1)", "each = (stop - first)"),
    "splits of packed rows are a tile apart": (PACKED, "(split + 1) * each", "(split + 1) * each - 1"),
    "splits have the weights of their own maximum": (PACKED, "tl.exp2((some_m - below)", "tl.exp2((some_m - some_m)"),
    "the window begins a token late": (WINDOW, ">= values[2]", "> values[2]"),
    "the sink is another head's": (WINDOW, "x.sinks + hr", "x.sinks + hr * 0"),
    "padding gets an output": (PACKED, "stored = stored & seen_any", "pass"),
    "scales are left out": (STEP, "acc = acc * state.unit", "pass"),
    "a new token is rounded down": (STEP, "(x + 12582912.0)", "(x - 0.5 + 12582912.0)"),
    "a new token has another head's scale": (
        STEP,
        "x.stored.key_scale + program.scale, options.D",
        "x.stored.key_scale, options.D",
    ),
    "a new token is written a slot early": (STEP, "* n.S + slot", "* n.S + slot - 1"),
    "a new token is read before it is written": (STEP, "range(first, stop)", "range(first, first)"),
}


@pytest.mark.slow
def test_without_a_mistake_a_step_that_fills_a_row_is_right() -> None:
    compiled(STEP)()


@pytest.mark.parametrize("mistake", [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)])
@pytest.mark.tier(quick=["a page is read one too far"], every=2)
def test_a_mistake_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, old, new = (QUICK | SLOW)[mistake]
    check, run, found = compiled(problem), interpreter.run_on_host, []

    def mutated(kernel: KernelFunction, *given: Any) -> None:
        found.append(old in kernel.text)
        run(with_mistakes(kernel, old, new) if found[-1] else kernel, *given)

    monkeypatch.setattr(interpreter, "run_on_host", mutated)
    with pytest.raises(AssertionError):
        check()
    assert any(found), "the kernels have no such line"
