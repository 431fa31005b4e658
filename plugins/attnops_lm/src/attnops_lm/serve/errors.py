"""Errors in the format of OpenAI's API."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from pydantic import ValidationError

from attnops_lm.serve.fields import NOT_SERVED


class APIError(Exception):
    """An error, with its HTTP status, its headers and its JSON."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.headers = dict(headers or {}) | ({} if retry_after is None else {"Retry-After": str(retry_after)})
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status, self.reason = status, code or kind
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @classmethod
    def of_body(cls, error: ValidationError) -> APIError:
        """From the first error in a body, with the name of the field."""

        def name(loc: tuple[int | str, ...]) -> str | None:  # without the types that were tried, such as list[int]
            path = itertools.takewhile(lambda x: isinstance(x, int) or (x.isidentifier() and x != "str"), loc)
            return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in path).lstrip(".") or None

        errors = error.errors()
        # A union has the errors of all its types. "Not served" is more useful to a client than "wrong type".
        errors.sort(key=lambda x: x["type"] != NOT_SERVED)
        *parents, last = errors[0]["loc"] or ("",)
        param, is_unserved = name(errors[0]["loc"]), errors[0]["type"] == NOT_SERVED
        if errors[0]["type"] == "extra_forbidden":  # a client's own name, which may be any string
            param = f"{name(tuple(parents)) or ''}.{last}".lstrip(".")
            return cls(400, f"{param}: no such field", param, errors[0]["type"])
        same = [x for x in errors if name(x["loc"]) == param and (x["type"] == NOT_SERVED) == is_unserved]
        message = ", or ".join(dict.fromkeys(x["msg"] for x in same))
        return cls(400, f"{param}: {message}" if param else message, param, errors[0]["type"])
