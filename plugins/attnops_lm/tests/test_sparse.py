"""How models choose: values and gradients against implementations with arrays of all scores, and what is chosen."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops_lm.sparse.blocks import moba, nsa, pooled, top_blocks
from attnops_lm.sparse.indexer import attend_to_tokens, indexer_loss, indexer_scores, tokens_mask, top_tokens

B, T, H, K, D = 2, 44, 4, 2, 16
FLASH, VANILLA = (OperationRegistry.create(name, OperationMetadata(platform="cpu")) for name in ("flash", "vanilla"))


def draw(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def qkv() -> tuple[Any, ...]:
    return draw(0, B, T, H, D), draw(1, B, T, K, D), draw(2, B, T, K, D)


def means(x: Any, block: int) -> Any:
    return np.stack([x[:, i : i + block].mean(axis=1) for i in range(0, T, block)], axis=1)


def plain(query: jax.Array, key: jax.Array, value: jax.Array, seen: Any) -> jax.Array:
    """Attention with an array of all scores; ``seen`` [B, H, T, S]. A query that sees no key gives 0."""
    key, value = (jnp.repeat(x, H // K, axis=2) for x in (key, value))
    s = jnp.where(seen, jnp.einsum("bthd,bshd->bhts", query, key) * D**-0.5, -jnp.inf)
    weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen.any(-1, keepdims=True), s, 0)), 0)
    return jnp.einsum("bhts,bshd->bthd", weights, value)


def chosen_by_loops(scores: Any, top_k: int, q_block: int, block: int, always: int = 0) -> np.ndarray[Any, Any]:
    """Which keys each query sees, [B, H, T, T], of the blocks of the highest scores [B, K, nq, nk]."""
    seen = np.zeros((B, H, T, T), bool)
    for b, h, i in np.ndindex(B, H, T):
        row, own = scores[b, h * K // H, i // q_block], i // block
        first = [own, *(j for j in range(always) if j < own)]
        rest = sorted((j for j in range(own) if j not in first), key=lambda j: -row[j])
        for j in [*first, *rest][:top_k]:
            seen[b, h, i, j * block : min((j + 1) * block, i + 1)] = True
    return seen


def agree(function: Callable[..., jax.Array], expected: Callable[..., jax.Array], *arguments: jax.Array) -> None:
    """Values and the gradients of all arguments agree."""
    d = draw(9, B, T, H, D)
    every = tuple(range(len(arguments)))

    def both(f: Callable[..., jax.Array], *x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = f(*x)
        return (out * d).sum(), out

    results = [
        jax.jit(jax.value_and_grad(functools.partial(both, f), every, has_aux=True))(*arguments)
        for f in (function, expected)
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), *results)


def test_the_mean_of_a_short_last_block_is_that_of_its_tokens() -> None:
    x = np.arange(10.0).reshape(1, 10, 1, 1)
    np.testing.assert_allclose(np.ravel(jax.jit(pooled, static_argnums=1)(x, 4)), [1.5, 5.5, 8.5])


def test_the_own_block_is_chosen_and_none_after_it() -> None:
    scores = np.array([[[[9.0, 1, 2, 3]] * 4]])
    chosen = jax.jit(lambda x: top_blocks(x, 2, 4, 4))(scores)
    assert np.asarray(chosen)[0, 0].tolist() == [[0, -1], [1, 0], [2, 0], [3, 0]]


@pytest.mark.parametrize("q_block", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_moba_agrees_with_plain_attention(q_block: int) -> None:
    query, key, value = qkv()
    queries = means(query, q_block).reshape(B, -1, K, H // K, D).sum(3)
    scores = np.einsum("bqkd,bskd->bkqs", queries, means(key, 8))
    seen = chosen_by_loops(scores, 3, q_block, 8)
    function = functools.partial(moba, FLASH, block=8, top_k=3, q_block=q_block)
    agree(function, lambda *x: plain(*x, seen), query, key, value)


@pytest.mark.slow
def test_nsa_agrees_with_three_plain_branches() -> None:
    block, window = 8, 6
    query, key, value = qkv()
    gates = np.abs(draw(3, B, T, H, 3))
    i, j = np.arange(T)[:, None], np.arange(T)
    complete = np.broadcast_to((np.arange(-(-T // block)) + 1) * block - 1 <= i, (B, H, T, -(-T // block)))
    by_head = np.einsum("bthd,bshd->bhts", query, np.repeat(means(key, block), H // K, axis=2)) * D**-0.5
    exponentials = np.where(complete, np.exp(by_head), 0)
    weights = exponentials / np.maximum(exponentials.sum(-1, keepdims=True), 1e-30)
    chosen = chosen_by_loops(weights.reshape(B, K, H // K, T, -1).sum(2), 3, 1, block, always=1)
    local = np.broadcast_to((j <= i) & (j > i - window), (B, H, T, T))

    def expected(query: jax.Array, key: jax.Array, value: jax.Array, gates: jax.Array) -> jax.Array:
        keys, values = pooled(key, block), pooled(value, block)
        branches = (
            plain(query, keys, values, complete),
            plain(query, key, value, chosen),
            plain(query, key, value, local),
        )
        return sum(gates[..., i, None] * x for i, x in enumerate(branches))  # type: ignore[return-value]

    agree(functools.partial(nsa, FLASH, block=block, top_k=3, window=window), expected, query, key, value, gates)


def test_the_indexer_chooses_the_tokens_of_the_highest_scores() -> None:
    q, k, w = draw(4, B, T, 3, 8), draw(5, B, T, 8), draw(6, B, T, 3)
    scores, tokens = map(np.asarray, jax.jit(lambda *x: ((y := indexer_scores(*x)), top_tokens(y, 5)))(q, k, w))
    wanted = (np.maximum(np.einsum("btje,bse->btjs", q, k), 0) * np.asarray(w)[..., None]).sum(2)
    np.testing.assert_allclose(scores, wanted, rtol=1e-4, atol=1e-4)
    for b, i in np.ndindex(B, T):
        best = sorted(range(i + 1), key=lambda j: -float(scores[b, i, j]))[:5]
        assert [t for t in tokens[b, i].tolist() if t >= 0] == best


def test_attention_to_chosen_tokens_agrees_as_a_mask_and_as_a_gather() -> None:
    query, key, value = qkv()
    tokens = np.asarray(jax.jit(top_tokens, static_argnums=1)(draw(7, B, T, T), 5))
    seen = np.zeros((B, T, T + 1), bool)
    np.put_along_axis(seen, np.asarray(tokens), True, axis=2)  # -1 is the last, which is dropped
    seen = np.broadcast_to(seen[:, None, :, :T], (B, H, T, T))
    agree(
        lambda *x: FLASH(*x, mask=tokens_mask(tokens)).attention_outputs, lambda *x: plain(*x, seen), query, key, value
    )

    @jax.jit
    def gathered(query: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attend_to_tokens(FLASH, query[:, -1:], key, value, tokens[:, -1:])
        return out, plain(query, key, value, seen)[:, -1:]

    np.testing.assert_allclose(*gathered(query), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("top_k", [pytest.param(None, marks=pytest.mark.slow), 5])
def test_the_loss_is_the_divergence_from_the_weights_and_its_gradient_their_difference(top_k: int | None) -> None:
    scores, causal = draw(8, B, T, T), np.tril(np.ones((T, T), bool))
    logits = np.where(causal, draw(10, B, H, T, T), -np.inf)
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    tokens = None if top_k is None else np.asarray(jax.jit(top_tokens, static_argnums=1)(scores, top_k))
    seen = np.broadcast_to(causal, (B, T, T)).copy()
    if tokens is not None:
        seen = np.zeros((B, T, T + 1), bool)
        np.put_along_axis(seen, np.asarray(tokens), True, axis=2)
        seen = seen[..., :T]
    p = np.where(seen, np.asarray(weights).sum(1), 0)
    p /= p.sum(-1, keepdims=True)
    e = np.where(seen, np.exp(np.asarray(scores)), 0)
    softmax = e / e.sum(-1, keepdims=True)
    loss, gradient = jax.jit(jax.value_and_grad(indexer_loss))(scores, weights, tokens)
    wanted = np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / np.where(p > 0, softmax, 1)), 0).sum(-1).mean()
    np.testing.assert_allclose(loss, wanted, rtol=1e-4)
    np.testing.assert_allclose(gradient, (softmax - p) / (B * T), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k: moba(FLASH, q, k, k, block=4, top_k=2, q_block=3), "q_block=3 must divide kv_block=4"),
        (lambda q, k: moba(FLASH, q, k, k, block=4, top_k=0), "top_k=0 must be above always=0"),
        (lambda q, k: moba(FLASH, q[:, 1:], k, k, block=4, top_k=2), f"query has {T - 1} tokens and key {T}"),
        (
            lambda q, k: nsa(FLASH, q, k, k, jnp.zeros((B, T, H, 3)), block=4, top_k=1, window=4),
            "top_k=1 must be above always=1",
        ),
        (
            lambda q, k: attend_to_tokens(FLASH, q[:, :2], k, k, jnp.zeros((B, 2, 3), jnp.int32)),
            "query has 2 queries a row and tokens 2, but both must have one",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[..., jax.Array], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, *qkv()[:2])
