"""`equinox.nn.MultiheadAttention` of Equinox, one row by `jax.vmap`; its projections are unit matrices."""
# /// script
# dependencies = ["equinox==0.13.8", "jax==0.12.0.1"]
# ///

import equinox as eqx
import jax
import jax.numpy as jnp

FRAMEWORK, PACKAGE = "jax", "equinox"
LINK = "https://docs.kidger.site/equinox/api/nn/attention/"
CONVENTIONS = {}
REFUSES = {
    "GQA": "no argument for it: as many key heads as query heads",
    "MQA": "no argument for it: as many key heads as query heads",
    "rows that see no key, GQA": "no argument for it: as many key heads as query heads",
}


def attend(q, k, v, *, mask=None, dropout=0.0):
    B, T, H, D = q.shape
    Dv = v.shape[-1]
    layer = eqx.nn.MultiheadAttention(
        H, H * D, H * D, H * Dv, H * Dv, qk_size=D, vo_size=Dv, dropout_p=dropout, dtype=q.dtype, key=jax.random.key(0)
    )
    eyes = tuple(jnp.eye(n, dtype=q.dtype) for n in (H * D, H * D, H * Dv, H * Dv))
    layer = eqx.tree_at(
        lambda x: (x.query_proj.weight, x.key_proj.weight, x.value_proj.weight, x.output_proj.weight), layer, eyes
    )
    q, k, v = (x.reshape(*x.shape[:2], x.shape[2] * x.shape[3]) for x in (q, k, v))
    if mask is not None:
        mask = jnp.broadcast_to(mask, (B, H, T, mask.shape[-1]))
    keys = jax.random.split(jax.random.key(0), B)
    out = jax.vmap(lambda q, k, v, mask, key: layer(q, k, v, mask, key=key), (0, 0, 0, None if mask is None else 0, 0))(
        q, k, v, mask, keys
    )
    return out.reshape(B, T, H, Dv)
