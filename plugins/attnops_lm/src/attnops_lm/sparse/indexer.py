"""DeepSeek's lightning indexer: a small scorer chooses the tokens that attention reads (DeepSeek-V3.2, DSA), causal.

The score of a key for a query is ``sum_j w_j · relu(q_j · k)`` over J small heads that share one key. Attention reads
the top k. The choice has no gradient: the indexer learns from `indexer_loss`, the divergence of its scores' softmax
from the weights of the attention.

    scores = indexer_scores(index_query, index_key, index_weights)
    tokens = top_tokens(scores, top_k=2048)
    out = attention(query, key, value, mask=Causal() & tokens_mask(tokens))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from attnops.masks import Blocks, KeyPadding

if TYPE_CHECKING:
    from attnops import OperationImpl


def indexer_scores(query: jax.Array, key: jax.Array, weights: jax.Array) -> jax.Array:
    """The score of each key for each query, differentiable.

    Args:
        query: [B, T, J, E].
        key: [B, S, E].
        weights: [B, T, J].

    Returns:
        float32 [B, T, S]; the products of one head at a time need the same memory again.
    """

    def add(sums: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        q, w = head
        products = jnp.einsum("bte,bse->bts", q, key, preferred_element_type=jnp.float32)
        return sums + w[..., None] * jax.nn.relu(products), None

    by_head = jnp.moveaxis(query, 2, 0), jnp.moveaxis(weights, 2, 0).astype(jnp.float32)
    return jax.lax.scan(jax.checkpoint(add), jnp.zeros((*query.shape[:2], key.shape[1]), jnp.float32), by_head)[0]


def top_tokens(scores: jax.Array, top_k: int, offset: int | jax.Array | None = None) -> jax.Array:
    """The keys with the highest scores among those that a causal mask shows.

    Args:
        scores: [B, T, S].
        top_k: tokens per query.
        offset: the position of query 0 among the keys, an int or [B, 1, 1]; None for ``S - T``.

    Returns:
        int32 [B, T, min(top_k, S)]; -1 where there are fewer.
    """
    T, S = scores.shape[1:]
    position = jnp.arange(T)[:, None] + (S - T if offset is None else offset)
    scores = jnp.where(jnp.arange(S) <= position, jax.lax.stop_gradient(scores), -jnp.inf)
    best, index = jax.lax.top_k(scores, min(top_k, S))
    return jnp.where(best == -jnp.inf, -1, index).astype(jnp.int32)


def tokens_mask(tokens: jax.Array) -> Blocks:
    """The mask by which queries see the chosen ``tokens`` [B, T, top_k], in all heads: blocks of one token.

    A tile in which no query chose a key is skipped. A bound mask has O(B · T · S) bytes.
    """
    return Blocks(tokens[:, None], 1, 1)


def attend_to_tokens(
    operation: OperationImpl, query: jax.Array, key: jax.Array, value: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Attention of one query per row to its chosen tokens, which are gathered: decoding reads no others.

    Args:
        operation: computes the attention.
        query: [B, 1, H, D].
        key: [B, S, K, D].
        value: [B, S, K, Dv].
        tokens: integers [B, 1, top_k]; -1 for none.

    Returns:
        [B, 1, H, Dv].

    Raises:
        ValueError: several queries per row.
    """
    if query.shape[1] != 1 or tokens.shape[1] != 1:
        raise ValueError(
            f"query has {query.shape[1]} queries a row and tokens {tokens.shape[1]}, but both must have one; for more, "
            f"mask=tokens_mask(tokens)"
        )
    index = jnp.maximum(tokens[:, 0], 0)[:, :, None, None]
    chosen = (jnp.take_along_axis(x, index, axis=1) for x in (key, value))
    out: jax.Array = operation(query, *chosen, mask=KeyPadding(tokens[:, 0] >= 0)).attention_outputs
    return out


def indexer_loss(scores: jax.Array, weights: jax.Array, tokens: jax.Array | None = None) -> jax.Array:
    """The divergence of the softmax of scores from the attention's weights, the mean over queries; float32 [].

    Args:
        scores: [B, T, S], from `indexer_scores`.
        weights: the attention's, [B, H, T, S], without gradient; hidden keys have 0.
        tokens: [B, T, top_k], if the softmax is over the chosen tokens alone, as in sparse training; None: over all
            keys that have a weight, as in the warm-up with dense attention.
    """
    target = jax.lax.stop_gradient(weights).astype(jnp.float32).sum(axis=1)
    if tokens is None:
        seen = target > 0
    else:
        scores, target = (jnp.take_along_axis(x, jnp.maximum(tokens, 0), axis=2) for x in (scores, target))
        seen = tokens >= 0
    target = jnp.where(seen, target, 0)
    target = target / jnp.maximum(target.sum(axis=2, keepdims=True), jnp.finfo(jnp.float32).tiny)
    log_p = jax.nn.log_softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min), axis=2)
    safe = jnp.where(target > 0, target, 1)
    return jnp.where(target > 0, target * (jnp.log(safe) - log_p), 0).sum(axis=2).mean()
