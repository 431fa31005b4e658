"""The codecs of caches in NumPy and float64, written only from their definition."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

Array = np.ndarray[Any, Any]

# By dtype: bits of exponent and mantissa, the exponent's bias, and the largest finite number.
_FLOATS: Final = {"float8_e4m3fn": (4, 3, 7, 448.0), "float8_e5m2": (5, 2, 15, 57344.0)}
# Distance from the midpoint of two stored numbers below which float32 and float64 may round differently.
_MARGIN: Final = 1e-3
_INTEGERS: Final = {"int8": 127, "int4": 7}


@dataclasses.dataclass(frozen=True)
class Codec:
    """How tokens of one head are stored.

    Attributes:
        dtype: "int8", "float8_e4m3fn", "float8_e5m2" or "int4".
        scales: "tensor", "head" or "token_head".
    """

    dtype: str
    scales: str

    @property
    def largest(self) -> float:
        """The largest magnitude that is stored."""
        return float(_INTEGERS.get(self.dtype) or _FLOATS[self.dtype][3])

    def scale(self, x: Array) -> Array:
        """The float32 scale of each token of each head; scales below the smallest normal number are 0.

        Args:
            x: [..., d].
        """
        scale = (np.abs(np.float64(x)).max(-1) / self.largest).astype(np.float32)
        return np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)

    def encode(self, x: Array, scale: Array) -> Array:
        """The nearest stored numbers, as float64; ties round to even.

        Args:
            x: [..., d].
            scale: broadcasts to [...].
        """
        scaled = self._scaled(x, scale)
        grid = _grid(self.dtype)
        upper = np.clip(np.searchsorted(grid, np.abs(scaled)), 1, len(grid) - 1)
        low, high, magnitude = grid[upper - 1], grid[upper], np.abs(scaled)
        # The index of a number in the grid is its bits without the sign, so that even numbers have even bits.
        takes_high = (high - magnitude < magnitude - low) | (
            (high - magnitude == magnitude - low) & (upper % 2 == 0)
        )  # fmt: skip
        return np.sign(scaled) * np.where(takes_high, high, low)

    def stored(self, numbers: Array) -> Array:
        """Numbers of `encode` [..., d] as they are stored: of int4 each byte has number i, and, times 16, i + d / 2."""
        if self.dtype != "int4":
            return numbers
        low, high = np.split(numbers.astype(np.int64), 2, axis=-1)
        return (low % 16 + 16 * (high % 16)).astype(np.uint8).view(np.int8)

    def settled(self, x: Array, scale: Array | None) -> Array:
        """``x``, in which numbers near the midpoint of two stored ones are multiplied by 7/8 until none is near a
        midpoint.

        Args:
            x: [..., d].
            scale: the scale of ``x``; None to compute it from ``x``.
        """
        for _ in range(20):
            magnitude = np.abs(self._scaled(x, self.scale(x) if scale is None else scale))
            grid = _grid(self.dtype)
            middles = (grid[1:] + grid[:-1]) / 2
            nearest = middles[np.clip(np.searchsorted(middles, magnitude), 0, len(middles) - 1)]
            before = middles[np.clip(np.searchsorted(middles, magnitude) - 1, 0, len(middles) - 1)]
            near = np.minimum(np.abs(magnitude - nearest), np.abs(magnitude - before)) < _MARGIN * np.maximum(
                magnitude, grid[1]
            )
            if not near.any():
                break
            x = np.where(near, x * 0.875, x).astype(x.dtype)  # half of it would be near a midpoint again
        return x

    def _scaled(self, x: Array, scale: Array) -> Array:
        divisor = np.asarray(scale, np.float64)[..., None]
        scaled = np.where(divisor == 0, 0.0, np.float64(x) / np.where(divisor == 0, 1.0, divisor))
        return np.clip(scaled, -self.largest, self.largest)


@functools.cache
def _grid(dtype: str) -> Array:
    """The finite numbers of a dtype that are not negative, in order."""
    if dtype in _INTEGERS:
        return np.arange(_INTEGERS[dtype] + 1.0)
    exponents, mantissa, bias, largest = _FLOATS[dtype]
    steps = 2**mantissa
    numbers = [
        (bits % steps) / steps * 2.0 ** (1 - bias)
        if bits < steps
        else (1 + bits % steps / steps) * 2.0 ** (bits // steps - bias)
        for bits in range(2 ** (exponents + mantissa))
    ]
    return np.array([x for x in numbers if x <= largest])


def stored_dtype(codec: Codec | None, dtype: str) -> Any:
    """The dtype of stored tokens; int8 for two int4."""
    return jnp.dtype(dtype if codec is None else codec.dtype.replace("int4", "int8"))
