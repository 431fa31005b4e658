"""Answers that follow a JSON schema, a regular expression or a choice, whole and streamed, and only these."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tokenizers
from lm_server import FakeEngine, running
from tokenizers import AddedToken, decoders, models

from attnops_lm.serve import Delta, Request
from attnops_lm.serve.grammar import Grammars, choice_rule, json_rule, regex_rule
from attnops_lm.testing import Characters
from attnops_lm.tokenizer import Tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 3, "maximum": 90},
        "kind": {"enum": ["cat", "dog"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["age", "kind"],
    "additionalProperties": False,
}


def check(text: str) -> None:
    """Assert that a text fits SCHEMA."""
    value = json.loads(text)
    assert {"age", "kind"} <= set(value) <= {"age", "kind", "flags"}
    assert isinstance(value["age"], int)
    assert 3 <= value["age"] <= 90
    assert value["kind"] in ("cat", "dog")
    flags = value.get("flags", [])
    assert len(flags) <= 2
    assert all(isinstance(x, bool) for x in flags)


def schema_format(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema} | more}}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with running(engine) as (_, url, _):
        yield f"{url}/v1"


def post(url: str, path: str = "chat/completions", **body: Any) -> httpx.Response:
    given = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    return httpx.post(f"{url}/{path}", json={"model": "fake"} | given | body, timeout=60)


def test_every_answer_fits_the_schema_whole_or_streamed_with_and_without_strict(url: str) -> None:
    for strict in (None, False, True):
        choices = post(url, n=3, **schema_format(SCHEMA, strict=strict)).json()["choices"]
        assert {x["finish_reason"] for x in choices} == {"stop"}
        texts = [x["message"]["content"] for x in choices]
        for text in texts:
            check(text)
        assert len(set(texts)) == 3  # each answer has a state of its own
    lines = post(url, n=2, stream=True, **schema_format(SCHEMA)).text.split("\n\n")
    parts = [json.loads(x.removeprefix("data: "))["choices"][0] for x in lines if x.startswith("data: {")]
    for index in range(2):
        own = [x for x in parts if x["index"] == index]
        check("".join(x["delta"].get("content", "") for x in own))
        assert [x["finish_reason"] for x in own][-2:] == [None, "stop"]


def test_a_json_object_is_an_object(url: str) -> None:
    form = {"response_format": {"type": "json_object"}, "max_tokens": 200}
    for choice in post(url, n=4, **form).json()["choices"]:
        if choice["finish_reason"] == "stop":  # a string that is drawn at random may be long
            assert isinstance(json.loads(choice["message"]["content"]), dict)
        else:
            assert choice["message"]["content"].startswith("{")
    assert post(url, response_format={"type": "text"}, max_tokens=2).json()["choices"][0]["message"]["content"] == "!!"


@pytest.mark.parametrize(
    "regex", ["[0-9]{3}-[A-F]{2}", "a/b\\/c", "(yes|no)", "(?i:ab)+c", "[^a-z]{5}", r"\d\.\w\s", "x?", "^ab$"]
)
def test_every_answer_matches_the_regular_expression(url: str, regex: str) -> None:
    for path in ("completions", "chat/completions"):
        answer = post(url, path, n=2, max_tokens=60, structured_outputs={"regex": regex}).json()
        for choice in answer["choices"]:
            text = choice["text"] if path == "completions" else choice["message"]["content"]
            assert re.fullmatch(regex, text)
            assert choice["finish_reason"] == "stop"


def test_a_choice_is_one_of_its_texts_and_vllms_json_is_a_schema(url: str) -> None:
    choices = ['say "a"', "b/c", "back\\slash", "d|e"]
    found = {
        x["text"] for x in post(url, "completions", n=24, structured_outputs={"choice": choices}).json()["choices"]
    }
    assert found == set(choices)
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        answer = post(url, "completions", max_tokens=2000, structured_outputs={"json": schema}).json()
        check(answer["choices"][0]["text"])


def test_multiples_are_served_and_white_space_stays_limited(url: str) -> None:
    schema = {
        "type": "array",
        "items": {"type": "number", "multipleOf": 0.25, "minimum": 1, "maximum": 20},
        "maxItems": 4,
    }
    own = {"x-guidance": {"whitespace_pattern": "[ ]{50,60}"}}
    for choice in post(url, n=6, **schema_format(schema | own)).json()["choices"]:
        text = choice["message"]["content"]
        assert all(1 <= x <= 20 and x % 0.25 == 0 for x in json.loads(text))
        assert " " * 41 not in text


@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum"])
def test_the_largest_numbers_are_compared_exactly(keyword: str) -> None:
    grammars, largest = Grammars(Characters(), 96), 2**53 - 1  # type: ignore[arg-type]

    def fits(value: int) -> bool:
        """Whether the digits of a number are allowed, and then its end."""
        given = [largest] if keyword == "enum" else largest
        rule = json_rule({"type": "array", "items": {"type": "integer", keyword: given}})
        constraint = grammars.constraint(rule)
        for token in Characters().encode(f"[{value}]"):
            if token not in tokens_of(constraint.allowed, 96):
                return False
            constraint.push(token)
        return True

    accepted = {
        "minimum": {largest, largest + 1}, "maximum": {largest - 1, largest}, "exclusiveMinimum": {largest + 1},
        "exclusiveMaximum": {largest - 1},
    }  # fmt: skip
    values = {largest - 1, largest, largest + 1}
    assert {x for x in values if fits(x)} == accepted.get(keyword, {largest})


@pytest.mark.parametrize("bounds", [(0, 1), (0.5, 1), (-1, 0), (-0.5, 0.5), (0, None), (None, 0), (0.5, 1.5)])
def test_excluded_numbers_are_not_accepted(bounds: tuple[float | None, float | None]) -> None:
    names = ("exclusiveMinimum", "exclusiveMaximum")
    given = {name: x for name, x in zip(names, bounds, strict=True) if x is not None}
    rule = json_rule({"type": "array", "items": {"type": "number"} | given})
    grammars = Grammars(Characters(), 96)  # type: ignore[arg-type]
    low, high = (-9.0 if bounds[0] is None else bounds[0]), (9.0 if bounds[1] is None else bounds[1])
    found = set()
    values = ["0", "-0", "0.0", "-0.0", "1", "1.0", "-1", "-1.0", "0.5", "-0.5", "1.5", "0.25", "-0.25", "1.25", "-2"]
    for value in values:
        constraint = grammars.constraint(rule)
        for token in Characters().encode(f"[{value}]"):
            if token not in tokens_of(constraint.allowed, 96):
                break
            constraint.push(token)
        else:
            found.add(float(value))
    assert found == {float(x) for x in values if low < float(x) < high}


def test_thousands_of_choices_with_the_same_beginning() -> None:
    constraint = Grammars(Characters(), 96).constraint(choice_rule([f"text {i}" for i in range(2500)]))  # type: ignore[arg-type]
    for token in Characters().encode("text 2311"):
        assert constraint.allowed[token // 32] >> token % 32 & 1
        constraint.push(token)
        assert constraint.failure is None
    assert constraint.is_complete


def test_an_answer_may_be_cut_by_its_limit_or_by_a_stop_string(url: str) -> None:
    choice = post(url, max_tokens=4, **schema_format(SCHEMA)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["content"]) == 4
    choice = post(url, stop='"kind"', **schema_format(SCHEMA)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].rstrip()[-1] == ","
    # Complete with its last token, it ends and is not cut.
    answer = post(url, "completions", max_tokens=3, structured_outputs={"regex": "abc"}).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == ("abc", "stop")


def test_log_probabilities_have_an_entry_for_every_token(url: str) -> None:
    form = {"structured_outputs": {"regex": "[a-c]{6}"}, "logprobs": 2}
    choice = post(url, "completions", **form).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == list(choice["text"])


@pytest.mark.parametrize(
    ("form", "param", "reason"),
    [
        (schema_format({"type": "strin"}), "response_format", "Invalid type: strin"),
        (schema_format({"not": {"type": "string"}}), "response_format", 'Unimplemented keys: ["not"]'),
        (schema_format({"type": "string", "pattern": "(?=a)b"}), "response_format", "look-around"),
        (schema_format({"enum": []}), "response_format", "Unsatisfiable"),
        (schema_format({"type": "integer", "multipleOf": 999983}), "response_format", "999983, must be at most 10000"),
        (
            {"structured_outputs": {"json": {"allOf": [{"multipleOf": 101}, {"items": {"multipleOf": 103}}]}}},
            "structured_outputs",
            "10403, must be at most 10000",
        ),
        (
            schema_format({"properties": {"a": {"multipleOf": 0.13}, "b": {"multipleOf": 77}}}),
            "response_format",
            "100100 in units of 0.01, must be at most 10000",
        ),
        (schema_format({"type": "integer", "maximum": 10**40}), "response_format", "from -(2**53 - 1) to 2**53 - 1"),
        (
            schema_format({"items": {"exclusiveMinimum": -(2.0**53)}}),
            "response_format",
            "exclusiveMinimum: -9007199254740992.0 must be from",
        ),
        (schema_format({"enum": [1, {"a": 2**53 + 1}]}), "response_format", "enum: 9007199254740993 must be from"),
        ({"structured_outputs": {"json": {"const": 2**53}}}, "structured_outputs", "const: 9007199254740992 must be"),
        (
            schema_format({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}]}),
            "response_format",
            "exclusiveMinimum: 0 with maximum: 0.5 is not served; send minimum with a number beside 0",
        ),
        (
            schema_format({"exclusiveMaximum": -1.0, "exclusiveMinimum": -1.5}),
            "response_format",
            "exclusiveMaximum: -1.0 with exclusiveMinimum: -1.5 is not served",
        ),
        ({"structured_outputs": {"regex": "(?ix)a #c\n b"}}, "structured_outputs", "x is not served with line ends"),
        (schema_format({"type": "object"}, name="a b"), "response_format.json_schema.name", "pattern"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "a\\"}}, "structured_outputs", "ends with a backslash"),
        ({"structured_outputs": {"regex": "é"}}, "structured_outputs", "the vocabulary has no token"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs", "only an empty answer fits it"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs", "a schema must be a JSON object"),
        ({"structured_outputs": {"json": '{"a":' * 9000}}, "structured_outputs", "a schema must be a JSON object"),
        ({"structured_outputs": {"grammar": "a"}}, "structured_outputs.grammar", "no such field"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs", "leave ignore_eos out"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            "structured_outputs",
            "it is another response_format, which is given too; leave one out",
        ),
    ],
)
def test_what_no_grammar_can_be_made_of_is_400_with_the_reason(
    url: str, form: dict[str, Any], param: str, reason: str
) -> None:
    response = post(url, **form)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert reason in error["message"]


def test_an_answer_that_no_token_can_continue_is_an_error_and_others_go_on(url: str) -> None:
    response = post(url, "completions", structured_outputs={"regex": "aéb"})
    assert response.status_code == 500
    assert "the answer can't be continued as its format says" in response.json()["error"]["message"]
    lines = post(url, "completions", structured_outputs={"regex": "aéb"}, stream=True).text.split("\n\n")
    assert "can't be continued" in json.loads(lines[-3].removeprefix("data: "))["error"]["message"]
    assert post(url, max_tokens=2).json()["choices"][0]["message"]["content"] == "!!"
    # The limit comes first: the client asked for no more.
    assert (
        post(url, "completions", max_tokens=1, structured_outputs={"regex": "aéb"}).json()["choices"][0]["text"] == "a"
    )


def byte_level(pieces: list[str], special: list[str]) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({x: i for i, x in enumerate(pieces)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in special])
    return Tokenizer(backend, eos_ids=[len(pieces)])


def tokens_of(allowed: Any, vocab_size: int) -> set[int]:
    return {i for i in range(vocab_size) if allowed[i // 32] >> i % 32 & 1}


@pytest.mark.parametrize("vocab_size", [5, 6, 32, 33, 70])
def test_a_vocabulary_may_be_larger_or_smaller_than_the_logits(vocab_size: int) -> None:
    # a, b, ab, the first and the other two bytes of €, the end, and another special token
    tokenizer = byte_level(["a", "b", "ab", "â", "Ĥ¬"], ["<end>", "<x>"])
    assert [tokenizer.token_bytes(i) for i in (3, 4)] == [b"\xe2", b"\x82\xac"]
    assert tokenizer.special_ids == [5, 6]
    grammars = Grammars(tokenizer, vocab_size)
    end = {5} if vocab_size > 5 else set()
    constraint = grammars.constraint(regex_rule("ab€?|<x>"))
    assert constraint.allowed.shape == (-(-vocab_size // 32),)
    assert tokens_of(constraint.allowed, 32 * len(constraint.allowed)) == {0, 2}  # "<x>" as text, for which is no "<"
    other = constraint.copy()
    constraint.push(2)
    assert tokens_of(constraint.allowed, vocab_size) == {3} | end
    assert not constraint.is_complete
    constraint.push(3)
    assert tokens_of(constraint.allowed, vocab_size) == {4}
    constraint.push(4)
    assert (constraint.is_complete, constraint.failure) == (True, None)
    other.push(0)  # the state of a copy is its own
    assert tokens_of(other.allowed, vocab_size) == {1}


def test_the_text_may_end_only_where_the_grammar_allows_it() -> None:
    engine = FakeEngine()
    engine.eos_ids = engine.tokenizer.eos_ids = [ord("~") - 32]  # type: ignore[assignment]
    try:
        for rule, regex in ((regex_rule("a+b?"), "a+b?"), (choice_rule(["a", "ab", "abc"]), "abc|ab|a")):
            grammars, lengths = Grammars(engine.tokenizer, 96), set()
            for _ in range(30):
                found: list[Delta] = []
                request = Request([1], 50, emit=found.append, constraint=grammars.constraint(rule))
                engine.submit(request)
                while engine.step():
                    pass
                text = "".join(x.text for x in found)
                assert found[-1].finish_reason == "stop"
                assert re.fullmatch(regex, text)
                lengths.add(len(text))
            assert len(lengths) > 2
        with pytest.raises(ValueError, match="ignore_eos=True must be False"):
            engine.submit(Request([1], 1, ignore_eos=True, constraint=grammars.constraint(rule)))
    finally:
        engine.tokenizer.eos_ids = Characters.eos_ids


def test_preempted_answers_go_on_where_they_were() -> None:
    engine = FakeEngine(pages=10, page_size=4, max_length=32, chunks=[8])
    grammars = Grammars(engine.tokenizer, 96)
    found: list[list[Delta]] = [[] for _ in range(8)]
    constraint = grammars.constraint(regex_rule("(ab?c){7}"))
    engine.submit(*(Request([i], 24, emit=x.append, constraint=constraint.copy()) for i, x in enumerate(found)))
    while engine.step():
        pass
    assert engine.counts["preempted"] > 3
    for deltas in found:
        assert re.fullmatch("(ab?c){7}", "".join(x.text for x in deltas))
        assert deltas[-1].finish_reason == "stop"
