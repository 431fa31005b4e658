"""Fields of requests in the API of OpenAI's clients: what is accepted, and how the rest is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
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

T = TypeVar("T")
# Refused at its first wrong item: errors of a hundred thousand items would take seconds, and stop all threads.
Items = Annotated[list[T], Field(fail_fast=True)]

Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Strict(BaseModel):
    """JSON with no other fields than these, of exactly these types."""

    model_config = ConfigDict(extra="forbid", strict=True)


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a text is in JSON; None if it is none, or has half of a surrogate pair or a number beyond
    float64, which can't be written again.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"JSON has no {constant}")

    try:
        found = json.loads(text, parse_constant=refuse)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
