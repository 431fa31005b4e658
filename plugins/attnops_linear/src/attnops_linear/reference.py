"""The definition of linear attention, token by token: what operations are checked by."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attnops.masks import KeyPadding
from attnops_linear.masks import parts_of


def reference(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array | None = None,
    beta: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    mask: object = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, Hv, Dv] in the query's dtype, and the state after each row's last token, [B, Hv, D, Dv].

    It computes in the arguments' dtype, or float32 where that has more bits, which the state has too. In float64 it is
    the oracle of `LinearAttention`, whose arguments it has. Its gradients keep the state of each token.
    """
    (B, T, K, D), (H, Dv), given = query.shape, value.shape[2:], query.dtype
    dtype = jnp.promote_types(jnp.result_type(query, key, value), jnp.float32)
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    is_token, ids = jnp.ones((B, T), bool), jnp.zeros((B, T, 1), jnp.int32)
    for part in [] if mask is None else parts_of(mask):
        bound: Any = part.bind(B, 1, T, T)
        if isinstance(part, KeyPadding):
            is_token = is_token & bound.is_token
        else:
            of_part = jnp.broadcast_to(bound.q_ids, (B, T))
            ids = jnp.concatenate([ids, of_part[..., None].astype(jnp.int32)], axis=-1)
    query, key = (jnp.repeat(x, H // K, axis=2) for x in (query, key))
    query = query * (D**-0.5 if scale is None else scale)
    if decay is None:
        decay = jnp.zeros((B, T, H, 1), dtype)
    elif decay.ndim == 1:
        decay = jnp.broadcast_to(decay[:, None], (B, T, H, 1))
    elif decay.ndim == 3:
        decay = decay[..., None]
    state = jnp.zeros((B, H, D, Dv), dtype) if initial_state is None else initial_state.astype(dtype)

    # The state, the ids of the last token that is not padding, and whether there was one.
    Carry = tuple[jax.Array, jax.Array, jax.Array]

    def step(carry: Carry, token: tuple[jax.Array, ...]) -> tuple[Carry, jax.Array]:
        state, last, was_token = carry
        is_token, ids, query, key, value, decay, *betas = token
        fresh = (was_token & (ids != last).any(axis=-1))[:, None, None, None]
        kept = jnp.exp(decay)[..., None]
        new = jnp.where(fresh, 0, kept * state)
        update = value
        if betas:
            update = betas[0][..., None] * (value - jnp.einsum("bhde,bhd->bhe", new, key))
        new = new + key[..., None] * update[..., None, :]
        output = jnp.einsum("bhde,bhd->bhe", new, query)
        state = jnp.where(is_token[:, None, None, None], new, state)
        carry = state, jnp.where(is_token[:, None], ids, last), was_token | is_token
        return carry, jnp.where(is_token[:, None, None], output, 0)

    tokens = [is_token, ids, query, key, value, decay.astype(dtype), *([] if beta is None else [beta.astype(dtype)])]
    before = state, jnp.zeros((B, ids.shape[2]), jnp.int32), jnp.zeros(B, bool)
    (state, _, _), outputs = lax.scan(step, before, tuple(jnp.moveaxis(x, 1, 0) for x in tokens))
    return jnp.moveaxis(outputs, 0, 1).astype(given), state
