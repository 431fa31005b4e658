"""Beam search finds what a search of all sequences, and one written with Python lists, find."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops_lm.generation.config import GenerationConfig
from attnops_lm.model import CausalLM
from attnops_lm.testing import small

V, N = 6, 4
PROMPTS = np.array([[1, 2, 3, 4, 1], [5, 3, 2, 2, 4]])
END = 0
BATCH = 600  # sequences that are scored in one call


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return small(vocab_size=V, num_hidden_layers=1)


class Scores:
    """Log-probabilities of what follows tokens, [V], from the model without a cache."""

    def __init__(self, model: CausalLM) -> None:
        self.call = jax.jit(lambda tokens: jax.nn.log_softmax(model(tokens).logits, axis=-1))
        self.known: dict[tuple[int, ...], np.ndarray] = {}

    def prepare(self, prompt: list[int]) -> None:
        """All sequences of N tokens after the prompt, in few calls."""
        every = np.array([[*prompt, *rest] for rest in itertools.product(range(V), repeat=N - 1)])
        for first in range(0, len(every), BATCH):
            some = every[first : first + BATCH]
            padded = np.pad(some, ((0, BATCH - len(some)), (0, 0)))
            scores = np.asarray(self.call(jnp.asarray(padded)), np.float64)
            for row, score in zip(some.tolist(), scores, strict=False):
                for n in range(len(prompt), len(row) + 1):
                    self.known[tuple(row[:n])] = score[n - 1]

    def __call__(self, tokens: list[int]) -> np.ndarray:
        return self.known[tuple(tokens)]


@pytest.fixture(scope="module")
def scores(model: CausalLM) -> Scores:
    result = Scores(model)
    for prompt in PROMPTS.tolist():
        result.prepare(prompt)
    return result


def search(
    scores: Scores, prompt: list[int], k: int, most: int, penalty: float, early: bool | str, end: int | None
) -> list[tuple[float, list[int]]]:
    """Beam search with lists, by Hugging Face's rules: sequences and their scores, the best first."""
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for n in range(1, most + 1):
        candidates = sorted(
            ((s + p, [*new, t]) for s, new in running for t, p in enumerate(scores(prompt + new))), key=lambda x: -x[0]
        )[: 2 * k]
        is_end = [new[-1] == end or n == most for _, new in candidates]
        ended += [(s / n**penalty, new) for (s, new), e in list(zip(candidates, is_end, strict=True))[:k] if e]
        ended = sorted(ended, key=lambda x: -x[0])[:k]
        running = [x for x, e in zip(candidates, is_end, strict=True) if not e][:k]
        if n == most or not running:
            break
        length = most if early == "never" and penalty > 0 else n
        if len(ended) == k and (early is True or running[0][0] / length**penalty <= ended[-1][0]):
            break
    return ended


def everything(scores: Scores, prompt: list[int], most: int, penalty: float) -> tuple[float, list[int]]:
    """The best of all sequences, each scored whole."""
    best: tuple[float, list[int]] = (-np.inf, [])
    for rest in itertools.product(range(V), repeat=most):
        new = list(rest[: rest.index(END) + 1] if END in rest else rest)
        total = sum(scores(prompt + new[:i])[t] for i, t in enumerate(new))
        best = max(best, (total / len(new) ** penalty, new))
    return best


def config(**options: Any) -> GenerationConfig:
    return GenerationConfig(eos_token_id=END, pad_token_id=0, **options)


@pytest.mark.slow
def test_with_a_beam_for_each_sequence_the_best_of_all_is_found(model: CausalLM, scores: Scores) -> None:
    for penalty in (1.0, 0.0, 2.0):
        # V ** 2 beams lose nothing in three tokens.
        found = model.generate(
            PROMPTS, config(max_new_tokens=3, num_beams=V**2, length_penalty=penalty, early_stopping="never")
        )
        assert found.scores is not None
        for row, length, score, prompt in zip(found.tokens, found.lengths, found.scores, PROMPTS.tolist(), strict=True):
            best, tokens = everything(scores, prompt, 3, penalty)
            assert row[:length].tolist() == tokens
            np.testing.assert_allclose(score, best, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["static", "paged"])
@pytest.mark.parametrize(("penalty", "early"), [(1.0, False), (2.0, "never"), (0.0, True), (-1.0, False)])
@pytest.mark.tier(every=2)
def test_beams_are_those_of_a_search_with_lists(
    model: CausalLM, scores: Scores, penalty: float, early: Any, storage: Any
) -> None:
    found = model.generate(
        PROMPTS,
        config(max_new_tokens=N, num_beams=3, num_return_sequences=3, length_penalty=penalty, early_stopping=early,
               cache_implementation=storage, page_size=2 if storage == "paged" else None),
    )  # fmt: skip
    assert found.scores is not None
    for b, prompt in enumerate(PROMPTS.tolist()):
        wanted = search(scores, prompt, 3, N, penalty, early, END)
        for i, (score, tokens) in enumerate(wanted):
            row = 3 * b + i
            assert found.tokens[row, : found.lengths[row]].tolist() == tokens
            np.testing.assert_allclose(found.scores[row], score, rtol=1e-5)


@pytest.mark.slow
def test_one_program_serves_all_penalties_and_the_best_of_beams_is_not_the_greedy_one(
    model: CausalLM, scores: Scores
) -> None:
    greedy = model.generate(PROMPTS, config(max_new_tokens=N))
    beams = model.generate(PROMPTS, config(max_new_tokens=N, num_beams=3))
    assert (greedy.tokens.shape != beams.tokens.shape) or (greedy.tokens != beams.tokens).any()
    one = search(scores, PROMPTS[0].tolist(), 1, N, 1.0, False, END)[0][1]
    assert greedy.tokens[0, : greedy.lengths[0]].tolist() == one


@pytest.mark.slow
def test_padded_prompts_are_searched_as_each_alone(model: CausalLM) -> None:
    options = config(max_new_tokens=N, num_beams=3)
    mask = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    together = model.generate(PROMPTS, options, attention_mask=mask)
    alone = model.generate(PROMPTS[1:, 2:], options)
    assert together.scores is not None
    assert alone.scores is not None
    assert together.tokens[1, : together.lengths[1]].tolist() == alone.tokens[0, : alone.lengths[0]].tolist()
    np.testing.assert_allclose(together.scores[1], alone.scores[0], atol=1e-5)
