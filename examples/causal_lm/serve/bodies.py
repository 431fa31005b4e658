"""The bodies of requests in the API of OpenAI's clients."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Stop = Annotated[str, Field(min_length=1)]
One = Annotated[int, Field(ge=1, le=1)]
Nothing = Annotated[float, Field(ge=0, le=0)]  # options of that API that are not served


class Strict(BaseModel):
    """JSON whose fields have exactly these types, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """Whether the last event of a stream has the numbers of tokens."""

    include_usage: bool = False


class Part(Strict):
    """A part of a turn's content; images and sound are not served."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[Part], Field(min_length=1)]

    def for_template(self) -> dict[str, str]:
        """With the content as one text, a line a part."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


class TextFormat(Strict):
    """The format of an answer: text; JSON by a schema is not served."""

    type: Literal["text"]


class Body(Strict):
    """What both endpoints take; of an option that is not served, the value that asks for nothing."""

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
    n: One | None = 1
    frequency_penalty: Nothing | None = None
    presence_penalty: Nothing | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: str | None = None


class CompletionBody(Body):
    """``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: Literal[False] | None = None
    best_of: One | None = None
    logprobs: None = None
    suffix: None = None


class ChatBody(Body):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    tools: Annotated[list[object], Field(max_length=0)] | None = None
    response_format: TextFormat | None = None
