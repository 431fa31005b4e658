"""Log-probabilities in answers: OpenAI's formats, whole and streamed, and exactly for the tokens of the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
from lm_server import FakeEngine, Scripted, running
from starlette.responses import JSONResponse
from tokenizers import decoders, models, pre_tokenizers

from attnops_lm.serve import Delta, Request
from attnops_lm.serve.logprobs import TokenLogprob, chat_logprobs, completion_logprobs
from attnops_lm.serve.text_of_json import encoded
from attnops_lm.testing import Characters
from attnops_lm.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(FakeEngine()) as (_, url, _):
        yield f"{url}/v1"


def post(url: str, path: str, **body: Any) -> httpx.Response:
    given = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    return httpx.post(f"{url}/{path}", json={"model": "fake", "max_tokens": 3} | given | body, timeout=60)


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_completion_has_its_tokens_and_the_most_likely_ones(url: str) -> None:
    found = post(url, "completions", logprobs=2).json()["choices"][0]["logprobs"]
    assert found == {
        "tokens": ["!"] * 3, "token_logprobs": [-0.5] * 3, "top_logprobs": [{"!": -0.5, '"': -1.0}] * 3,
        "text_offset": [0, 1, 2],
    }  # fmt: skip
    assert post(url, "completions", logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] == [{"!": -0.5}] * 3
    assert post(url, "completions").json()["choices"][0]["logprobs"] is None


def test_a_chat_has_its_tokens_with_their_bytes(url: str) -> None:
    found = post(url, "chat/completions", logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
    own = {"token": "!", "logprob": -0.5, "bytes": [33]}
    assert found == {
        "content": [own | {"top_logprobs": [own, {"token": '"', "logprob": -1.0, "bytes": [34]}]}] * 3,
        "refusal": None,
    }
    found = post(url, "chat/completions", logprobs=True).json()["choices"][0]["logprobs"]
    assert found["content"] == [own | {"top_logprobs": []}] * 3
    found = post(url, "chat/completions", logprobs=True, top_logprobs=20).json()["choices"][0]["logprobs"]
    assert [x["logprob"] for x in found["content"][0]["top_logprobs"]] == [-0.5 * i for i in range(1, 21)]
    assert post(url, "chat/completions").json()["choices"][0]["logprobs"] is None


def test_a_stream_has_them_with_its_text(url: str) -> None:
    parts = events(post(url, "completions", logprobs=1, stream=True, prompt=["a", "b"]))
    for index in range(2):
        own = [x["choices"][0] for x in parts if x["choices"][0]["index"] == index]
        assert [x["logprobs"]["tokens"] for x in own] == [["!"]] * 3
        assert [x["logprobs"]["text_offset"] for x in own] == [[0], [1], [2]]
    parts = events(post(url, "chat/completions", logprobs=True, stream=True))
    assert parts[0]["choices"][0]["logprobs"] is None
    assert [x["choices"][0]["logprobs"]["content"][0]["token"] for x in parts[1:]] == ["!"] * 3


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"logprobs": 6}, "logprobs"),
        ("completions", {"logprobs": -1}, "logprobs"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("chat/completions", {"logprobs": 5}, "logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("completions", {"presence_penalty": 3}, "presence_penalty"),
        ("completions", {"frequency_penalty": -2.5}, "frequency_penalty"),
        ("completions", {"n": 0}, "n"),
        ("completions", {"n": 129}, "n"),
        ("completions", {"n": 100, "prompt": ["a"] * 3}, "n"),
        ("completions", {"n": 2, "best_of": 3}, "best_of"),
    ],
)
def test_what_is_beyond_the_apis_limits_is_refused(url: str, path: str, body: dict[str, Any], param: str) -> None:
    response = post(url, path, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_n_answers_have_a_choice_each_and_their_prompt_counts_once(url: str) -> None:
    answer = post(url, "completions", n=3, best_of=3, prompt=["a" * 5, "b" * 7]).json()
    assert [(x["index"], x["text"]) for x in answer["choices"]] == [(i, "!!!") for i in range(6)]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (12, 18, 30)
    parts = events(post(url, "chat/completions", n=2, stream=True))
    for index in range(2):
        own = [x["choices"][0] for x in parts if x["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(x["delta"].get("content", "") for x in own) == "!!!"
        assert own[-1]["finish_reason"] == "length"


def deltas(engine: FakeEngine, **options: Any) -> list[Delta]:
    found: list[Delta] = []
    engine.submit(Request([1], emit=found.append, logprobs=0, **options))
    while engine.step():
        pass
    return found


def byte_level(text: str) -> tuple[Tokenizer, list[int]]:
    """A tokenizer with a token for each byte of a text, and the text's tokens."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = split.pre_tokenize_str(text)[0][0]
    backend = tokenizers.Tokenizer(models.BPE({x: i for i, x in enumerate(dict.fromkeys(pieces))}, []))
    backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    return tokenizer, tokenizer.encode(text)


def test_parts_of_a_character_have_their_bytes_and_come_with_its_text() -> None:
    tokenizer, script = byte_level("a€b")
    found = deltas(Scripted(script, tokenizer), max_tokens=5)
    assert [(x.text, [y.token for y in x.logprobs]) for x in found] == [
        ("a", script[:1]), ("", []), ("", []), ("€", script[1:4]), ("b", script[4:])
    ]  # fmt: skip
    tokens = [y for x in found for y in x.logprobs]
    assert [x.value for x in tokens] == [0, -1, -2, -3, -4]
    assert [x.start for x in tokens] == [0, 1, 1, 1, 2]
    content = chat_logprobs(tokens, tokenizer)["content"]
    assert bytes(x for entry in content for x in entry["bytes"]).decode() == "a€b"
    assert [x["token"] for x in content] == ["a", r"\xe2", r"\x82", r"\xac", "b"]
    completion = completion_logprobs(tokens, tokenizer)
    assert completion["tokens"] == ["a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "b"]
    assert completion["top_logprobs"][1] == {r"bytes:\xe2": -1}


def test_a_text_that_ends_within_a_character_has_all_tokens() -> None:
    tokenizer, script = byte_level("€")
    found = deltas(Scripted(script, tokenizer), max_tokens=2)
    assert found[-1].text == "\ufffd"
    assert [y.token for x in found for y in x.logprobs] == script[:2]


def test_tokens_of_a_stop_string_or_an_end_are_in_no_answer() -> None:
    script = Characters().encode("one END two")
    engine = Scripted(script, Characters())
    found = deltas(engine, max_tokens=11, stop=("END",))
    assert "".join(x.text for x in found) == "one "
    assert [y.token for x in found for y in x.logprobs] == script[:4]
    # Held back, and then shown: nothing is lost.
    found = deltas(engine, max_tokens=11, stop=("END.",))
    assert "".join(x.text for x in found) == "one END two"
    assert [y.token for x in found for y in x.logprobs] == script
    assert all(y.start < len("".join(x.text for x in found[: i + 1])) for i, x in enumerate(found) for y in x.logprobs)
    engine.eos_ids = frozenset([script[3]])
    found = deltas(engine, max_tokens=11)
    assert [y.token for x in found for y in x.logprobs] == script[:3]


def test_a_token_keeps_its_own_numbers_and_no_other_rows() -> None:
    found: list[Delta] = []
    engine = FakeEngine()
    engine.submit(Request([1], 1, emit=found.append, logprobs=3))
    engine.step()
    (token,) = found[0].logprobs
    assert token.ids.base is None
    assert token.values.base is None
    assert token.most_likely == [(1, -0.5), (2, -1), (3, -1.5)]


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), -10_000.0])
def test_what_json_has_no_number_for_becomes_minus_9999(value: float) -> None:
    token = TokenLogprob(1, value, 0, np.asarray([1]), np.asarray([value]))
    assert chat_logprobs([token], Characters())["content"][0]["logprob"] == -9999.0  # type: ignore[arg-type]
    assert completion_logprobs([token], Characters())["token_logprobs"] == [-9999.0]  # type: ignore[arg-type]


def test_the_engine_refuses_what_no_step_can_compute() -> None:
    for options in (
        {"logprobs": 21}, {"logprobs": -1}, {"logprobs": 1.5}, {"presence_penalty": 2.5},
        {"frequency_penalty": float("nan")},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must be (an int )?from"):
            FakeEngine().submit(Request([1], 1, **options))  # type: ignore[arg-type]


def test_json_in_pieces_is_the_same() -> None:
    inner = {"content": [{"token": 'é"\n', "bytes": [1, 2], "top": []}] * 3, "none": None}
    content = {"choices": [{"logprobs": inner, "index": 0}], "usage": {"tokens": 3, "share": 0.1}, "": [], "e": {}}
    for depth in range(7):
        assert encoded(content, depth) == JSONResponse(content).body
    with pytest.raises(ValueError, match="not JSON compliant"):
        encoded({"a": [float("nan")]})
