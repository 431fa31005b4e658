"""What clients of that API send is taken if it asks for nothing more, and else refused in words that say what to do."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from attnops_lm.serve.bodies import ChatBody, CompletionBody
from attnops_lm.serve.embeddings import EmbeddingBody
from attnops_lm.serve.errors import APIError

PROMPT: dict[str, Any] = {"model": "small", "prompt": "a"}
CHAT: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "a"}]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "a"}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "b"}}


def said(message: dict[str, Any]) -> dict[str, Any]:
    return CHAT | {"messages": [*CHAT["messages"], message]}


def refusal(body: dict[str, Any]) -> dict[str, Any]:
    kind = ChatBody if "messages" in body else CompletionBody
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    error = APIError.of_body(caught.value)
    assert error.status == 400
    return error.content["error"]


@pytest.mark.parametrize(
    "label",
    [
        {"metadata": {"run": "7"}}, {"store": True}, {"user": "x"}, {"service_tier": "auto"}, {"prompt_cache_key": "k"},
        {"prompt_cache_retention": "24h"}, {"safety_identifier": "s"},
    ],
    ids=lambda x: next(iter(x)),
)  # fmt: skip
def test_what_only_labels_a_request_is_taken(label: dict[str, Any]) -> None:
    CompletionBody.model_validate(PROMPT | label)
    ChatBody.model_validate(CHAT | label)


@pytest.mark.parametrize(
    "body",
    [
        PROMPT | {"presence_penalty": 0.0, "frequency_penalty": 0, "best_of": 1, "echo": False, "suffix": None},
        PROMPT | {"repetition_penalty": 1.0, "logprobs": None, "top_k": None},
        PROMPT | {"repetition_penalty": 1},
        CHAT | {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"]},
        CHAT | {"response_format": {"type": "text"}, "logprobs": False, "logit_bias": {}, "n": 1},
        CHAT | {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        said({"role": "user", "content": "a", "name": "Ann"}),
        said({"role": "assistant", "content": "b", "refusal": None, "annotations": [], "tool_calls": None}),
    ],
)
def test_what_asks_for_nothing_is_taken(body: dict[str, Any]) -> None:
    (ChatBody if "messages" in body else CompletionBody).model_validate(body)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (PROMPT | {"n": 2, "best_of": 3}, "best_of", "3 is not served; leave it out or send 2"),
        (PROMPT | {"best_of": True}, "best_of", "true is not served; leave it out or send 1"),
        (PROMPT | {"suffix": "b"}, "suffix", '"b" is not served; leave it out'),
        (CHAT | {"top_logprobs": 0}, "top_logprobs", "it needs logprobs=true; send both, or leave it out"),
        (CHAT | {"tool_choice": "required"}, "tool_choice", "no such tool is among tools; send it there too"),
        (CHAT | {"response_format": {"type": "xml"}}, "response_format.type", '"xml" is not served; send "text" or "j'),
        (CHAT | {"response_format": {"type": "json_schema"}}, "response_format", "type 'json_schema' needs the field"),
        (
            CHAT | {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
            "response_format",
            "type 'json_schema' needs the field json_schema, and no other type has it",
        ),
        (PROMPT | {"structured_outputs": {}}, "structured_outputs", "it has 0 of json, regex and choice; send one"),
        (
            PROMPT | {"structured_outputs": {"regex": "a", "json": {}}},
            "structured_outputs",
            "it has 2 of json, regex and choice; send one",
        ),
        (CHAT | {"tool_choice": "any"}, "tool_choice", '"any" is not served; leave it out or send "none" or "auto" or'),
        (CHAT | {"tools": [{"type": "custom"}]}, "tools[0].type", '"custom" is not served; send "function"'),
        (CHAT | {"tools": [TOOL, TOOL]}, "tools", "the names of functions must differ"),
        (CHAT | {"tools": [TOOL], "tool_choice": NAMED}, "tool_choice", "no such tool is among tools; send it there"),
        (
            CHAT | {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
            "it must be a JSON schema of type 'object'",
        ),
        (said({"role": "function", "content": "a"}), "messages[1].role", '"function" is not served; send "system" or'),
        (said({"role": "tool", "content": "a"}), "messages[1].tool_call_id", "a message of role 'tool' must have it"),
        (
            said({"role": "assistant", "tool_calls": [{"id": "b", "function": {"name": "a", "arguments": "[1]"}}]}),
            "messages[1].tool_calls[0].function.arguments",
            "it must be a JSON object, as text",
        ),
        (
            said(
                {
                    "role": "user",
                    "content": "a",
                    "tool_calls": [{"id": "b", "function": {"name": "a", "arguments": ""}}],
                }
            ),
            "messages[1].tool_calls",
            "only an assistant's message has them; leave it out",
        ),
        (
            said({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
            "messages[1].content",
            '"image_url" is not served; send "text"',
        ),
        (said({"role": "user", "content": None}), "messages[1].content", "it must be text or a list of parts; only"),
        (said({"role": "system"}), "messages[1].content", "it must be text or a list of parts; only an assistant's"),
    ],
)
def test_what_is_not_served_is_refused_with_its_value_and_what_to_send(
    body: dict[str, Any], param: str, message: str
) -> None:
    error = refusal(body)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: {message}")
    assert "Input should" not in error["message"]


def test_of_two_numbers_the_wrong_one_is_named() -> None:
    assert refusal(PROMPT | {"n": 129, "best_of": 129})["message"] == "n: Input should be less than or equal to 128"


def test_a_developer_is_a_system_and_an_assistants_null_is_an_empty_turn() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts},
        {"role": "assistant", "content": None}, {"role": "assistant"},
    ]  # fmt: skip
    body = ChatBody.model_validate(CHAT | {"messages": messages})
    assert [x.for_template() for x in body.messages] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""}, {"role": "assistant", "content": ""},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [1.5] * 9000}, "input"),
        ({"input": [[1.5] * 9000]}, "input"),
        (PROMPT | {"prompt": [{}] * 9000}, "prompt"),
        (PROMPT | {"structured_outputs": {"choice": [1] * 9000}}, "structured_outputs.choice[0]"),
        (CHAT | {"messages": [{}] * 9000}, "messages[0].role"),
        (CHAT | {"messages": [{"role": "user", "content": [{}] * 9000}]}, "messages[0].content"),
        (CHAT | {"messages": [{"role": "assistant", "tool_calls": [1] * 9000}]}, "messages[0].tool_calls[0]"),
        (CHAT | {"tools": [1] * 9000}, "tools[0]"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_list_is_refused_at_its_first_wrong_item(body: dict[str, Any], param: str) -> None:
    kind = ChatBody if "messages" in body else CompletionBody if "prompt" in body else EmbeddingBody
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"model": "small"} | body)
    assert caught.value.error_count() < 6  # an error for each item would need seconds in a long list
    assert APIError.of_body(caught.value).content["error"]["param"] == param
