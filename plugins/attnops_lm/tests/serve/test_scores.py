"""Log-probabilities and penalties of steps, against float64 and a loop over the model's own logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lm_server import CHUNK, LENGTH, PAGE, PAGES

from attnops_lm.serve import Engine, Request
from attnops_lm.serve.grammar import Grammars, choice_rule
from attnops_lm.serve.logprobs import TokenLogprob
from attnops_lm.serve.scores import logprobs_of, masked, penalised
from attnops_lm.testing import Characters, small

PROMPTS = [[3] * 10, [7, 8, 9], list(range(40, 60)), [5, 90]]


def outer_primitives(function: Callable[..., Any], *shapes: Any) -> set[str]:
    """The primitives outside of branches."""
    return {x.primitive.name for x in jax.make_jaxpr(function)(*shapes).eqns}


def test_nothing_is_computed_outside_of_a_branch() -> None:
    logits, row = jax.ShapeDtypeStruct((4, 96), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.float32)
    tokens = jax.ShapeDtypeStruct((4,), jnp.int32)
    found = outer_primitives(logprobs_of, logits, tokens, jax.ShapeDtypeStruct((4,), bool))
    assert found <= {"reduce_or", "convert_element_type", "cond"}
    generated = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    allowed = jax.ShapeDtypeStruct((4, 3), jnp.uint32)
    found = outer_primitives(masked, logits, allowed, jax.ShapeDtypeStruct((4,), bool))
    assert found <= {"reduce_or", "convert_element_type", "cond"}
    found = outer_primitives(penalised, logits, generated, row, row)
    assert found <= {"ne", "or", "reduce_or", "convert_element_type", "cond"}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(small(), Characters(), rows=4, pages=PAGES, page_size=PAGE, max_length=LENGTH, chunks=[CHUNK])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def logits_after() -> Callable[[list[int]], np.ndarray]:
    """The logits after some tokens, float64 [V], without a cache."""
    graph, state = nnx.split(small())

    @jax.jit
    def call(tokens: jax.Array, last: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(tokens, logits_at=last[None, None]).logits[0, 0]

    def after(tokens: list[int]) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(call(padded, np.int32(len(tokens) - 1)), np.float64)

    return after


def serve(engine: Engine, options: list[dict[str, Any]]) -> tuple[list[list[int]], list[list[TokenLogprob]]]:
    """The generated tokens of a request for each prompt, and their log-probabilities."""
    found: list[list[TokenLogprob]] = [[] for _ in options]
    requests = [
        Request(list(prompt), 12, emit=lambda delta, i=i: found[i].extend(delta.logprobs), **given)  # type: ignore[misc]
        for i, (prompt, given) in enumerate(zip(PROMPTS, options, strict=True))
    ]
    engine.submit(*requests)
    while engine.step():
        pass
    assert engine.counts["traces"] <= 2
    return [x.tokens[x.prompt_length :] for x in requests], found


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


@pytest.mark.slow
def test_log_probabilities_are_the_models_whatever_is_drawn_with(engine: Engine, logits_after: Any) -> None:
    drawn: dict[str, Any] = {"temperature": 0.7, "top_k": 3, "seed": 5, "presence_penalty": 1.5}
    options: list[dict[str, Any]] = [{"logprobs": 20}, drawn | {"logprobs": 5}, {}, drawn | {"logprobs": 0}]
    tokens, found = serve(engine, options)
    assert found[2] == []  # it asked for none, and others' are not its own
    for i in (0, 1, 3):
        assert [x.token for x in found[i]] == tokens[i]
        for j, x in enumerate(found[i]):
            logs = log_softmax(logits_after(PROMPTS[i] + tokens[i][:j]))
            assert len(x.most_likely) == options[i]["logprobs"]
            np.testing.assert_allclose(x.value, logs[x.token], atol=1e-4)
            ids = [token for token, _ in x.most_likely]
            assert len(set(ids)) == len(ids)
            np.testing.assert_allclose([value for _, value in x.most_likely], logs[ids], atol=1e-4)
            np.testing.assert_allclose(logs[ids], np.sort(logs)[::-1][: len(ids)], atol=1e-4)
    assert [x.most_likely[0][0] for x in found[0]] == tokens[0]  # greedy
    assert any(x.most_likely[0][0] != x.token for x in found[1])  # drawn


@pytest.mark.slow
def test_penalties_count_what_a_request_generated_and_change_no_other(engine: Engine, logits_after: Any) -> None:
    def expected(prompt: list[int], frequency: float = 0.0, presence: float = 0.0) -> list[int]:
        tokens: list[int] = []
        for _ in range(12):
            counts = np.bincount(tokens, minlength=96)
            scores = logits_after(prompt + tokens) - frequency * counts - presence * (counts > 0)
            tokens.append(int(scores.argmax()))
        return tokens

    penalties: list[dict[str, Any]] = [
        {}, {"frequency_penalty": 1.5}, {"presence_penalty": -2.0}, {"frequency_penalty": -1.0, "presence_penalty": 2.0}
    ]  # fmt: skip
    found, _ = serve(engine, penalties)
    named = [{key.removesuffix("_penalty"): value for key, value in x.items()} for x in penalties]
    assert found == [expected(prompt, **x) for prompt, x in zip(PROMPTS, named, strict=True)]
    assert sum(x != expected(prompt) for prompt, x in zip(PROMPTS, found, strict=True)) >= 2  # they do something
    assert serve(engine, [{}] * 4)[0] == [expected(prompt) for prompt in PROMPTS]  # and nothing is left of them


@pytest.mark.slow
def test_answers_to_one_prompt_share_its_pages(engine: Engine) -> None:
    requests = [Request([9] * 17, 3, temperature=1.0, seed=i) for i in range(3)]
    engine.submit(*requests)
    while engine.step():
        pass
    assert [x.cached for x in requests] == [0, 16, 16]


@pytest.mark.slow
def test_a_grammar_masks_its_row_alone_and_is_drawn_from_after_penalties(engine: Engine, logits_after: Any) -> None:
    words = ["shore", "short", "shot", "sand", "salt sand", "sea"]
    grammars = Grammars(Characters(), 96)  # type: ignore[arg-type]

    def expected(prompt: list[int], presence: float = 0.0) -> list[int]:
        tokens: list[int] = []
        while (text := Characters().decode(tokens)) not in words:  # none of the words begins another
            scores = logits_after(prompt + tokens)
            scores[tokens] -= presence
            following = {x[len(tokens)] for x in words if x.startswith(text)}
            allowed = Characters().encode("".join(following))
            tokens.append(max(allowed, key=lambda x: scores[x]))
        return tokens

    def options(**more: Any) -> dict[str, Any]:
        return {"constraint": grammars.constraint(choice_rule(words))} | more

    given: list[dict[str, Any]] = [
        options(logprobs=3), options(presence_penalty=2.0), {}, options(temperature=2.0, seed=3, top_p=0.8)
    ]  # fmt: skip
    tokens, logprobs = serve(engine, given)
    assert tokens[:2] == [expected(PROMPTS[0]), expected(PROMPTS[1], 2.0)]
    assert tokens[2] == serve(engine, [{}] * 4)[0][2]  # a row without a grammar, next to others
    assert Characters().decode(tokens[3]) in words
    # Log-probabilities are of the model's own distribution, not of the grammar's.
    for j, x in enumerate(logprobs[0]):
        logs = log_softmax(logits_after(PROMPTS[0] + tokens[0][:j]))
        np.testing.assert_allclose(x.value, logs[x.token], atol=1e-4)
        np.testing.assert_allclose([value for _, value in x.most_likely], np.sort(logs)[:-4:-1], atol=1e-4)
