"""Tools: calls in answers, whole and streamed; calls that are forced; and turns with calls in a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from lm_server import FakeEngine, Scripted, running

from attnops_lm.serve.grammar import Grammars
from attnops_lm.serve.tools import Tool, ToolParser, refusal, text_and_calls_rule
from attnops_lm.testing import Characters
from attnops_lm.tokenizer import Tokenizer


class Lines(Characters):
    """Characters with line ends, an end of the text, and a template for tools. Keeps what the template was given."""

    template = "{{ tools }}<tool_call>"
    eos_ids = (ord("~") - 32,)

    def __init__(self) -> None:
        self.given: Any = None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [95 if x == "\n" else ord(x) - 32 for x in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("\n" if x == 95 else chr(32 + x) for x in ids)

    def chat(self, messages: Sequence[Any], *, tools: Sequence[Any] | None = None) -> str:
        self.given = (list(messages), tools)
        return super().chat(messages, tools=tools)


def tool(name: str, strict: bool | None = None, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


WEATHER = tool("weather", city={"enum": ["Paris", "Rome"]}, days={"type": "integer", "minimum": 1, "maximum": 7})
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "description": "The time."}}


def check_call(call: dict[str, Any]) -> str:
    """Assert that a call fits the schemas of the tools; its name."""
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    if name == "clock":
        assert arguments == {}
    else:
        assert name == "weather"
        assert set(arguments) == {"city", "days"}
        assert arguments["city"] in ("Paris", "Rome")
        assert arguments["days"] in range(1, 8)
    return name


def make(script: str | None = None) -> FakeEngine:
    engine = FakeEngine() if script is None else Scripted(Lines().encode(script), None)
    engine.tokenizer = Lines()  # type: ignore[assignment]
    engine.eos_ids = frozenset(Lines.eos_ids)
    return engine


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(make()) as (_, url, _):
        yield f"{url}/v1"


def post(url: str, **body: Any) -> httpx.Response:
    given = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "tools": [WEATHER, CLOCK]}
    return httpx.post(f"{url}/chat/completions", json=given | body, timeout=60)


def streamed(response: httpx.Response) -> list[dict[str, Any]]:
    """The choices of a stream's events."""
    lines = [x.removeprefix("data: ") for x in response.text.split("\n\n") if x.startswith("data: {")]
    return [json.loads(x)["choices"][0] for x in lines]


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ROME = called("weather", '{"city": "Rome", "days": 2}')
NOW = called("clock", "{}")
TWO = f"Let me see.\n{ROME}\n{NOW}\n~"


def test_calls_are_taken_out_of_the_text_whole_and_streamed() -> None:
    with running(make(TWO)) as (_, url, _):
        choice = post(f"{url}/v1").json()["choices"][0]
        parts = streamed(post(f"{url}/v1", stream=True))
        one = post(f"{url}/v1", parallel_tool_calls=False).json()["choices"][0]
        text = post(f"{url}/v1", tool_choice="none").json()["choices"][0]
        tokens = post(f"{url}/v1", logprobs=True, tool_choice="auto").json()["choices"][0]["logprobs"]["content"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me see.\n"
    assert [check_call(x) for x in message["tool_calls"]] == ["weather", "clock"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome", "days": 2}
    assert len({x["id"] for x in message["tool_calls"]}) == 2
    assert "index" not in message["tool_calls"][0]
    deltas = [x["delta"] for x in parts]
    assert "".join(x.get("content", "") for x in deltas) == "Let me see.\n"
    calls = [y for x in deltas for y in x.get("tool_calls", [])]
    assert [(x["index"], check_call(x)) for x in calls] == [(0, "weather"), (1, "clock")]
    assert [x["finish_reason"] for x in parts][-2:] == [None, "tool_calls"]
    assert [check_call(x) for x in one["message"]["tool_calls"]] == ["weather"]
    assert one["finish_reason"] == "tool_calls"
    assert (text["message"]["content"], text["finish_reason"]) == (TWO[:-1], "stop")
    assert "tool_calls" not in text["message"]
    assert "".join(x["token"] for x in tokens) == TWO[:-1]


@pytest.mark.parametrize(
    "text",
    [
        "no call", "<tool_call>", "<tool_call>\n{}\n</tool_call>", called("other", "{}"), called("clock", "[]"),
        called("clock", '{"a": NaN}'), called("clock", '{"a": 1e999}'),
        called("clock", r'{"a": "\ud800"}'),
        NOW.replace('"clock"', '["clock"]'), NOW.replace('"clock"', '{"clock": 1}'), "<tool_call> \"a</tool_call>",
        called("clock", "{")[:-3], "a <tool_cal b", "</tool_call>",
    ],
)  # fmt: skip
def test_what_is_no_call_stays_content(text: str) -> None:
    assert ToolParser({"clock"}).push(text, is_last=True) == (text, [])
    after = ToolParser({"clock"}).push(text + NOW, is_last=True)
    assert (after[0], [x["function"]["name"] for x in after[1]]) == (text, ["clock"])


@pytest.mark.parametrize("size", range(1, 40))
def test_pieces_of_any_size_give_the_same_content_and_calls(size: int) -> None:
    arguments = r'{"x": "</tool_call> \\", "y":0.1234567890123456789, "z": "\"</tool_call>\u00e9"}'
    first, other = called("clock", arguments), called("other", "{}")
    text = f"a < b <tool_call> is\n{first}\n \n{other} c\n{NOW}"
    parser, content, calls = ToolParser({"clock"}), "", []
    for i in range(0, len(text), size):
        more, found = parser.push(text[i : i + size])
        content, calls = content + more, calls + found
    more, found = parser.push("", is_last=True)
    assert content + more == f"a < b <tool_call> is\n{other} c\n"
    assert [x["function"]["arguments"] for x in calls + found] == [arguments, "{}"]
    assert [x["index"] for x in calls + found] == [0, 1]


def test_an_answer_may_end_with_its_first_call() -> None:
    call = called("clock", '{"x": "</tool_call>"}')
    with running(make(f"a {call} b{NOW}~")) as (_, url, _):
        choice = post(f"{url}/v1", parallel_tool_calls=False).json()["choices"][0]
        usage = post(f"{url}/v1", parallel_tool_calls=False).json()["usage"]
        deltas = [x["delta"] for x in streamed(post(f"{url}/v1", parallel_tool_calls=False, stream=True))]
        answer: dict[str, Any] = {"role": "assistant", "tool_calls": choice["message"]["tool_calls"]}
        answer["tool_calls"][0]["function"]["arguments"] = r'{"x": "\ud800"}'
        refused = post(f"{url}/v1", messages=[{"role": "user", "content": "a"}, answer])
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("a ", "tool_calls")
    assert usage["completion_tokens"] == len(f"a {call}")
    assert [x["function"]["name"] for x in message["tool_calls"]] == ["clock"]
    assert "".join(x.get("content", "") for x in deltas) == "a "
    assert [y["function"]["arguments"] for x in deltas for y in x.get("tool_calls", [])] == ['{"x": "</tool_call>"}']
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


def test_required_calls_fit_their_schemas(url: str) -> None:
    choices = post(url, n=8, tool_choice="required").json()["choices"]
    names = [[check_call(x) for x in choice["message"]["tool_calls"]] for choice in choices]
    assert {x for each in names for x in each} == {"weather", "clock"}
    assert max(len(x) for x in names) > 1
    assert {(x["finish_reason"], x["message"]["content"]) for x in choices} == {("tool_calls", None)}
    choices = post(url, n=4, tool_choice="required", parallel_tool_calls=False).json()["choices"]
    assert [len(x["message"]["tool_calls"]) for x in choices] == [1] * 4


def test_a_named_function_is_called_once(url: str) -> None:
    choice = {"type": "function", "function": {"name": "clock"}}
    for each in post(url, n=3, tool_choice=choice).json()["choices"]:
        assert [check_call(x) for x in each["message"]["tool_calls"]] == ["clock"]
    parts = streamed(post(url, tool_choice=choice, stream=True))
    assert [check_call(y) for x in parts for y in x["delta"].get("tool_calls", [])] == ["clock"]
    assert parts[-1]["finish_reason"] == "tool_calls"


def test_a_call_that_is_cut_is_content(url: str) -> None:
    choice = post(url, tool_choice="required", max_tokens=20).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith('<tool_call>\n{"name"')
    assert len(choice["message"]["content"]) == 20
    assert "tool_calls" not in choice["message"]


def test_with_strict_functions_text_is_free_and_calls_are_not() -> None:
    grammars = Grammars(Lines(), 96)  # type: ignore[arg-type]
    given = [Tool.model_validate(x) for x in (WEATHER, CLOCK)]

    def refused(text: str) -> int | None:
        """The place of the first character that is not allowed."""
        constraint = grammars.constraint(text_and_calls_rule(given))
        for i, token in enumerate(Lines().encode(text)):
            if not constraint.allowed[token // 32] >> token % 32 & 1:
                return i
            constraint.push(token)
        return None

    for text in ("~", "a <tool_call b~", TWO, f"a{NOW} b~"):
        assert refused(text) is None
    wrong = called("weather", '{"city": "Oslo", "days": 2}')
    assert refused(wrong) == wrong.index("Oslo")
    assert refused("a <tool_call>~") == len("a <tool_call>")
    assert refused(called("other", "{}")) == len('<tool_call>\n{"name": "')
    assert Tool.model_validate(tool("a", strict=True)).function.strict


def test_strict_functions_are_served_with_a_grammar(url: str) -> None:
    assert post(url, tools=[tool("a", strict=True)], max_tokens=3).status_code == 200


def test_openais_client_sends_answers_and_results_back() -> None:
    engine = make(TWO)
    with running(engine) as (_, url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="a", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        message = (
            client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER, CLOCK]).choices[0].message
        )  # type: ignore[list-item]
        assert message.tool_calls is not None
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": x.id, "content": f"result {i}"} for i, x in enumerate(message.tool_calls)
        ]
        client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER, CLOCK])  # type: ignore[list-item]
        turns, tools = engine.tokenizer.given  # type: ignore[attr-defined]
        client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER], tool_choice="none")  # type: ignore[list-item]
        assert engine.tokenizer.given[1] is None  # type: ignore[attr-defined]
    assert tools == [WEATHER, CLOCK]
    assert [x["role"] for x in turns] == ["user", "assistant", "tool", "tool"]
    assert [x["function"] for x in turns[1]["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": "Rome", "days": 2}}, {"name": "clock", "arguments": {}}
    ]  # fmt: skip
    assert [x["tool_call_id"] for x in turns[2:]] == [x.id for x in message.tool_calls]
    assert turns[3]["content"] == "result 1"


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", "an answer that may call tools has no other"),
        ({"structured_outputs": {"json": "["}}, "structured_outputs", "an answer that may call tools has no other"),
        ({"tool_choice": "required", "ignore_eos": True}, "tools", "leave ignore_eos out"),
        ({"tool_choice": "required", "tools": [tool("a", b={"type": "strin"})]}, "tools", "Invalid type: strin"),
        (  # together: each alone is small enough
            {"tool_choice": "required", "tools": [tool(f"a{i}", b={"multipleOf": i}) for i in (997, 991)]},
            "tools",
            "988027, must be at most 10000",
        ),
    ],
)
def test_what_can_not_be_honoured_is_400(url: str, body: dict[str, Any], param: str, reason: str) -> None:
    response = post(url, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert reason in error["message"]


@pytest.mark.parametrize("template", [None, "{{ messages }}", "{{ tools }}", "{{ tools }}<tool_call><function=a>"])
def test_a_template_without_tools_of_this_format_is_refused(template: str | None) -> None:
    engine = make()
    engine.tokenizer.template = template
    turn = {"role": "tool", "tool_call_id": "a", "content": "b"}
    with running(engine) as (_, url, _):
        for body, param in (({}, "tools"), ({"tools": None, "messages": [turn]}, "messages")):
            error = post(f"{url}/v1", **body).json()["error"]
            assert error["param"] == param
            assert "chat template has no tools in the format <tool_call>{JSON}</tool_call>" in error["message"]
        assert post(f"{url}/v1", tool_choice="none", max_tokens=1).status_code == 200


def test_a_mark_that_texts_are_without_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Lines()
    assert refusal(tokenizer) is None  # type: ignore[arg-type]
    monkeypatch.setattr(tokenizer, "decode", lambda _: "")
    assert refusal(tokenizer) == "<tool_call> is a special token, which decoded texts leave out"  # type: ignore[arg-type]


def test_a_template_has_the_tools_as_they_came_and_arguments_as_objects() -> None:
    template = (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        '{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}"
    )
    tokenizer = Tokenizer(None, template)  # type: ignore[arg-type]
    call = {"function": {"name": "clock", "arguments": {"zone": "é"}}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "12"}]
    expected = '<assistant><tool_call>{"name": "clock", "arguments": {"zone": "é"}}</tool_call><tool>12'
    assert tokenizer.chat(turns, tools=[CLOCK]) == f"{json.dumps(CLOCK)}\n{expected}"
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == "<user>a"
