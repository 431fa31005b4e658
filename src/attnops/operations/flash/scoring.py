"""What a call does to scores, as static data; its numbers may be arrays."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnops.typing import DType, Leaf

if TYPE_CHECKING:
    from attnops.operations.flash.tile_bias import TileBias


class Numbers(NamedTuple):
    """The numbers of a call: Python floats, or float32 arrays [] where new numbers must not compile a new program.

    Attributes:
        scale: the softmax scale.
        folded: the factor of the scale that queries are multiplied by before the product: all of it in float32; a power
            of two in 16 bits, which does not round.
        scale_residual: ``scale / folded``, in [1, 2); None for 1.
        cap: the soft cap; None for none.
    """

    scale: Leaf
    folded: Leaf
    scale_residual: Leaf
    cap: Leaf

    @classmethod
    def make(cls, scale: float, cap: float | None, dtype: DType) -> Numbers:
        """The numbers of a call whose products have operands of ``dtype``."""
        if dtype == jnp.float32:
            return cls(scale, scale, None, cap)
        folded = math.copysign(2.0 ** math.floor(math.log2(abs(scale))), scale) if scale else 0.0
        return cls(scale, folded, scale / folded if folded else 1.0, cap)

    def as_data(self) -> Numbers:
        """The same as arrays."""
        return jax.tree.map(np.float32, self)

    def fold_scale(self, x: jax.Array, dtype: DType) -> jax.Array:
        """A tile of queries times the folded factor of the scale, in ``dtype``."""
        is_one = isinstance(self.folded, float) and self.folded == 1.0
        return x if is_one else (x.astype(jnp.float32) * self.folded).astype(dtype)

    def scaled(self, x: jax.Array) -> jax.Array:
        """``x`` times the scale's residual."""
        return x if self.scale_residual is None else x * self.scale_residual


@dataclasses.dataclass(frozen=True)
class NativeScoring:
    """What is done to scores, static and hashable; other kernels have `attnops.kernels.Scoring`.

    Attributes:
        numbers: the numbers; None if they are data, in `attnops.operations.flash.operands.NativeArrays`.
        has_cap: whether there is a soft cap.
        bias: how the bias is applied tile by tile; None for none.
        dropout_prob: the probability of dropout.
        dropout_step: the factor by which dropout's hash multiplies the index of a key; 1 unless keys are strided.
        has_fully_masked_tokens: whether tokens may be fully masked; such tokens may hold NaN.
        holds_function: whether a mask or bias holds a caller's function, which must not be kept alive by a compiled
            program.
    """

    numbers: Numbers | None = None
    has_cap: bool = False
    bias: TileBias | None = None
    dropout_prob: float = 0.0
    dropout_step: int = 1
    has_fully_masked_tokens: bool = False
    holds_function: bool = False

    @property
    def has_cap_or_bias(self) -> bool:
        """Whether scores are more than a product and a scale."""
        return self.has_cap or self.bias is not None
