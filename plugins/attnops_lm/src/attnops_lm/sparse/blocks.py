"""Blocks of keys chosen by pooled keys: MoBA and NSA, causal.

MoBA (Lu et al. 2025, arXiv:2502.13189) scores a block by the product of the query and the mean of the block's keys, and
attends to the top k, its own block among them. NSA (Yuan et al. 2025, arXiv:2502.11089) adds two branches, attention to
the pooled blocks and to a window, and weights the three by gates. The choice has no gradient in either; here the query
heads of a kv head share it, so that each block is loaded once for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from attnops.masks import Blocks, Causal, SlidingWindow

if TYPE_CHECKING:
    from attnops import OperationImpl


def pooled(x: jax.Array, block: int) -> jax.Array:
    """The means of blocks of ``x`` [B, S, K, D]: [B, ceil(S / block), K, D] in its dtype; O(S) work."""
    B, S, K, D = x.shape
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -S % block), (0, 0), (0, 0)))
    sums = padded.reshape(B, -1, block, K, D).sum(axis=2)
    size = np.minimum(block, S - block * np.arange(sums.shape[1]))
    return (sums / size[:, None, None]).astype(x.dtype)


def top_blocks(scores: jax.Array, top_k: int, q_block: int, kv_block: int, always: int = 0) -> jax.Array:
    """The blocks of keys that each block of queries attends to.

    Args:
        scores: the score of each block of keys for each block of queries, [B, n, nq, nk].
        top_k: blocks to choose, the query's own and the ``always`` ones included.
        q_block: queries per block, a divisor of ``kv_block``; their own block of keys is the one that contains them.
        kv_block: keys per block.
        always: how many of the first blocks are always chosen.

    Returns:
        int32 [B, n, nq, min(top_k, nk)]: the queries' own block and the best before it; -1 where there are fewer.

    Raises:
        ValueError: ``q_block`` does not divide ``kv_block``, or ``top_k`` is not above ``always``.
    """
    if kv_block % q_block:
        raise ValueError(f"q_block={q_block} must divide kv_block={kv_block}, so that queries share their own block")
    if top_k <= always:
        raise ValueError(f"top_k={top_k} must be above always={always}: the query's own block is one of the top k")
    own = (q_block * jnp.arange(scores.shape[2])[:, None]) // kv_block
    block = jnp.arange(scores.shape[3])
    scores = jnp.where((block == own) | (block < always), jnp.inf, scores.astype(jnp.float32))
    best, index = jax.lax.top_k(jnp.where(block <= own, scores, -jnp.inf), min(top_k, scores.shape[3]))
    return jnp.where(best == -jnp.inf, -1, index).astype(jnp.int32)


def moba(
    operation: OperationImpl, query: jax.Array, key: jax.Array, value: jax.Array, *, block: int, top_k: int,
    q_block: int = 1,
) -> jax.Array:  # fmt: skip
    """Causal attention to the ``top_k`` best blocks of keys, the query's own among them.

    Args:
        operation: computes the attention.
        query: [B, T, H, D].
        key: [B, T, K, D].
        value: [B, T, K, Dv].
        block: keys per block.
        top_k: blocks per query.
        q_block: consecutive queries that share a choice, a divisor of ``block``: a kernel skips whole tiles of queries.
            Above 1 the choice of a query depends on later ones too, so that decoding a token at a time differs.

    Returns:
        [B, T, H, Dv]. Differentiable; the choice has no gradient. The scores of blocks are O(T / q_block · T / block).

    Raises:
        ValueError: lengths that differ, ``q_block`` does not divide ``block``, or ``top_k`` is below 1.
    """
    _check_lengths(query, key)
    B, _, H, D = query.shape
    K, keys = key.shape[2], pooled(key, block)
    queries = pooled(query, q_block).reshape(B, -1, K, H // K, D).sum(axis=3)
    scores = jnp.einsum("bqkd,bskd->bkqs", queries, keys, preferred_element_type=jnp.float32)
    chosen = top_blocks(jax.lax.stop_gradient(scores), top_k, q_block, block)
    out: jax.Array = operation(query, key, value, mask=Causal() & Blocks(chosen, q_block, block)).attention_outputs
    return out


def nsa(
    operation: OperationImpl, query: jax.Array, key: jax.Array, value: jax.Array, gates: jax.Array, *, block: int,
    top_k: int, window: int,
) -> jax.Array:  # fmt: skip
    """The three branches of NSA, each times its gate; blocks are pooled by their means.

    Args:
        operation: computes the attention of each branch.
        query: [B, T, H, D].
        key: [B, T, K, D].
        value: [B, T, K, Dv].
        gates: [B, T, H, 3], for the pooled blocks, the chosen blocks and the window, such as the sigmoid of a product
            with the layer's input.
        block: keys per block.
        top_k: blocks per query, its own and the first one included.
        window: keys of the window, the query's own included.

    Returns:
        [B, T, H, Dv]. Differentiable; the choice has no gradient. The weights of blocks are O(H · T · T / block).

    Raises:
        ValueError: lengths that differ, or ``top_k`` below 2.
    """
    _check_lengths(query, key)
    B, T, H, D = query.shape
    K, (keys, values) = key.shape[2], (pooled(x, block) for x in (key, value))
    # A pooled block is seen from its last key on.
    complete = Causal().at(np.arange(T), block * np.arange(1, keys.shape[1] + 1) - 1)
    of_pooled = operation(query, keys, values, mask=complete)
    scores = jnp.einsum(
        "btkgd,bskd->bkgts", query.reshape(B, T, K, -1, D), keys, preferred_element_type=jnp.float32
    ) * (D**-0.5)  # fmt: skip
    seen = complete.dense(B, H, T, keys.shape[1])[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min), axis=-1).sum(axis=2)
    chosen = top_blocks(jax.lax.stop_gradient(weights), top_k, 1, block, always=1)
    of_chosen = operation(query, key, value, mask=Causal() & Blocks(chosen, 1, block))
    of_window = operation(query, key, value, mask=SlidingWindow(window - 1, 0))
    branches = [x.attention_outputs for x in (of_pooled, of_chosen, of_window)]
    return sum(gates[..., i, None].astype(x.dtype) * x for i, x in enumerate(branches))  # type: ignore[return-value]


def _check_lengths(query: jax.Array, key: jax.Array) -> None:
    if query.shape[1] != key.shape[1]:
        raise ValueError(f"query has {query.shape[1]} tokens and key {key.shape[1]}, but they must be the same tokens")
