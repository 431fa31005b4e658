"""Key/value heads repeated up to the number of query heads.

In grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) and multi-query attention (Shazeer 2019,
arXiv:1911.02150; K = 1) query head ``h`` reads kv head ``h // G`` of the K, where ``G = H // K``. Here each kv head is
copied G times in a row, in G times the memory; a kernel that computes ``h // G`` itself needs no copy.
"""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp


def repeat_kv_heads(k: jax.Array, v: jax.Array, num_reps: int) -> tuple[jax.Array, jax.Array]:
    """Repeat the heads of a key and of its value.

    Args:
        k: ``[B, S, K, D]``, any dtype.
        v: ``[B, S, K, Dv]``, any dtype; Dv may differ from D.
        num_reps: query heads per kv head, ``H // K >= 1``; static.

    Returns:
        ``[B, S, K * num_reps, D]`` and ``[B, S, K * num_reps, Dv]``, dtypes unchanged; k and v themselves for
        ``num_reps == 1``.

    Raises:
        ValueError: k or v is not of rank 4, they differ in B, S or K, or ``num_reps`` is not an integer >= 1.
    """
    _require_rank_4(k, "k", "BSKD")
    _require_rank_4(v, "v", "BSKD")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k of shape {k.shape} and v of shape {v.shape} must agree in all dimensions but the last "
            "([B, S, K, D] and [B, S, K, Dv]); pass the key and the value of the same tokens and heads"
        )
    return _repeat(k, num_reps, 2, "num_reps"), _repeat(v, num_reps, 2, "num_reps")


def repeat_kv_bsnh(x: jax.Array, n_rep: int) -> jax.Array:
    """Repeat each head of ``x [B, S, K, D]`` ``n_rep`` times: ``[B, S, K * n_rep, D]``; head h is x's ``h // n_rep``.

    Dtype unchanged; ``n_rep == 1`` returns x itself, else the result needs ``n_rep`` times x's memory.
    Raises ValueError unless x has rank 4 and ``n_rep`` is a (static) integer >= 1.
    """
    _require_rank_4(x, "x", "BSKD")
    return _repeat(x, n_rep, 2, "n_rep")


def repeat_kv_bnsh(x: jax.Array, n_rep: int) -> jax.Array:
    """Repeat each head of ``x [B, K, S, D]`` ``n_rep`` times: ``[B, K * n_rep, S, D]``; see `repeat_kv_bsnh`."""
    _require_rank_4(x, "x", "BKSD")
    return _repeat(x, n_rep, 1, "n_rep")


def _repeat(x: jax.Array, count: int, axis: int, count_name: str) -> jax.Array:
    try:
        repeats = operator.index(count)
    except TypeError:
        repeats = 0
    if repeats < 1:
        raise ValueError(f"{count_name}={count!r} must be an integer >= 1; it is the number of query heads per kv head")
    return x if repeats == 1 else jnp.repeat(x, repeats, axis=axis)


def _require_rank_4(x: jax.Array, name: str, layout: str) -> None:
    if jnp.ndim(x) != 4:
        raise ValueError(
            f"{name} of shape {jnp.shape(x)} must have rank 4, [{', '.join(layout)}], not {jnp.ndim(x)}; "
            "add the missing dimension, or jax.vmap over a superfluous one"
        )
