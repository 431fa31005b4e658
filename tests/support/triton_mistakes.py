"""Kernels with mistakes that tests plant in their source."""

from __future__ import annotations

import dataclasses
from typing import Any

from attnops_triton.language.source import KernelFunction


@dataclasses.dataclass(frozen=True)
class _Mistaken(KernelFunction):
    pairs: tuple[str, ...] = ()

    @property
    def text(self) -> str:  # type: ignore[override]
        return mistaken(super().text, *self.pairs)


def mistaken(text: str, *pairs: str) -> str:
    """The text with some parts replaced by others."""
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    return text


def with_mistakes(kernel: Any, *pairs: str) -> Any:
    """A kernel that is interpreted with some parts of its text replaced by others."""
    if not isinstance(kernel, KernelFunction):
        return dataclasses.replace(kernel, text=mistaken(kernel.text, *pairs))
    return _Mistaken(kernel.function, kernel.arrays, kernel.sizes, kernel.options, kernel.blocks, pairs)
