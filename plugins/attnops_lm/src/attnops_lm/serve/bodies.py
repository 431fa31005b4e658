"""The bodies of requests in the API of OpenAI's clients."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from attnops_lm.serve.fields import (
    Items,
    Label,
    Name,
    NoDict,
    NoList,
    Off,
    Only,
    Penalty,
    Stop,
    Strict,
    Unserved,
    json_object,
)
from attnops_lm.serve.grammar import choice_rule, json_rule, regex_rule
from attnops_lm.serve.tools import Tool, ToolCall, ToolChoice, calls_rule, text_and_calls_rule


class StreamOptions(Strict):
    """Whether the last event of a stream has the numbers of tokens."""

    include_usage: bool = False
    include_obfuscation: Off = None


class ContentPart(Strict):
    """A part of a turn's content; images and sound are not served."""

    type: Annotated[Any, AfterValidator(Only(("text",)))]
    text: str


class Message(Strict):
    """One turn of a conversation. Fields that only answers of this API have are accepted too, if they are empty."""

    role: Annotated[Any, AfterValidator(Only(("system", "developer", "user", "assistant", "tool")))]
    content: Annotated[
        str | Annotated[Items[ContentPart], Field(min_length=1)] | None, Field(validate_default=True)
    ] = None
    name: Label = None
    refusal: Unserved = None
    audio: Unserved = None
    annotations: NoList = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: Annotated[str | None, Field(validate_default=True)] = None
    function_call: Unserved = None

    @field_validator("content")
    @classmethod
    def is_there(cls, content: str | list[ContentPart] | None, info: ValidationInfo) -> str | list[ContentPart] | None:
        """The content; None is accepted only for an assistant's turn, which may have no text."""
        if content is None and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("missing", "it must be text or a list of parts; only an assistant's may be null")
        return content

    @field_validator("tool_calls")
    @classmethod
    def is_assistants(cls, tool_calls: list[ToolCall] | None, info: ValidationInfo) -> list[ToolCall] | None:
        """The calls, which only an assistant makes."""
        if tool_calls and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("tool_calls", "only an assistant's message has them; leave it out")
        return tool_calls

    @field_validator("tool_call_id")
    @classmethod
    def is_tools(cls, tool_call_id: str | None, info: ValidationInfo) -> str | None:
        """The id, which a tool's message has, and no other."""
        if (tool_call_id is not None) != (info.data.get("role") == "tool"):
            raise PydanticCustomError("tool_call_id", "a message of role 'tool' must have it, and no other")
        return tool_call_id

    def for_template(self) -> dict[str, Any]:
        """The message with its content as one text, one line per part; the role "developer" becomes "system", which
        templates know.
        """
        content = "\n".join(x.text for x in self.content) if isinstance(self.content, list) else self.content or ""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [x.for_template() for x in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class JSONSchema(Strict):
    """A JSON schema with a name. The answer fits the schema, with ``strict`` and without it."""

    name: Name
    description: Label = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """What a whole answer is: any text, a JSON object, or JSON that fits a schema."""

    type: Annotated[Any, AfterValidator(Only(("text", "json_object", "json_schema")))]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def has_schema(self) -> Self:
        """The format, if it has a schema where its type needs one, and only there."""
        if (self.json_schema is None) == (self.type == "json_schema"):
            rule = "type 'json_schema' needs the field json_schema, and no other type has it"
            raise PydanticCustomError("json_schema", "{rule}", {"rule": rule})
        return self

    @property
    def rule(self) -> str | None:
        """The rule of a grammar; None: any text."""
        if self.json_schema is not None:
            return json_rule(self.json_schema.schema_)
        return json_rule({"type": "object"}) if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """vLLM's field for a whole answer: JSON that fits a schema, a match of a regular expression, or a choice."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[Items[str], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def is_one(self) -> Self:
        """The field, if it has exactly one of its own."""
        if (given := sum(x is not None for x in (self.json_, self.regex, self.choice))) != 1:
            message = "it has {given} of json, regex and choice; send one"
            raise PydanticCustomError("structured_outputs", message, {"given": given})
        return self

    @property
    def rule(self) -> str:
        """The rule of a grammar.

        Raises:
            ValueError: ``json`` is a text that is no JSON object.
        """
        if self.choice is not None:
            return choice_rule(self.choice)
        if self.regex is not None:
            return regex_rule(self.regex)
        schema = json_object(self.json_) if isinstance(self.json_, str) else self.json_
        if schema is None:
            raise ValueError("json: a schema must be a JSON object")
        return json_rule(schema)


class Body(Strict):
    """The fields of both endpoints. An option that is not supported accepts only the value that has no effect."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=0)] | None = 0
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    frequency_penalty: Penalty | None = 0.0
    presence_penalty: Penalty | None = 0.0
    repetition_penalty: Annotated[Any, AfterValidator(Only((None, 1.0)))] = None  # which `vllm bench serve` sends
    logit_bias: NoDict = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: Label = None
    metadata: Label = None
    store: Label = None
    service_tier: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    prompt_cache_retention: Label = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def format(self) -> tuple[str, ResponseFormat | StructuredOutputs | None]:
        """The field that says what the answer is, and its value."""
        if self.structured_outputs is not None:
            return "structured_outputs", self.structured_outputs
        return "response_format", self.response_format

    @property
    def most_likely(self) -> int | None:
        """How many of the most likely tokens each token of the answer has, with log-probabilities; None: none has
        log-probabilities.
        """
        return None


class CompletionBody(Body):
    """``/v1/completions``."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    echo: Off = None
    best_of: Any = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    suffix: Unserved = None

    @field_validator("best_of")
    @classmethod
    def is_n(cls, best_of: Any, info: ValidationInfo) -> Any:
        """The number, if it is ``n``: no answers are left out."""
        return best_of if "n" not in info.data else Only((None, info.data["n"] or 1))(best_of)

    @property
    def most_likely(self) -> int | None:
        """How many of the most likely tokens each token has."""
        return self.logprobs


class ChatBody(Body):
    """``/v1/chat/completions``."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    functions: NoList = None
    function_call: Annotated[Any, AfterValidator(Only((None, "none", "auto")))] = None
    modalities: Annotated[Any, AfterValidator(Only((None, ["text"])))] = None
    reasoning_effort: Annotated[Any, AfterValidator(Only((None, "none")))] = None
    audio: Unserved = None
    prediction: Unserved = None
    verbosity: Unserved = None
    web_search_options: Unserved = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value."""
        given = self.max_completion_tokens
        return super().token_limit if given is None else ("max_completion_tokens", given)

    @field_validator("tools")
    @classmethod
    def have_names(cls, tools: list[Tool] | None) -> list[Tool] | None:
        """The tools, if their names differ."""
        names = [x.function.name for x in tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "the names of functions must differ")
        return tools

    @field_validator("tool_choice")
    @classmethod
    def is_there(cls, tool_choice: Any, info: ValidationInfo) -> Any:
        """The choice, if there is a tool for it."""
        name = None if isinstance(tool_choice, str | None) else tool_choice.function.name
        names = [x.function.name for x in info.data.get("tools") or ()]
        if (tool_choice == "required" and not names) or (name is not None and name not in names):
            raise PydanticCustomError("tool_choice", "no such tool is among tools; send it there too")
        return tool_choice

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def tool_rule(self) -> str | None:
        """The rule of an answer that must call tools, or whose calls must fit schemas; None: there is none."""
        tools = self.callable_tools
        if self.tool_choice == "required" and tools:
            return calls_rule(tools, several=self.parallel_tool_calls is not False)
        if not isinstance(self.tool_choice, str | None):
            name = self.tool_choice.function.name
            return calls_rule([x for x in tools if x.function.name == name], several=False)
        return text_and_calls_rule(tools) if any(x.function.strict for x in tools) else None

    @field_validator("top_logprobs")
    @classmethod
    def has_logprobs(cls, top_logprobs: int | None, info: ValidationInfo) -> int | None:
        """The number, which needs ``logprobs``."""
        if top_logprobs is not None and info.data.get("logprobs", True) is not True:
            raise PydanticCustomError("needs_logprobs", "it needs logprobs=true; send both, or leave it out")
        return top_logprobs

    @property
    def most_likely(self) -> int | None:
        """How many of the most likely tokens each token has."""
        return (self.top_logprobs or 0) if self.logprobs else None
