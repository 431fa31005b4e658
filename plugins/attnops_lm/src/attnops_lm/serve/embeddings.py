"""The endpoint of embeddings: its body, and its answer."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field
from starlette.responses import Response

from attnops_lm.serve.answers import Answer
from attnops_lm.serve.errors import APIError
from attnops_lm.serve.fields import Items, Label, Only, Strict
from attnops_lm.serve.request import Delta, Request
from attnops_lm.serve.text_of_json import encoded

if TYPE_CHECKING:
    from attnops_lm.serve.endpoints import Server
    from attnops_lm.serve.limits import Client


class EmbeddingBody(Strict):
    """``/v1/embeddings``."""

    model: str
    input: str | Items[int] | Items[str] | Items[Items[int]]
    encoding_format: Annotated[Any, AfterValidator(Only((None, "float", "base64")))] = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Label = None


class EmbeddingAnswer(Answer):
    """The embeddings of texts."""

    def __init__(
        self, server: Server, client: Client, body: EmbeddingBody, requests: list[Request], queue: asyncio.Queue[Any]
    ) -> None:
        super().__init__(server, client, requests, queue)
        self.body = body

    def response(self, parts: list[list[Delta]]) -> Response:
        """The embedding of each text, and the number of tokens."""
        data = [
            {"object": "embedding", "index": i, "embedding": self._embedding(deltas[-1])}
            for i, deltas in enumerate(parts)
        ]
        tokens = sum(x.prompt_length for x in self.requests)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        content = {"object": "list", "data": data, "model": self.server.name, "usage": usage}
        return Response(encoded(content, 3), media_type="application/json")

    def _embedding(self, delta: Delta) -> str | list[float]:
        """The first ``dimensions`` numbers, of length 1: a list, or base64 of little-endian float32."""
        assert delta.embedding is not None
        x = delta.embedding
        if self.body.dimensions is not None:
            x = x[: self.body.dimensions].astype(np.float64)
            if not (length := np.linalg.norm(x)):
                message = f"dimensions: the first {self.body.dimensions} numbers are 0, and can't be scaled to length 1"
                raise APIError(400, f"{message}; ask for more", "dimensions")
            x = (x / length).astype(np.float32)
        if self.body.encoding_format == "base64":
            return base64.b64encode(x.astype("<f4").tobytes()).decode()
        return x.tolist()
