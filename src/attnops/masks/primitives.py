"""The primitives that masks are made of."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax

from attnops.masks.base import Mask


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """No query sees a key that comes after it: key j is seen by query i when ``j <= i + offset``.

    ::

        Causal(), T = S = 4     Causal(), T = 2, S = 4    Causal(offset=0), T = 2, S = 4
        █ · · ·                 █ █ █ ·                   █ · · ·
        █ █ · ·                 █ █ █ █                   █ █ · ·
        █ █ █ ·
        █ █ █ █

    Attributes:
        offset: the position of query 0 among the keys; an int, or an integer array of shape [] or [B].
            None aligns at the end: the last query sees the last key, whatever T and S.
    """

    offset: int | jax.Array | None = None

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        if self.offset is None:
            return dataclasses.replace(self, offset=S - T)
        shape = getattr(self.offset, "shape", ())
        if shape not in ((), (B,)):
            raise ValueError(f"Causal's offset has shape {shape}, but must be a number or have shape [B]=({B},)")
        return self

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        offset = self.offset if getattr(self.offset, "ndim", 0) == 0 else self.offset[b]  # type: ignore[index]
        return kv <= q + offset

    def __str__(self) -> str:
        return "Causal()" if self.offset is None else f"Causal(offset={_text(self.offset)})"


@dataclasses.dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean array, True where a query may attend.

    Attributes:
        array: boolean, 4-D, broadcasts to [B, H, T, S].
    """

    array: jax.Array

    def bind(self, B: int, H: int, T: int, S: int) -> Self:
        return self

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        index = (axis if size > 1 else 0 for axis, size in zip((b, h, q, kv), self.array.shape, strict=True))
        return self.array[tuple(index)]

    def dense(self, B: int, H: int, T: int, S: int) -> jax.Array:
        return self.array

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"mask_shape": tuple(self.array.shape)}

    def __str__(self) -> str:
        return f"Dense({_text(self.array)})"


def _text(value: Any) -> str:
    return f"<{value.dtype} {list(value.shape)}>" if hasattr(value, "shape") else str(value)
