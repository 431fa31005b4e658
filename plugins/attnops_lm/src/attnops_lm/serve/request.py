"""A request: a prompt to continue, and its state in the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnops_lm.generation.text import TextOfRow
from attnops_lm.serve.logprobs import TokenLogprob

if TYPE_CHECKING:
    from attnops_lm.serve.grammar import Constraint


class Delta(NamedTuple):
    """What one step adds to a request's text.

    Attributes:
        text: text that is certain to be part of the answer; of an error, its message.
        finish_reason: "stop", "length", or "error".
        logprobs: the tokens whose text begins in the text up to here, if the request asks for log-probabilities.
            With 20 likely ones a token needs 0.6 kB, and 10 kB more while a whole answer is encoded.
        embedding: float32 [width], of length 1, if the request asks for it; no text comes then.
    """

    text: str
    finish_reason: str | None = None
    logprobs: Sequence[TokenLogprob] = ()
    embedding: np.ndarray | None = None


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt to continue, and its state.

    Attributes:
        tokens: the prompt's tokens, followed by the generated ones.
        emit: called with every `Delta`, from the engine's thread.
        top_k: the number of most probable tokens from which one is drawn; 0: all.
        frequency_penalty: is subtracted from a token's logit for each time that it was generated.
        presence_penalty: is subtracted once from the logit of a token that was generated.
        logprobs: how many of the most likely tokens each `Delta` has, with log-probabilities; None: none,
            not even the drawn token's.
        constraint: the grammar that the answer follows; None: any text.
        ends: called with each piece of text, from the engine's thread; whether the answer ends with it.
        embeds: whether the prompt's embedding is asked for, and no text; ``max_tokens`` is 1.
        pooled: float32 [width], the pooled hidden states of the tokens that are computed, for an embedding.
        row: the row of the batch that computes the request; −1 while it waits.
        number: the order of arrival.
        computed: the number of tokens whose keys and values are in ``pages``.
        arrived, first: when the request was submitted, and when it got its first token, by `time.monotonic`.
        cached: tokens of the prompt that shared pages held when the request got a row; the largest if it got several.
        hidden: tokens whose text is held back, because it may begin a stop string or is a part of a character.
        key: the key of the prefix that the first ``shared`` pages hold.
    """

    tokens: list[int]
    max_tokens: int
    emit: Callable[[Delta], object] = lambda delta: None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None
    constraint: Constraint | None = None
    ends: Callable[[str], bool] | None = None
    embeds: bool = False
    pooled: np.ndarray | None = None
    row: int = -1
    number: int = -1
    computed: int = 0
    cached: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    key: bytes = b""
    shared: int = 0
    text: TextOfRow = dataclasses.field(init=False)
    hidden: list[TokenLogprob] = dataclasses.field(default_factory=list)
    is_cancelled: bool = False
    arrived: float = 0.0
    first: float | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def count(self) -> int:
        """The number of generated tokens."""
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """The number of tokens without keys and values: of the prompt at first, then the last generated one."""
        return len(self.tokens) - self.computed
