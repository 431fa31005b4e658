"""A prompt to be continued, and what a step adds to its text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from attnops_lm.generation.text import TextOfRow


class Delta(NamedTuple):
    """What a step adds to a request."""

    text: str
    finish_reason: str | None = None  # "stop", "length", "error"


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt to be continued, and its state.

    Attributes:
        tokens: the prompt's, followed by those that were generated.
        emit: called with every `Delta`, from the engine's thread.
        top_k: the number of most probable tokens from which one is drawn; 0: all.
        computed: the number of tokens whose keys and values are in ``pages``.
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
    row: int = -1
    number: int = -1
    computed: int = 0
    cached: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    key: bytes = b""
    shared: int = 0
    text: TextOfRow = dataclasses.field(init=False)
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens without keys and values: those of the prompt, or the last one that was generated."""
        return len(self.tokens) - self.computed
