"""The inverse of I + A for strictly lower triangular A, by blocked forward substitution."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def inverse(strict: jax.Array) -> jax.Array:
    """(I + A)⁻¹ of A [..., C, C], strictly lower triangular, float32; C is a power of two.

    Its derivatives have the precision of products that is in force at this call, whenever JAX traces them.
    """
    return _inverse(strict, jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _inverse(strict: jax.Array, precision: str | None) -> jax.Array:
    """See `inverse`.

    The inverses of two neighbours on the diagonal, and the block below the first, give the inverse of the block twice
    as large: from 1 by 1 to C by C.
    """
    C = strict.shape[-1]
    inverses = jnp.ones((*strict.shape[:-2], C, 1, 1), strict.dtype)
    while (size := inverses.shape[-1]) < C:
        pairs = strict.reshape(*strict.shape[:-2], C // (2 * size), 2, size, C // (2 * size), 2, size)
        below = jnp.diagonal(pairs[..., 1, :, :, 0, :], axis1=-4, axis2=-2)  # [..., size, size, pairs]
        below = jnp.moveaxis(below, -1, -3)
        first, second = inverses[..., 0::2, :, :], inverses[..., 1::2, :, :]
        corner = -_product(second, _product(below, first))
        inverses = jnp.concatenate(
            [
                jnp.concatenate([first, jnp.zeros_like(first)], axis=-1),
                jnp.concatenate([corner, second], axis=-1),
            ],
            axis=-2,
        )
    return inverses[..., 0, :, :]


@_inverse.defjvp
def _tangent(
    precision: str | None, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (strict,), (change,) = primals, tangents
    with jax.default_matmul_precision(precision):
        found = _inverse(strict, precision)
        return found, -(found @ jnp.tril(change, -1) @ found)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The matrix product, of matrices that may be too small for a call each."""
    if a.shape[-1] < 16:
        return (a[..., :, :, None] * b[..., None, :, :]).sum(axis=-2)
    return a @ b
