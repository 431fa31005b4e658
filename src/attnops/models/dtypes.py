"""The dtype of a computation, from its arguments or from an explicit choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attnops.typing import Leaf


def canonicalize_dtype(*args: Leaf, dtype: DTypeLike | None = None, inexact: bool = True) -> DTypeLike:
    """The dtype that ``args`` should be cast to: ``dtype`` if given, else their common promoted dtype.

    Only dtypes are read: nothing is computed, copied or moved to a device. Promotion is JAX's own
    (``jnp.result_type``), so Python scalars are weak and 64-bit dtypes become 32-bit ones unless x64 is enabled.

    Args:
        *args: arrays, tracers, ``jax.ShapeDtypeStruct``, scalars or nested sequences of them; None is ignored.
        dtype: if given, returned unmodified.
        inexact: whether the result must be floating or complex. An inferred integer or boolean dtype then becomes
            float32; an explicit one raises.

    Raises:
        ValueError: ``inexact`` and ``dtype`` is integer or boolean; or dtype and every arg is None.
    """
    if dtype is None:
        # A sequence stands for the array that it would become.
        given = [jax.eval_shape(jnp.asarray, x) if isinstance(x, (list, tuple)) else x for x in args if x is not None]
        if not given:
            raise ValueError(
                f"dtype=None and none of the {len(args)} args is an array, so that no dtype can be inferred; "
                "pass dtype or at least one array"
            )
        inferred = jnp.result_type(*given)
        return jnp.dtype("float32") if inexact and not jnp.issubdtype(inferred, jnp.inexact) else inferred
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"Dtype must be inexact: {jnp.dtype(dtype).name} is neither floating nor complex; "
            "pass a dtype such as float32 or bfloat16, or inexact=False"
        )
    return dtype
