"""How tokens are stored: as they are, or quantised with scales."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Final

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from attnops.typing import DType

# The largest magnitude that is stored; integers leave out −128 and −8, so that the range is symmetric.
LARGEST: Final = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int4": 7.0}
SCALES: Final = ("tensor", "head", "token_head")


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Tokens are stored in 8 or 4 bits, as ``x / scale``; scales are float32 arrays, and may be traced.

    Attributes:
        dtype: ``"int8"``, ``"float8_e4m3fn"``, ``"float8_e5m2"`` or ``"int4"``. Integers are rounded half to even, and
            clipped at ±127 and ±7, floats at their largest finite number. int4 needs even head dims and ``width``.
        scales: what has a scale of its own. ``"token_head"``: each token of each kv head, ``max|x| / largest``, which
            is computed when it is appended; a token of zeros has scale 0, and is read as zeros. ``"head"``,
            ``"tensor"``: each kv head, or all tokens; the cache is created with them, and what exceeds them is clipped.

    With given scales NaN is stored as 0, since int8 has no NaN, and products on TPUs take the NaN of 8-bit floats for a
    number. With scales by token and head NaN or infinity in a token makes all that is read of its head NaN.

    A stored token is never quantised again. The error of one element is at most half a step: ``scale / 2`` for
    integers, which with scales by token and head is ``max|x| / 254`` for int8 and ``max|x| / 14`` for int4;
    ``2 ** -4`` and ``2 ** -3`` of its magnitude for e4m3 and e5m2 (and for magnitudes below the least normal number,
    ``2 ** -10`` and ``2 ** -17`` times the scale). A head whose scale would be below ``2 ** -126`` is read as zeros.

    Raises:
        ValueError: an unknown dtype, or unknown scales.
    """

    dtype: str
    scales: str = "token_head"

    def __post_init__(self) -> None:
        with contextlib.suppress(TypeError):  # no dtype at all
            object.__setattr__(self, "dtype", str(jnp.dtype(self.dtype).name))
        if self.dtype not in LARGEST:
            raise ValueError(f"Quantized's dtype={self.dtype!r} must be one of {sorted(LARGEST)}")
        if self.scales not in SCALES:
            raise ValueError(f"Quantized's scales={self.scales!r} must be one of {list(SCALES)}")

    def __str__(self) -> str:
        return f"{self.dtype} by {self.scales}"

    @property
    def stored_dtype(self) -> DType:
        """The dtype of the elements of stored tokens: int8 for int4, see `per_element`."""
        return jnp.dtype(jnp.int8 if self.dtype == "int4" else self.dtype)

    @property
    def per_element(self) -> int:
        """How many features an element stores: 2 for int4, else 1."""
        return 2 if self.dtype == "int4" else 1

    def encode(self, x: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Tokens as they are stored, and their scales.

        Args:
            x: [..., K, n, d].
            scale: [] or [K], float32; None for scales by token and head.

        Returns:
            The stored tokens [..., K, n, d / per_element]; their scales [..., K, n] float32, or ``scale``.
        """
        wide, largest = x.astype(jnp.float32), LARGEST[self.dtype]
        if scale is None:
            scale = jnp.abs(wide).max(-1) / largest
            # A denormal scale would lose bits, and its reciprocal is infinite.
            scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0.0, scale)
        spread = self.spread(scale)
        scaled = jnp.where(spread == 0, 0.0, wide / jnp.where(spread == 0, 1.0, spread))
        scaled = jnp.where(jnp.isnan(scaled), 0.0, jnp.clip(scaled, -largest, largest))
        stored = (jnp.round(scaled) if "int" in self.dtype else scaled).astype(self.stored_dtype)
        if self.per_element == 2:
            low, high = jnp.split(stored, 2, axis=-1)
            stored = (low & 15) | (high << 4)
        return stored, scale

    def decode(self, stored: jax.Array, scale: jax.Array) -> jax.Array:
        """Stored tokens [..., K, n, d / per_element] as float32 [..., K, n, d]."""
        return jnp.concatenate(self.parts(stored), axis=-1).astype(jnp.float32) * self.spread(scale)

    def parts(self, stored: jax.Array) -> tuple[jax.Array, ...]:
        """Stored tokens before they are multiplied by scales: [..., d / per_element] each, features in order.

        int4 has the first half of the features in the lower 4 bits. On a CPU, concatenation is as slow as the products.
        """
        return (stored << 4 >> 4, stored >> 4) if self.per_element == 2 else (stored,)

    def spread(self, scale: jax.Array) -> jax.Array:
        """Scales that broadcast with tokens [..., K, n, d]."""
        if self.scales == "tensor":
            return scale
        return scale[..., :, None, None] if self.scales == "head" else scale[..., None]
