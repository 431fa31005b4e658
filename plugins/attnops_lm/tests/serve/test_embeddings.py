"""Embeddings: what the endpoint answers and refuses, and that batching, chunks and preemption change no value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from lm_server import CHUNK, LENGTH, PAGE, PAGES, FakeEngine, check_pages, running
from safetensors.numpy import load_file, save_file

from attnops_lm.model import CausalLM
from attnops_lm.serve import Delta, Engine, Request
from attnops_lm.serve.limits import Limits
from attnops_lm.serve.pooling import pooling_of
from attnops_lm.serve.program import StepBatch, StepResult
from attnops_lm.testing import Characters, small


class Counting(FakeEngine):
    """The hidden states of a row are its last token and 0, and 0, 0."""

    def _call(self, batch: StepBatch) -> StepResult:
        last = np.zeros((self.rows, 4), np.float32)
        for row in np.flatnonzero(batch.counts):
            end = int(batch.counts[: row + 1].sum()) if len(batch.tokens) > self.rows else row + 1
            last[row] = 3 * batch.tokens[end - 1], 4 * batch.tokens[end - 1], 0, 0
        return super()._call(batch)._replace(pooled=last)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(Counting(max_length=64, max_waiting=8)) as (_, url, _):
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("given", ["ab", ["ab", "c" * 30], [1, 2], [[1, 2], [3]]])
def test_each_text_has_an_embedding_of_length_1(client: openai.OpenAI, given: Any) -> None:
    count = 2 if isinstance(given[0], list) or len(given[-1:][0] if isinstance(given[0], str) else "") > 2 else 1
    answer = client.embeddings.create(model="fake", input=given)  # in base64, unless a format is given
    assert [x.index for x in answer.data] == list(range(count))
    for item in answer.data:
        np.testing.assert_allclose(item.embedding, [0.6, 0.8, 0, 0], rtol=1e-6)
    tokens = sum(len(x) for x in (given if count == 2 else [given]))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    numbers = client.embeddings.create(model="fake", input=given, encoding_format="float")
    assert [x.embedding for x in numbers.data] == [x.embedding for x in answer.data]


def test_fewer_dimensions_have_length_1_too(client: openai.OpenAI) -> None:
    assert client.embeddings.create(model="fake", input="a", dimensions=1).data[0].embedding == [1.0]
    np.testing.assert_allclose(
        client.embeddings.create(model="fake", input="a", dimensions=4).data[0].embedding, [0.6, 0.8, 0, 0], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"dimensions": 5}, "dimensions: 5 must be at most the model's width, 4; leave it out for all"),
        ({"dimensions": 0}, "dimensions: Input should be greater than or equal to 1"),
        ({"input": ""}, "input: it has no tokens"),
        ({"input": []}, "input: it has no tokens"),
        ({"input": ["a", ""]}, "input: it has no tokens"),
        ({"input": [96]}, "input: token ids must be from 0 to 95"),
        ({"input": ["a"] * 9}, "input: 9 inputs in a call must be at most 8; send several calls"),
        ({"input": "a" * 64}, "input: its 64 tokens must be fewer than the context, 64; send less text"),
        (
            {"encoding_format": "int8"},
            'encoding_format: "int8" is not served; leave it out or send "float" or "base64"',
        ),
        ({"truncate": True}, "truncate: no such field"),
    ],
)
def test_what_can_not_be_embedded_is_refused(url: str, body: dict[str, Any], message: str) -> None:
    response = httpx.post(f"{url}/embeddings", json={"model": "fake", "input": "a"} | body, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message


def test_a_hidden_state_without_a_direction_is_an_error(url: str) -> None:
    response = httpx.post(f"{url}/embeddings", json={"model": "fake", "input": [1, 0]}, timeout=60)
    assert response.status_code == 500
    assert "have length 0.0, and can't be scaled to length 1" in response.json()["error"]["message"]
    assert httpx.post(f"{url}/embeddings", json={"model": "fake", "input": [1]}, timeout=60).status_code == 200


def test_tokens_of_a_client_are_the_texts_alone() -> None:
    with running(Counting(), limits=Limits(tokens=10)) as (_, url, _):
        texts = {"model": "fake", "input": ["aaaa", "aaaaa"]}
        assert [httpx.post(f"{url}/v1/embeddings", json=texts, timeout=60).status_code for _ in range(3)] == [
            200, 200, 429
        ]  # fmt: skip


def direct(model: CausalLM, tokens: list[int], pooling: str) -> np.ndarray:
    """By a call on the tokens alone, without caches."""
    hidden = np.asarray(model(jnp.asarray([tokens])).last_hidden_state[0], np.float64)
    x = hidden[-1] if pooling == "last" else hidden.mean(0)
    return np.asarray(x / np.linalg.norm(x))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "pooling"), [("llama", "last"), ("llama", "mean"), ("qwen3_next", "mean")])
def test_embeddings_equal_the_model_called_alone(family: str, pooling: str) -> None:
    model = small(family)
    sizes = {"rows": 4, "pages": PAGES, "page_size": PAGE, "max_length": LENGTH, "chunks": [CHUNK]}
    engine = Engine(model, Characters(), pooling=pooling, **sizes)  # type: ignore[arg-type]
    engine.warm()
    generator, found, texts = np.random.default_rng(0), dict[int, Delta](), list[str]()
    prompts = [generator.integers(0, 96, n).tolist() for n in (1, 5, CHUNK, 40, 40, 61, 17)]
    prompts.append([*prompts[3][:32], 7, 8])  # shares pages, if the pooling allows it

    def embed(i: int) -> Request:
        return Request(list(prompts[i]), 1, embeds=True, emit=lambda delta: found.update({i: delta}))

    # Answers that generate at the same time need more pages than there are with them.
    engine.submit(*(Request(list(prompts[4]), 20, emit=lambda delta: texts.append(delta.text)) for _ in range(2)))
    engine.submit(*map(embed, range(len(prompts))))
    while engine.step():
        check_pages(engine)
    assert engine.counts["preempted"] > 0 or family == "qwen3_next"  # whose rows share no pages
    assert engine.counts["traces"] == 2
    assert len("".join(texts)) == 40
    for i, prompt in enumerate(prompts):
        assert found[i].finish_reason == "stop", found[i]
        embedding = found[i].embedding
        assert embedding is not None
        assert embedding.dtype == np.float32
        np.testing.assert_allclose(embedding, direct(model, prompt, pooling), atol=2e-5)
    assert np.abs(found[3].embedding - found[4].embedding).max() > 0.1  # type: ignore[operator]
    assert not engine.running
    assert engine.pages.available == PAGES


def test_an_unknown_pooling_is_refused() -> None:
    with pytest.raises(ValueError, match="pooling='cls' must be one of last, mean"):
        FakeEngine(pooling="cls")


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ({"word_embedding_dimension": 4, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": False}, "last"),
        ({"embedding_dimension": 4, "pooling_mode": "mean", "include_prompt": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_cls_token": True}, "has pooling_mode_cls_token, but the server pools by one of last, mean"),
        ({}, "has no pooling_mode, but the server pools by one of last, mean; choose with --pooling"),
        ({"pooling_mode": "mean", "include_prompt": False}, "has include_prompt=false, but the mean here is of all"),
        ([], "is no JSON object"),
    ],
)
def test_the_pooling_is_the_checkpoints(tmp_path: Path, given: Any, way: str) -> None:
    assert (pooling_of(None), pooling_of(str(tmp_path))) == ("last", "last")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(given))
    if " " in way:
        with pytest.raises(ValueError, match=way):
            pooling_of(str(tmp_path))
    else:
        assert pooling_of(str(tmp_path)) == way


def test_what_else_a_checkpoint_computes_is_refused(tmp_path: Path) -> None:
    modules = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Dense")]
    (tmp_path / "modules.json").write_text(json.dumps(modules[:2]))
    assert pooling_of(str(tmp_path)) == "last"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="has a module 'Dense', but the server has only Transformer, Pooling, Normal"):
        pooling_of(str(tmp_path))
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ValueError, match=r"modules\.json is no JSON: "):
        pooling_of(str(tmp_path))


@pytest.mark.slow
def test_files_of_a_model_without_a_head_are_read(tmp_path: Path) -> None:
    model = small(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): x for name, x in load_file(file).items()}, file, {"format": "pt"})
    again = CausalLM.from_pretrained(tmp_path)
    ids = jnp.asarray([[1, 2, 3]])
    assert jax.tree.leaves(again(ids).logits)[0].tolist() == model(ids).logits.tolist()


def headless(directory: Path, **changes: Any) -> CausalLM:
    """The model whose checkpoint, without its head, is written to the directory."""
    model = small("llama", tie_word_embeddings=False, **changes)
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    weights = {name.removeprefix("model."): x for name, x in load_file(file).items() if name != "lm_head.weight"}
    save_file(weights, file, {"format": "pt"})
    return model


@pytest.mark.slow
def test_a_model_without_a_head_is_for_embeddings_alone(tmp_path: Path) -> None:
    whole = headless(tmp_path)
    model = CausalLM.from_pretrained(tmp_path)
    ids = jnp.asarray([[1, 2, 3]])
    found = model(ids)
    np.testing.assert_array_equal(found.last_hidden_state, whole(ids).last_hidden_state)
    assert found.logits.shape == (1, 3, 96)
    assert np.isnan(found.logits).all()
    for use in (model.generate, model.compute_loss):
        with pytest.raises(ValueError, match="the model has no head over the vocabulary, since its checkpoint is one"):
            use(ids)
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == ["LlamaModel"]
    assert CausalLM.from_pretrained(tmp_path / "again").config == model.config
    engine = Engine(model, Characters(), rows=2, pages=PAGES, page_size=PAGE, max_length=LENGTH, chunks=[CHUNK])
    with pytest.raises(ValueError, match="it only computes requests with embeds=True"):
        engine.submit(Request([1], 1))
    deltas: list[Delta] = []
    engine.submit(Request([1, 2, 3], 1, embeds=True, emit=deltas.append))
    while engine.step():
        pass
    np.testing.assert_allclose(deltas[-1].embedding, direct(whole, [1, 2, 3], "last"), atol=2e-5)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_checkpoint_that_lost_its_head_is_refused(tmp_path: Path) -> None:
    headless(tmp_path, num_hidden_layers=1)
    file = tmp_path / "model.safetensors"
    save_file({f"model.{name}": x for name, x in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"has no weight lm_head\.weight; the config 'llama' needs it"):
        CausalLM.from_pretrained(tmp_path)


def test_a_server_without_a_head_has_embeddings_alone() -> None:
    turns = [{"role": "user", "content": "a"}]
    with running(Counting(has_head=False)) as (_, url, _):
        for path, more in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": turns})):
            response = httpx.post(f"{url}/v1/{path}", json={"model": "fake", **more}, timeout=60)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "no_head")
            assert response.json()["error"]["message"] == (
                "model: 'fake' is for embeddings, and has no head over the vocabulary; send texts to /v1/embeddings"
            )
        answer = httpx.post(f"{url}/v1/embeddings", json={"model": "fake", "input": "a"}, timeout=60)
        assert answer.status_code == 200
