"""What a call does to scores, static, and its numbers, which may be data."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from attnops.operations.flash.tile_bias import TileBias


class Numbers(NamedTuple):
    """The numbers of a call: Python's, or float32 arrays [] where other numbers must not make a new program.

    Attributes:
        scale: the softmax scale.
        folded: the part of it that is multiplied in before the product: all of it in float32, a power of two in 16
            bits, where any other would round.
        scale_residual: what is left of it, in [1, 2); None for 1.
        cap: the soft cap; None for none.
    """

    scale: Any
    folded: Any
    scale_residual: Any
    cap: Any

    @classmethod
    def make(cls, scale: float, cap: float | None, dtype: Any) -> Numbers:
        """Those of a call whose products take ``dtype``."""
        if dtype == jnp.float32:
            return cls(scale, scale, None, cap)
        folded = math.copysign(2.0 ** math.floor(math.log2(abs(scale))), scale) if scale else 0.0
        return cls(scale, folded, scale / folded if folded else 1.0, cap)

    def as_data(self) -> Numbers:
        """The same as arrays."""
        return jax.tree.map(np.float32, self)

    def fold_scale(self, x: jax.Array, dtype: Any) -> jax.Array:
        """A tile of queries with the folded part of the scale, in ``dtype``."""
        is_one = isinstance(self.folded, float) and self.folded == 1.0
        return x if is_one else (x.astype(jnp.float32) * self.folded).astype(dtype)

    def scaled(self, x: jax.Array) -> jax.Array:
        """``x`` times what is left of the scale."""
        return x if self.scale_residual is None else x * self.scale_residual


@dataclasses.dataclass(frozen=True)
class Options:
    """What a call asks for, static.

    Attributes:
        numbers: the numbers; None where they are data, see `Arrays`.
        has_cap: whether there is a soft cap.
        bias: how the bias is taken tile by tile.
        dropout_prob: the probability of dropout.
        dropout_step: see `attnops.dropout.dropout_step`.
        has_fully_masked_tokens: whether some tokens may be seen by no other, and so hold anything, NaN too.
        holds_function: whether a mask or bias holds a caller's function, which nothing that is compiled may outlive.
    """

    numbers: Numbers | None = None
    has_cap: bool = False
    bias: TileBias | None = None
    dropout_prob: float = 0.0
    dropout_step: int = 1
    has_fully_masked_tokens: bool = False
    holds_function: bool = False

    @property
    def changes_scores(self) -> bool:
        """Whether scores are more than a product and a scale."""
        return self.has_cap or self.bias is not None
