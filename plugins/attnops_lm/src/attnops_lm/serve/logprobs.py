"""Log-probabilities in answers, in the formats of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from attnops_lm.tokenizer import Tokenizer

# OpenAI's number for very unlikely tokens, since JSON has no infinity. `max` with it as the first argument gives it for
# NaN too.
_LEAST = -9999.0


class TokenLogprob(NamedTuple):
    """The log-probabilities of a generated token, and of the K most likely tokens in its place.

    Arrays need a fifth of the memory of lists of numbers.

    Attributes:
        token: the token.
        value: its log-probability.
        start: where the token's text begins in the text of the answer, in characters.
        ids: int32 [K], the most likely tokens, the most likely first; as many as the request asks for.
        values: float32 [K], their log-probabilities.
    """

    token: int
    value: float
    start: int
    ids: np.ndarray
    values: np.ndarray

    @property
    def most_likely(self) -> list[tuple[int, float]]:
        """The most likely tokens and their log-probabilities."""
        return list(zip(self.ids.tolist(), self.values.tolist(), strict=True))


def chat_logprobs(tokens: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """The field ``logprobs`` of a chat's choice."""

    def entry(token: int, value: float) -> dict[str, Any]:
        content = tokenizer.token_bytes(token)
        return {"token": _shown(content), "logprob": max(_LEAST, value), "bytes": list(content)}

    content = [entry(x.token, x.value) | {"top_logprobs": [entry(*y) for y in x.most_likely]} for x in tokens]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """The field ``logprobs`` of a completion's choice. The token that was drawn is always among the most likely ones;
    of two tokens with the same text the more likely one is shown.
    """

    def text(token: int) -> str:
        return _shown(tokenizer.token_bytes(token), "bytes:")

    def most_likely(x: TokenLogprob) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, value in [*x.most_likely, (x.token, x.value)]:
            found.setdefault(text(token), max(_LEAST, value))
        return found

    return {
        "tokens": [text(x.token) for x in tokens],
        "token_logprobs": [max(_LEAST, x.value) for x in tokens],
        "top_logprobs": [most_likely(x) for x in tokens],
        "text_offset": [x.start for x in tokens],
    }


def _shown(content: bytes, prefix: str = "") -> str:
    r"""The text of a token; of a part of a character its bytes, such as ``\xe2\x82``."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{x:02x}" for x in content)
