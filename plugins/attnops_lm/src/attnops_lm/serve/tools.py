"""Tools that an answer may call, in the format of Hermes and Qwen:
``<tool_call>{"name": …, "arguments": …}</tool_call>``.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import AfterValidator, field_validator
from pydantic_core import PydanticCustomError

from attnops_lm.serve.fields import Label, Name, Only, Strict, json_object
from attnops_lm.serve.grammar import check_numbers, json_rule

if TYPE_CHECKING:
    from attnops_lm.tokenizer import Tokenizer

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_BEGINS_OBJECT = re.compile(r"\s*(\{|\Z)")
_END_OR_QUOTE = re.compile(rf'\\.|"|{CLOSE}', re.DOTALL)
_KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')

_IsFunction = Annotated[Any, AfterValidator(Only(("function",)))]


class Function(Strict):
    """A function that an answer may call. Without ``strict``, only forced calls are held to ``parameters``."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def is_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        """The JSON schema, if it is of an object."""
        if (parameters or {}).get("type", "object") != "object":
            raise PydanticCustomError("parameters", "it must be a JSON schema of type 'object'")
        return parameters


class Tool(Strict):
    """A tool, which is a function."""

    type: _IsFunction
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as it came."""
        return self.model_dump(exclude_unset=True)


class NamedFunction(Strict):
    """The name of a function."""

    name: Name


class NamedTool(Strict):
    """The choice of one function, which the answer must call."""

    type: _IsFunction
    function: NamedFunction


ToolChoice = Annotated[Any, AfterValidator(Only((None, "none", "auto", "required")))] | NamedTool


class CalledFunction(Strict):
    """The name of a function and its arguments, a JSON object as text."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def is_object(cls, arguments: str) -> str:
        """The arguments, if they are a JSON object, or empty."""
        if json_object(arguments or "{}") is None:
            raise PydanticCustomError("arguments", "it must be a JSON object, as text")
        return arguments


class ToolCall(Strict):
    """A call in an earlier answer."""

    id: str
    type: _IsFunction = "function"
    function: CalledFunction
    index: Label = None

    def for_template(self) -> dict[str, Any]:
        """The call with its arguments as an object, which templates expect."""
        arguments = json.loads(self.function.arguments or "{}")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def refusal(tokenizer: Tokenizer) -> str | None:
    """Why a model can't be given tools; None: it can."""
    template = tokenizer.tool_template or tokenizer.template or ""
    if "tools" not in template or OPEN not in template or "<function=" in template:
        return (
            f"the model's chat template has no tools in the format {OPEN}{{JSON}}{CLOSE}, the only one that is served"
        )
    if OPEN not in tokenizer.decode(tokenizer.encode(OPEN)):
        return f"{OPEN} is a special token, which decoded texts leave out"
    return None


def calls_rule(tools: Sequence[Tool], *, several: bool) -> str:
    """The rule of an answer that is a call of one of these tools, or several."""
    more = ' ("\\n" call)*' if several else ""
    return f'call{more}\ncall: "{OPEN}" rest\n{_rest(tools)}'


def text_and_calls_rule(tools: Sequence[Tool]) -> str:
    """The rule of any text with any number of calls."""
    # A lazy rule ends with the first mark, so that only a call can follow it.
    return f'(opened rest)* TEXT\nopened[lazy]: TEXT "{OPEN}"\nTEXT: /(.|\\n)*/\n{_rest(tools)}'


def _rest(tools: Sequence[Tool]) -> str:
    """The rules of a call after its first mark."""
    check_numbers([tool.function.parameters for tool in tools])
    one = " | ".join(f"call_{i}" for i in range(len(tools)))
    rules = [f'rest: "\\n" ({one}) "\\n{CLOSE}"']
    for i, tool in enumerate(tools):
        schema = tool.function.parameters
        schema = {"additionalProperties": False} if schema is None else schema
        begin = json.dumps(f'{{"name": "{tool.function.name}", "arguments": ')
        rules += [f'call_{i}: {begin} arguments_{i} "}}"', f"arguments_{i}: {json_rule({'type': 'object'} | schema)}"]
    return "\n".join(rules)


class ToolParser:
    """Divides the text of an answer into content and calls, as it comes.

    A call is JSON between the two marks, with the name of a tool and an object of arguments; anything else stays
    content. White space after a call is left out. The last call may lack its second mark.

    Args:
        names: the names of the tools.
        several: whether there may be several calls; if not, what comes after the first one is left out.
    """

    def __init__(self, names: Collection[str], *, several: bool = True) -> None:
        self.names, self.several, self.count = names, several, 0
        self._text = ""  # the part that may begin a mark, or a call that has begun
        self._searched, self._is_in_string = len(OPEN), False  # how far the call was searched for its end
        self._is_after_call = False

    @property
    def has_ended(self) -> bool:
        """Whether no further text is used."""
        return self.count > 0 and not self.several

    def ends(self, text: str) -> bool:
        """Whether the answer ends with more text."""
        self.push(text)
        return self.has_ended

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """The content and the calls that more text completes."""
        content = ""
        calls: list[dict[str, Any]] = []
        self._text = "" if self.has_ended else self._text + text
        while (start := self._text.find(OPEN)) >= 0:
            content += self._take(start)
            call, end = None, -1
            if _BEGINS_OBJECT.match(self._text, len(OPEN)):
                end = self._find_end()
                if end < 0 and not is_last:
                    return content, calls
                call = self._call(self._text[len(OPEN) : end if end >= 0 else None])
            if call is None:
                content += self._take(len(OPEN))
            else:
                calls.append(call)
                self._text = self._text[end + len(CLOSE) :] if end >= 0 and not self.has_ended else ""
                self._is_after_call = True
            self._searched, self._is_in_string = len(OPEN), False
        held = 0 if is_last else next((n for n in range(len(OPEN), 0, -1) if self._text.endswith(OPEN[:n])), 0)
        return content + self._take(len(self._text) - held), calls

    def _take(self, size: int) -> str:
        text, self._text = self._text[:size], self._text[size:]
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        return text

    def _find_end(self) -> int:
        """Where the second mark of a call begins, outside of strings; -1: it has not come."""
        for found in _END_OR_QUOTE.finditer(self._text, self._searched):
            if found[0] == CLOSE and not self._is_in_string:
                return found.start()
            self._is_in_string ^= found[0] == '"'
            self._searched = found.end()
        self._searched = max(self._searched, len(self._text) - len(CLOSE) + 1)  # no mark or escape begins before
        return -1

    def _call(self, text: str) -> dict[str, Any] | None:
        """The JSON of a call; None if it is none."""
        found = json_object(text)
        name = (found or {}).get("name")
        if found is None or not (
            isinstance(name, str) and name in self.names and isinstance(found.get("arguments"), dict)
        ):
            return None
        call = {
            "index": self.count, "id": f"call_{secrets.token_hex(12)}", "type": "function",
            "function": {"name": name, "arguments": _values(text)["arguments"]},
        }  # fmt: skip
        self.count += 1
        return call


def _values(text: str) -> dict[str, str]:
    """The values of a JSON object as they are written, for numbers that Python would round."""
    values, end = {}, text.index("{") + 1
    while key := _KEY.match(text, end):
        _, end = json.JSONDecoder().raw_decode(text, key.end())
        values[json.loads(key[1])] = text[key.end() : end]
    return values
