"""The layout "THD": the rows of a problem as documents one after the other, and its results as rows again.

After the documents there is padding, which holds NaN: a result of it that is not 0 (of a logsumexp: −inf) changes the
results of every row, and so does a weight between two documents.
"""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.biases import Bias
from attnops.masks import (
    And,
    Causal,
    Chunked,
    Dense,
    Full,
    KeyPadding,
    Mask,
    Not,
    Or,
    PrefixLM,
    Segments,
    SlidingWindow,
)

# Tokens of padding after T queries; keys have one less where S is not T.
PADDING: Final = 3


def padding(T: int, S: int) -> tuple[int, int]:
    """How many queries, and keys, are padding."""
    return PADDING, PADDING - (T != S)


def tokens(x: jax.Array, pad: int) -> jax.Array:
    """[B, length, heads, D] as [B · length + pad, heads, D]."""
    flat = x.reshape(-1, *x.shape[2:])
    return jnp.concatenate([flat, jnp.full((pad, *flat.shape[1:]), jnp.nan, x.dtype)])


def options(given: dict[str, Any], shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """The options of the call on all tokens, from those of the call on rows; ``shape`` is (B, H, T, S)."""
    B, _, T, S = shape
    ends = {"cu_seqlens": np.arange(B + 1) * T}
    if T != S:
        ends = {"cu_seqlens_q": ends["cu_seqlens"], "cu_seqlens_k": np.arange(B + 1) * S}
    changed = given | ends
    mask, bias = given.get("mask"), given.get("bias")
    if mask is not None:
        dense = mask.dense(*shape) if isinstance(mask, Mask) else mask
        placed = _by_token(mask, shape)
        changed["mask"] = Dense(_blocks(jnp.asarray(dense), shape)) if placed is None else placed
    if bias is not None and not isinstance(bias, Bias):
        changed["bias"] = _blocks(bias, shape)
    return changed


def outputs(results: dict[str, jax.Array], shape: tuple[int, int, int, int]) -> dict[str, jax.Array]:
    """Results by row, in the layout "BTHD", from those of all tokens; ``shape`` is (B, H, T, S)."""
    B, H, T, S = shape
    out = results["attention_outputs"]
    out, pad = out[: B * T], out[B * T :]
    rows = {"attention_outputs": out.reshape(B, T, H, -1) + pad.sum()}
    for name in results.keys() & {"logsumexp", "max_logits"}:
        x = results[name]
        right = (x[:, B * T :] == -jnp.inf).all()
        rows[name] = jnp.where(right, x[:, : B * T].reshape(H, B, T).swapaxes(0, 1), jnp.nan)
    if "attention_weights" in results:
        weights = results["attention_weights"]
        inside = weights[:, : B * T, : B * S].reshape(H, B, T, B, S)
        same = jnp.eye(B, dtype=bool)[:, None, :, None]
        others = jnp.where(same, 0, inside).sum() + weights[:, B * T :].sum() + weights[:, :, B * S :].sum()
        rows["attention_weights"] = jnp.where(same, inside, 0).sum(axis=3).swapaxes(0, 1) + others
    return rows


def kept(keep: np.ndarray[Any, Any], shape: tuple[int, int, int, int]) -> np.ndarray[Any, Any]:
    """What dropout keeps, by row [B, H, T, S], from [1, H, tokens, tokens]."""
    B, H, T, S = shape
    inside = keep[0, :, : B * T, : B * S].reshape(H, B, T, B, S)
    return np.stack([inside[:, b, :, b] for b in range(B)])


def tokens_of(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """(1, H, tokens, tokens), the shape of the call's scores."""
    B, H, T, S = shape
    more = padding(T, S)
    return 1, H, B * T + more[0], B * S + more[1]


def _blocks(x: jax.Array, shape: tuple[int, int, int, int]) -> jax.Array:
    """An array that broadcasts to [B, H, T, S] as [1, H or 1, tokens, tokens].

    Between documents, and in padding, a mask is True, so that only ``cu_seqlens`` hides tokens; a bias is 0.
    """
    B, _, T, S = shape
    heads, (q, kv) = x.shape[1], padding(T, S)
    full = jnp.broadcast_to(x, (B, heads, T, S)).swapaxes(0, 1)[:, :, :, None]  # [H, B, T, 1, S]
    others = jnp.asarray(x.dtype == bool, x.dtype)
    blocks = jnp.where(jnp.eye(B, dtype=bool)[:, None, :, None], full, others)
    flat = blocks.reshape(heads, B * T, B * S)
    return jnp.pad(flat, ((0, 0), (0, q), (0, kv)), constant_values=others)[None]


def _by_token(mask: Any, shape: tuple[int, int, int, int]) -> Mask | None:
    """The same expression, its arrays of tokens for all tokens; None for masks that vary by row in another way."""
    B, _, T, S = shape
    pads = padding(T, S)

    def flat(x: Any, length: int, pad: int) -> Any:
        full = jnp.broadcast_to(x, (B, length)).reshape(-1)
        return jnp.pad(full, (0, pad), constant_values=1)  # seen, unless it is padding

    match mask:
        case And() | Or():
            left, right = _by_token(mask.left, shape), _by_token(mask.right, shape)
            return None if left is None or right is None else type(mask)(left, right)
        case Not():
            inner = _by_token(mask.mask, shape)
            return None if inner is None else Not(inner)
        case Segments():
            kv_ids = mask.q_ids if mask.kv_ids is None else mask.kv_ids
            return Segments(flat(mask.q_ids, T, pads[0]), flat(kv_ids, S, pads[1]))
        case KeyPadding():
            return KeyPadding(flat(mask.is_token, S, pads[1]))
        case Full() | Causal() | SlidingWindow() | Chunked() | PrefixLM():
            is_number = mask.offset is None or np.shape(mask.offset) == () if hasattr(mask, "offset") else True
            varies = any(np.ndim(x) == 2 and np.shape(x)[0] > 1 for x in jax.tree.leaves(mask))
            return mask if is_number and not varies else None
        case _:
            return None
