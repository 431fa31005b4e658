"""The definition of linear attention, token by token: what operations are checked by."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from attnops_linear.masks import bind_mask


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
    is_token, starts = bind_mask(mask, B, T)[1]
    is_token = jnp.ones((B, T), bool) if is_token is None else is_token
    starts = jnp.zeros((B, T), bool) if starts is None else starts
    query, key = (jnp.repeat(x, H // K, axis=2) for x in (query, key))
    query = query * (D**-0.5 if scale is None else scale)
    if decay is None:
        decay = jnp.zeros((B, T, H, 1), dtype)
    elif decay.ndim == 1:
        decay = jnp.broadcast_to(decay[:, None], (B, T, H, 1))
    elif decay.ndim == 3:
        decay = decay[..., None]
    state = jnp.zeros((B, H, D, Dv), dtype) if initial_state is None else initial_state.astype(dtype)

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        is_token, starts, query, key, value, decay, *betas = token
        fresh, kept = starts[:, None, None, None], jnp.exp(decay)[..., None]
        new = jnp.where(fresh, 0, kept * state)
        update = value
        if betas:
            update = betas[0][..., None] * (value - jnp.einsum("bhde,bhd->bhe", new, key))
        new = new + key[..., None] * update[..., None, :]
        output = jnp.einsum("bhde,bhd->bhe", new, query)
        state = jnp.where(is_token[:, None, None, None], new, state)
        return state, jnp.where(is_token[:, None, None], output, 0)

    tokens = [is_token, starts, query, key, value, decay.astype(dtype), *([] if beta is None else [beta.astype(dtype)])]
    last, outputs = lax.scan(step, state, tuple(jnp.moveaxis(x, 1, 0) for x in tokens))
    return jnp.moveaxis(outputs, 0, 1).astype(given), last
