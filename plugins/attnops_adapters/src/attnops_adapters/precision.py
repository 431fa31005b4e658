"""The precision of matrix products, as other frameworks state it."""

from __future__ import annotations

from typing import Any

import jax


def precision_of(given: Any, metadata: jax.lax.Precision | None) -> jax.lax.Precision:
    """The precision of a call: the one given there, else the metadata's, else JAX's default.

    `attnops.OperationMetadata`'s own default is full float32. A framework's None means
    ``jax_default_matmul_precision``, by default `jax.lax.Precision.DEFAULT`: TF32 on some GPUs, bfloat16 on TPUs.

    Raises:
        ValueError: different precisions of both operands, or an algorithm of a matrix product.
    """
    if isinstance(given, tuple):
        first, *others = (precision_of(each, metadata) for each in given)
        if any(other != first for other in others):
            raise ValueError(f"precision={given!r} differs between the operands; give one precision for both")
        return first
    name = "precision"
    if given is None and metadata is None:
        name, given = "jax_default_matmul_precision", jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    elif given is None:
        given = metadata
    if given is None:
        return jax.lax.Precision.DEFAULT
    try:
        return jax.lax.Precision(given)
    except ValueError:
        raise ValueError(
            f"{name}={given!r} must be a jax.lax.Precision or its name; algorithms are not supported"
        ) from None
