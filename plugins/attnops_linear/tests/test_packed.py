"""Packed tokens of several rows of a cache, and drafts, are the calls of each row alone."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

from attnops.masks import KeyPadding, Segments
from attnops_caches import Rows
from attnops_linear import CausalConv1d, LinearAttention, StateCache, reference
from attnops_linear.testing import problem

B, K, H, D, Dv, C, W = 4, 1, 2, 4, 6, 3, 4
LINEAR, CONV = LinearAttention(), CausalConv1d()
WEIGHT = np.random.default_rng(1).normal(size=(C, W)).astype(np.float32)
# The tokens of each of four runs in each of four steps, and the row of each; rows go on where they were.
STEPS = (
    ([70, 1, 0, 3], [2, 0, 1, 3]), ([1, 1, 1, 0], [3, 2, 0, 7]),
    ([0, 2, 80, 0], [1, 1, 0, 2]), ([1, 0, 5, 9], [0, 2, 1, 3]),
)  # fmt: skip
N = 90


def exact(given: dict[str, Any], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and states of `reference` in float64."""
    with jax.enable_x64(True):
        wide = {name: np.asarray(y, np.float64) for name, y in given.items()}
        outputs, state = jax.jit(lambda x: reference(**x, **options))(wide)
        return np.asarray(outputs), np.asarray(state)


def arrays(T: int, **options: Any) -> dict[str, np.ndarray]:
    draw = problem(T, B=B, K=K, H=H, D=D, Dv=Dv, state=False, **options)
    (query, key, value), found = draw(np.random.default_rng(0))
    x = np.random.default_rng(2).normal(size=(B, T, C))
    given = {"query": query, "key": key, "value": value, "x": x, **found}
    return {name: np.asarray(y, np.float32) for name, y in given.items()}


def check_steps(**options: Any) -> None:
    given = arrays(N, **options)
    x = given.pop("x")
    by_token = {name: y for name, y in given.items() if y.ndim > 1}
    cache = StateCache.create(batch=B, heads=H, head_dim=D, value_head_dim=Dv, conv=(C, W))
    done = np.zeros(B, int)

    @jax.jit
    def step(cache: StateCache, rows: Rows, tokens: dict[str, Any], x: Any) -> Any:
        mixed, cache = CONV.step(x, WEIGHT, cache, rows=rows)
        output, cache = LINEAR.step(**(given | tokens), cache=cache, rows=rows)
        return output.attention_outputs, mixed.outputs, cache

    whole, _ = exact(given)
    padded = np.pad(x, ((0, 0), (W - 1, 0), (0, 0)))
    convolved = sum(padded[:, i : i + N] * WEIGHT[:, i] for i in range(W))
    for counts, slots in STEPS:
        starts = np.concatenate([[2], 2 + np.cumsum(counts)])  # padding before and after them
        packed = {name: np.full((1, N, *y.shape[2:]), np.nan, np.float32) for name, y in (by_token | {"x": x}).items()}
        places = [
            (slice(at, at + n), (b, slice(done[b], done[b] + n)))
            for n, b, at in zip(counts, slots, starts[:-1], strict=True)
            if n
        ]
        for at, token in places:
            for name, y in (by_token | {"x": x}).items():
                packed[name][0, at] = y[token]
        mixed_tokens = packed.pop("x")
        found = step(cache, Rows(starts, np.array(slots)), packed, mixed_tokens)
        outputs, mixed, cache = np.asarray(found[0]), np.asarray(found[1]), found[2]
        others = np.ones(N, bool)
        for at, token in places:
            np.testing.assert_allclose(outputs[0, at], whole[token], atol=2e-5)
            np.testing.assert_allclose(mixed[0, at], convolved[token], atol=2e-5)
            others[at], done[token[0]] = False, token[1].stop
        assert not outputs[0, others].any()
        assert not mixed[0, others].any()
        np.testing.assert_array_equal(cache.lengths, done)
    _, states = exact(given, mask=KeyPadding(np.arange(N) < done[:, None]))
    np.testing.assert_allclose(cache.state, states, atol=2e-5)
    last = np.stack([padded[b, done[b] : done[b] + W - 1] for b in range(B)])
    np.testing.assert_array_equal(cache.conv, last)


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["none", "constant", "channel"])
def test_packed_steps_of_other_decays(decay: str) -> None:
    check_steps(decay=decay, beta=decay != "constant")


def test_prompts_and_single_tokens_of_rows_in_one_step() -> None:
    check_steps()


def test_what_packed_rows_cannot_have_is_refused() -> None:
    given = {name: y[:1] for name, y in arrays(5).items()}
    x = given.pop("x")
    arrays_of = np.zeros((B, H, D, Dv), np.float32), np.zeros((B, W - 1, C), np.float32), np.zeros(B, np.int32)
    cache = StateCache(*arrays_of)  # type: ignore[arg-type]
    rows = Rows([0, 2, 5], [1, 3])
    for options, text in (
        ({"query_lengths": [5]}, "rows and query_lengths are given"),
        ({"mask": Segments(np.zeros(5, int))}, "rows and mask are given"),
        ({"rows": Rows([0, 2, 5], [1, 1])}, "Rows' slots=[1, 1] overlap"),
        ({"rows": Rows([0, 2, 6], [1, 2])}, "Rows' starts=[0, 2, 6] must not decrease"),
        ({"rows": Rows([0, 5], [4])}, "Rows' slots=[4] must be rows of the cache, 0 to 3"),
        ({"rows": 3}, "rows is a int, but must be an attnops_caches.Rows"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            LINEAR.step(**given, cache=cache, **({"rows": rows} | options))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=re.escape(text)):
            CONV.step(x, WEIGHT, cache, **({"rows": rows} | options))  # type: ignore[arg-type]
    two = {name: np.concatenate([y, y]) for name, y in given.items()}
    with pytest.raises(ValueError, match=re.escape("rows are given with 2 rows of tokens, but packed tokens have one")):
        LINEAR.step(**two, cache=cache, rows=rows)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape("must have [B, W - 1, C]=[B, 2, 3]: create it with conv=(3, 3)")):
        CONV.step(x, WEIGHT[:, 1:], cache, rows=rows)
    for given_rows in (None, rows):
        with pytest.raises(ValueError, match="return_state is given, but step takes the state from the cache"):
            CONV.step(x, WEIGHT, cache, rows=given_rows, return_state=True)


@pytest.mark.slow
def test_drafts_are_replayed_from_the_cache_before_them() -> None:
    given = arrays(9)
    x = given.pop("x")
    first, drafted = ({name: y[:, part] for name, y in given.items()} for part in (slice(5), slice(5, 9)))

    @jax.jit
    def steps(cache: StateCache, accepted: Any) -> tuple[StateCache, StateCache]:
        _, cache = CONV.step(x[:, :5], WEIGHT, cache)
        _, cache = LINEAR.step(**first, cache=cache)
        _, ahead = CONV.step(x[:, 5:], WEIGHT, cache)
        _, ahead = LINEAR.step(**drafted, cache=ahead)
        # The drafts' keys, values and gates are kept, and stepped over again.
        _, back = CONV.step(x[:, 5:], WEIGHT, cache, query_lengths=accepted)
        _, back = LINEAR.step(**drafted, cache=back, query_lengths=accepted)
        return ahead, back

    accepted = np.array([0, 4, 1, 3])
    cache = StateCache.create(batch=B, heads=H, head_dim=D, value_head_dim=Dv, conv=(C, W))
    ahead, back = steps(cache, accepted)
    np.testing.assert_array_equal(back.lengths, 5 + accepted)
    padded = np.pad(x, ((0, 0), (W - 1, 0), (0, 0)))
    _, states = exact(given, mask=KeyPadding(np.arange(9) < 5 + accepted[:, None]))
    np.testing.assert_allclose(back.state, states, atol=1e-5)
    for b, n in enumerate(5 + accepted):
        np.testing.assert_array_equal(back.conv[b], padded[b, n : n + W - 1])  # type: ignore[index]
        assert np.allclose(ahead.state[b], states[b], atol=1e-5) == (n == 9)
    for wrong in ([0, 5, 1, 3], [0, -1, 1, 3]):
        with pytest.raises(ValueError, match=re.escape(f"query_lengths={wrong} must be from 0 to T=4")):
            LINEAR.step(**drafted, cache=cache, query_lengths=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape("query_lengths has shape (1,) and dtype int64, but must be integ")):
        LINEAR.step(**drafted, cache=cache, query_lengths=[2])  # type: ignore[arg-type]
