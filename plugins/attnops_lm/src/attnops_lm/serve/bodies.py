"""The bodies of requests in the API of OpenAI's clients."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

NOT_SERVED: Final = "not_served"  # the type of these errors


@dataclasses.dataclass(frozen=True, eq=False)  # typing merges types with equal annotations, and 0 equals False
class Only:
    """The accepted values of a field that is not, or not fully, supported; others are refused with our message."""

    values: tuple[Any, ...] = ()

    def __call__(self, value: Any) -> Any:
        """The value, if it is accepted; 1 and 1.0 are equal, 1 and True are not."""
        if any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in self.values):
            return value
        shown, accepted = json.dumps(value), " or ".join(json.dumps(x) for x in self.values if x is not None)
        rules = ["leave it out"] * (None in self.values) + [f"send {accepted}"] * bool(accepted)
        given = {"value": shown if len(shown) <= 60 else f"{shown[:60]}…", "rule": " or ".join(rules)}
        raise PydanticCustomError(NOT_SERVED, "{value} is not served; {rule}", given)


Label = object  # describes the request; accepted, and without effect
Unserved = Annotated[Any, AfterValidator(Only((None,)))]
Off = Annotated[Any, AfterValidator(Only((None, False)))]
NoList = Annotated[Any, AfterValidator(Only((None, [])))]
NoDict = Annotated[Any, AfterValidator(Only((None, {})))]

Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    """JSON with no other fields than these, of exactly these types."""

    model_config = ConfigDict(extra="forbid", strict=True)


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

    role: Annotated[Any, AfterValidator(Only(("system", "developer", "user", "assistant")))]
    content: Annotated[str | Annotated[list[ContentPart], Field(min_length=1)] | None, Field(validate_default=True)] = (
        None
    )
    name: Label = None
    refusal: Unserved = None
    audio: Unserved = None
    annotations: NoList = None
    tool_calls: NoList = None
    function_call: Unserved = None

    @field_validator("content")
    @classmethod
    def is_there(cls, content: str | list[ContentPart] | None, info: ValidationInfo) -> str | list[ContentPart] | None:
        """The content; None is accepted only for an assistant's turn, which may have no text."""
        if content is None and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("missing", "it must be text or a list of parts; only an assistant's may be null")
        return content

    def for_template(self) -> dict[str, str]:
        """The message with its content as one text, one line per part; the role "developer" becomes "system", which
        templates know.
        """
        content = "\n".join(x.text for x in self.content) if isinstance(self.content, list) else self.content or ""
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class Body(Strict):
    """The fields of both endpoints. An option that is not supported accepts only the value that has no effect."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    frequency_penalty: Penalty | None = 0.0
    presence_penalty: Penalty | None = 0.0
    logit_bias: NoDict = None
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
    def most_likely(self) -> int | None:
        """How many of the most likely tokens each token of the answer has, with log-probabilities; None: none has
        log-probabilities.
        """
        return None


class CompletionBody(Body):
    """``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
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

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: NoList = None
    tool_choice: Annotated[Any, AfterValidator(Only((None, "none", "auto")))] = None
    parallel_tool_calls: Annotated[Any, AfterValidator(Only((None, True, False)))] = None
    functions: NoList = None
    function_call: Annotated[Any, AfterValidator(Only((None, "none", "auto")))] = None
    response_format: Annotated[Any, AfterValidator(Only((None, {"type": "text"})))] = None
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
