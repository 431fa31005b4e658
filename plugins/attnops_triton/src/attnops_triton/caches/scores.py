"""Soft cap, bias and mask of a tile of scores, as Triton source.

Variables: ``b``, the batch index for masks and biases; ``hr`` and ``qr`` [rows], the query head and the query of each
    row of the tile; ``kx`` [bk], the indices of keys for masks and biases; ``s``, the scores. Indices are clamped to
    the valid range.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from attnops_triton.caches.plan import CachePlan
from attnops_triton.language.source import SourceWriter, number
from attnops_triton.language.translate import TYPES, tanh, traced, translate

if TYPE_CHECKING:
    from attnops.kernels import Elementwise


@dataclasses.dataclass(frozen=True)
class ScoreWriter:
    """Writes the code of a tile's scores.

    Attributes:
        write: the kernel's lines.
        plan: the plan of the call.
    """

    write: SourceWriter
    plan: CachePlan

    @property
    def shape(self) -> str:
        """The tile's shape."""
        return f"[{self.plan.tiles.rows}, {self.plan.tiles.bk}]"

    def load_values(self, prefix: str, by_key: bool) -> None:
        """Load the values of the "mask" or of the "bias": those that vary by key, or the others."""
        function = getattr(self.plan.scoring, prefix)
        if function is not None:
            for i, (axes, dtype) in enumerate(zip(function.values, function.dtypes, strict=True)):
                if ("kv" in axes) != by_key:
                    continue
                name = f"{prefix}{i}"
                self.write(f"{name} = {self._value(name, axes)}")
                if np.dtype(dtype) == np.bool_:
                    self.write(f"{name} = {name} != 0")
                elif np.dtype(dtype).itemsize != 4:
                    self.write(f"{name} = {name}.to({TYPES[np.dtype(dtype).name]})")

    def _value(self, name: str, axes: frozenset[str]) -> str:
        """The load of a value, which broadcasts to the tile; its array is [B or 1, H or 1, T or S or 1]."""
        last = "kv" if "kv" in axes else "q"
        n = "1" if last not in axes else self.write.integer(*(("keys", self.plan.key_axis) if last == "kv" else
                                                              ("T", self.plan.T)))  # fmt: skip
        by_head = "h" in axes
        at = f"{name}_ptr"
        if "b" in axes:
            at += f" + b.to(tl.int64) * {self.plan.H if by_head else 1} * {n}"
        if by_head:
            at += f" + (hr * {n})[:, None]"
        if "q" in axes:
            at += " + qr[:, None]"
        if "kv" in axes:
            at += " + kx[None, :]"
        return f"tl.load({at})"

    def apply_cap_and_bias(self) -> None:
        """Write soft cap and bias on ``s``."""
        scoring, write = self.plan.scoring, self.write
        if scoring.cap is not None:
            cap = float(scoring.cap)
            write(f"x = s * {number(1 / cap)}")
            write(f"curve = {tanh(write, 'x')}", f"s = {number(cap)} * curve")
        if scoring.bias is not None:
            (biased,) = translate(write, traced(scoring.bias, 0), self._arguments("bias", scoring.bias))
            write(f"s = {biased} + tl.full({self.shape}, 0.0, tl.float32)")
        if scoring.array:
            write(f"s = s + tl.load({self.by_score('array')})")

    def by_score(self, name: str) -> str:
        """The pointers to a tile of an array [B or 1, H or 1, T, S]."""
        rows = f"(b * {name}_b + hr * {name}_h).to(tl.int64) * T + qr"
        return f"{name}_ptr + ({rows})[:, None] * keys + kx[None, :]"

    def allowed(self, *conditions: str) -> bool:
        """Write ``ok``, True where a score is not masked, and ``seen`` [bk], True for keys that some row sees.

        Args:
            conditions: other expressions that broadcast to the tile. With none and no mask, nothing is written.
        """
        scoring, write = self.plan.scoring, self.write
        found = list(conditions)
        if scoring.mask is not None:
            for i in range(scoring.dense):
                write(f"dense{i} = tl.load({self.by_score(f'dense{i}')}) != 0")
            arguments = self._arguments("mask", scoring.mask) + [f"dense{i}" for i in range(scoring.dense)]
            found += translate(write, traced(scoring.mask, scoring.dense), arguments)
        if not found:
            return False
        write(
            f"ok = {' & '.join(found)} & tl.full({self.shape}, 1, tl.int1)",
            "seen = tl.reduce(ok.to(tl.int32), 0, largest) != 0",
        )
        return True

    def _arguments(self, prefix: str, function: Elementwise) -> list[str]:
        values = (f"{prefix}{i}" for i in range(len(function.values)))
        return ["s", "b", "hr[:, None]", "qr[:, None]", "kx[None, :]", *values]
