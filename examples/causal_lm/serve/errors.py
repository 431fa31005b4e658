"""Errors in the format of that API."""

from __future__ import annotations

import itertools

from pydantic import ValidationError


class APIError(Exception):
    """An error in that API's format."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status = status
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @classmethod
    def of_body(cls, error: ValidationError) -> APIError:
        """The first of what is wrong in a body, with the name of the field."""

        def name(loc: tuple[int | str, ...]) -> str | None:  # without the types that were tried, such as list[int]
            path = itertools.takewhile(lambda x: isinstance(x, int) or (x.isidentifier() and x != "str"), loc)
            return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in path).lstrip(".") or None

        errors = error.errors()
        *parents, last = errors[0]["loc"] or ("",)
        param = name(errors[0]["loc"])
        if errors[0]["type"] == "extra_forbidden":  # whatever the client calls it
            param = f"{name(tuple(parents)) or ''}.{last}".lstrip(".")
            return cls(400, f"{param}: no such field", param, errors[0]["type"])
        message = ", or ".join(dict.fromkeys(x["msg"] for x in errors if name(x["loc"]) == param))
        return cls(400, f"{param}: {message}" if param else message, param, errors[0]["type"])
