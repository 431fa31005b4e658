"""Decoding over a cache gives the tokens of the computation without one, and the demonstration notices if not."""

from __future__ import annotations

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attnops_caches import DenseCache
from rich.console import Console

import attnops
from attnops.masks import Causal, SlidingWindow

from . import demo, model

LENGTHS = np.array([8, 5], np.int32)
COUNT = 6


@pytest.fixture(scope="module")
def params() -> model.Params:
    return model.init()


@pytest.fixture(scope="module")
def prompt() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, model.V, (2, 8)), jnp.int32)


@pytest.fixture(scope="module")
def op() -> Any:
    return attnops.OperationRegistry.create("attnops:vanilla", attnops.OperationMetadata(mode="prefill"))


@pytest.fixture(scope="module")
def uncached(params: model.Params, prompt: jax.Array, op: Any) -> model.Generated:
    return model.generate_uncached(params, prompt, jnp.asarray(LENGTHS), op=op, mask=Causal(), count=COUNT)


def dense(length: int) -> tuple[DenseCache, ...]:
    sizes = {"batch": 2, "kv_heads": model.K, "head_dim": model.D, "dtype": jnp.float32}
    return tuple(DenseCache.create(length=length, **sizes) for _ in range(model.L))


@pytest.mark.slow
def test_the_tokens_are_those_without_a_cache(
    params: model.Params, prompt: jax.Array, op: Any, uncached: model.Generated
) -> None:
    found, caches = model.generate(params, dense(14), prompt, LENGTHS, op=op, count=COUNT, chunk=4)
    np.testing.assert_array_equal(found.tokens, uncached.tokens)
    np.testing.assert_allclose(found.logits, uncached.logits, atol=1e-5)
    assert [cache.lengths.tolist() for cache in caches] == [[14, 11]] * model.L
    assert not found.overflowed.any()


@pytest.mark.slow
def test_a_short_prompt_without_padding_gives_the_same(
    params: model.Params, prompt: jax.Array, op: Any, uncached: model.Generated
) -> None:
    alone = model.generate_uncached(params, prompt[1:, :5], jnp.array([5]), op=op, mask=Causal(), count=COUNT)
    np.testing.assert_array_equal(alone.tokens[0], uncached.tokens[1])


def result(tokens: Any, logits: Any, overflowed: bool = False) -> model.Generated:
    return model.Generated(tokens, logits, jnp.array([overflowed]))


@pytest.mark.parametrize(
    ("wrong", "label", "agrees"),
    [
        ({}, "dense", True),
        ({"tokens": 1}, "dense", False),
        ({"tokens": 1}, "pages of 16, int8", True),
        ({"logits": 2e-4}, "dense", False),
        ({"logits": 2e-4}, "pages of 16, int8", True),
        ({"logits": 0.06}, "pages of 16, int8", False),
        ({"logits": 0.06}, "dense, e4m3", True),
        ({"logits": 0.3}, "dense, e4m3", False),
        ({"overflowed": True}, "dense", False),
    ],
)
def test_disagreement_is_noticed(
    wrong: dict[str, Any], label: str, agrees: bool, params: model.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, logits = np.zeros((demo.B, demo.N), np.int32), np.zeros((demo.B, model.V), np.float32)
    reference = result(tokens, logits)
    tokens, logits = tokens.copy(), logits.copy()
    tokens[0, 3], logits[0, 3] = wrong.get("tokens", 0), wrong.get("logits", 0)
    found = result(tokens, logits, wrong.get("overflowed", False))
    monkeypatch.setattr(model, "generate", lambda params, caches, *_, **__: (found, caches))
    references = {False: reference, True: reference}
    measured = demo._measure("vanilla", label, None, demo.make_caches()[label], params, None, references)  # type: ignore[arg-type]
    assert measured.agrees is agrees


def shown(monkeypatch: pytest.MonkeyPatch, agrees: bool, operations: list[str] | None) -> tuple[int, str]:
    """`demo.run` with its measurements replaced: its status, and what it prints."""

    def measure(name: str, label: str, *_: Any) -> demo.Result:
        if name == "sdpa":
            raise attnops.UnsupportedError("out of [order]")
        return demo.Result(name, label, 1000, demo.B * demo.N, 0.0, 1.0, agrees)

    monkeypatch.setattr(demo, "_references", lambda *_: ({}, 1.0))
    monkeypatch.setattr(demo, "_measure", measure)
    monkeypatch.setattr(demo, "_compile", lambda *_: None)
    console = Console(file=io.StringIO(), width=160)
    status = demo.run(console, operations)
    return status, console.file.getvalue()  # type: ignore[attr-defined]


def test_the_first_operation_decodes_over_every_cache_and_the_others_over_one(monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = shown(monkeypatch, True, ["flash", "vanilla"])
    assert status == 0
    assert [text.count(f"  {name}  ") for name in ("flash", "vanilla")] == [len(demo.make_caches()), 2]


def test_what_disagrees_or_is_refused_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, False, ["vanilla"])[0] == 1
    status, text = shown(monkeypatch, True, ["vanilla", "sdpa"])
    assert (status, "sdpa did not run: out of [order]" in text) == (1, True)
    with pytest.raises(attnops.UnknownOperationError):
        shown(monkeypatch, True, ["vanila"])


@pytest.mark.slow
def test_a_window_is_another_computation(params: model.Params, prompt: jax.Array, op: Any) -> None:
    """The tolerance of the demonstration would notice a window that is one token too short."""
    found = [
        model.generate_uncached(params, prompt, LENGTHS, op=op, mask=Causal() & SlidingWindow(w, 0), count=1).logits
        for w in (3, 2)
    ]
    assert jnp.abs(found[0] - found[1]).max() > max(demo.TOLERANCE.values())


@pytest.mark.slow
def test_the_demonstration_agrees() -> None:
    console = Console(file=io.StringIO(), width=160)
    assert demo.run(console) == 0
