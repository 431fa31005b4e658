"""The tolerance rule: an implementation may be twice as wrong as the plain computation in the input's dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

# The allowed error, as a multiple of the error of the same computation in the inputs' dtype.
OUTPUT_FACTOR: Final = 2
GRADIENT_FACTOR: Final = 3


def tolerance(exact: ArrayLike, same_dtype: ArrayLike, magnitude: ArrayLike, dtype: DTypeLike, factor: float) -> float:
    """``factor · max|same_dtype − exact| + 2 ulp``, where an ulp is eps times the largest magnitude.

    Args:
        exact: the oracle's result in float64.
        same_dtype: the oracle's result in ``dtype``.
        magnitude: the result computed with absolute values; rounding errors are relative to it.
        dtype: the dtype of the inputs.
        factor: `OUTPUT_FACTOR` or `GRADIENT_FACTOR`.

    Raises:
        ValueError: ``same_dtype`` overflowed, so that the rule gives no limit.
    """
    finite = np.isfinite(exact)
    error = np.abs(np.where(finite, np.asarray(same_dtype, np.float64) - np.where(finite, exact, 0), 0))
    allowed = float(factor * error.max(initial=0) + 2 * float(jnp.finfo(dtype).eps) * np.abs(magnitude).max(initial=0))
    if not np.isfinite(allowed):  # every comparison with NaN or infinity would pass
        raise ValueError(f"the computation in {jnp.dtype(dtype).name} overflows; draw smaller inputs")
    return allowed


def assert_close(name: str, actual: ArrayLike, exact: ArrayLike, allowed: float) -> None:
    """Assert that ``actual`` lies within ``allowed`` of ``exact``, and is −inf exactly where ``exact`` is.

    Raises:
        AssertionError: an element differs more; the text has the worst element's index, both values and the limit.
    """
    actual = np.asarray(actual).astype(np.float64)
    exact = np.asarray(exact, np.float64)
    assert actual.shape == exact.shape, f"{name} has shape {actual.shape}, but must have {exact.shape}"
    with np.errstate(invalid="ignore"):
        difference = np.where(actual == exact, 0, np.abs(actual - exact))
    difference = np.where(np.isnan(difference), np.inf, difference)
    if difference.size and difference.max() > allowed:
        place = tuple(int(i) for i in np.unravel_index(difference.argmax(), difference.shape))
        raise AssertionError(
            f"{name}{list(place)} is {actual[place]:.8g}, but must be {exact[place]:.8g} within {allowed:.3g}; "
            f"{int((difference > allowed).sum())} of {difference.size} elements are off"
        )
