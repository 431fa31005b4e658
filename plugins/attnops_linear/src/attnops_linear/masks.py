"""Masks of a recurrence: which tokens are padding, and which begin with an empty state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.masks import And, KeyPadding, Segments

_RULE = (
    "must be made of Segments and KeyPadding: a recurrence is causal by itself and can hide no single key; leave "
    "Causal out"
)


class Tokens(NamedTuple):
    """What a mask says of tokens.

    Attributes:
        is_token: bool [B, T], False for padding; None without padding.
        starts: bool [B, T], whether the state is reset to 0 before the token; None without segments.
    """

    is_token: jax.Array | None = None
    starts: jax.Array | None = None


def is_known(values: Any) -> bool:
    """Whether the values of an array can be read here, even while tracing."""
    if isinstance(values, jax.Array):
        return not isinstance(values, jax.core.Tracer) and values.is_fully_addressable
    return isinstance(values, np.ndarray | np.generic)


def bind_mask(mask: object, B: int, T: int) -> tuple[frozenset[str], Tokens]:
    """The kinds of a mask, and what it says of the tokens of [B, T].

    A token begins a segment if its id differs from the id of the last token before it that is not padding.

    Raises:
        ValueError: it is anything but None, `Segments`, `KeyPadding`, or several of them joined by ``&``.
    """
    if mask is None:
        return frozenset(), Tokens()
    parts = _parts(mask)
    is_token: jax.Array | None = None
    ids: list[jax.Array] = []
    for part in parts:
        if isinstance(part, KeyPadding):
            kept = jnp.broadcast_to(jnp.asarray(part.bind(B, 1, T, T).is_token), (B, T))
            is_token = kept if is_token is None else is_token & kept
        else:
            bound = part.bind(B, 1, T, T)
            if bound.kv_ids is not bound.q_ids:
                raise ValueError("mask=Segments(q_ids, kv_ids) has two arrays of ids, but a recurrence has one: give "
                                 "Segments(ids)")  # fmt: skip
            ids.append(jnp.broadcast_to(jnp.asarray(bound.q_ids), (B, T)))
    kinds = frozenset(type(part).__name__ for part in parts)
    return kinds, Tokens(is_token, _starts(ids, is_token) if ids and T else None)


def _parts(mask: object) -> list[Segments | KeyPadding]:
    """The operands of a mask's ``&``."""
    if isinstance(mask, And):
        return [*_parts(mask.left), *_parts(mask.right)]
    if not isinstance(mask, Segments | KeyPadding):
        shown = f"an array of shape {tuple(mask.shape)}" if hasattr(mask, "shape") else repr(mask)
        raise ValueError(f"mask is {shown}, but {_RULE}")
    return [mask]


def _starts(ids: list[jax.Array], is_token: jax.Array | None) -> jax.Array:
    """Whether each token's ids differ from those of the token before it; padding is passed over. Bool [B, T]."""
    T = ids[0].shape[1]
    if is_token is None:
        changes = [x[:, 1:] != x[:, :-1] for x in ids]
        return jnp.pad(jnp.any(jnp.stack(changes), axis=0), ((0, 0), (1, 0)))
    index = jnp.where(is_token, jnp.arange(T, dtype=jnp.int32), -1)
    before = jnp.pad(lax.cummax(index, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    earlier = [jnp.take_along_axis(x, jnp.maximum(before, 0), axis=1) for x in ids]
    changed = jnp.any(jnp.stack([x != y for x, y in zip(ids, earlier, strict=True)]), axis=0)
    return is_token & (before >= 0) & changed
