"""`keras.layers.GroupQueryAttention` of Keras, with JAX as its backend; its projections are unit matrices."""
# /// script
# dependencies = ["keras==3.15.1", "jax==0.12.0.1"]
# ///

import jax.numpy as jnp
import keras

FRAMEWORK, PACKAGE = "jax", "keras"
LINK = "https://keras.io/api/layers/attention_layers/group_query_attention/"
CONVENTIONS = {}
REFUSES = {
    "value head_dim ≠ head_dim": "no argument for it: GroupQueryAttention has one head_dim",
    "dropout": "it is not probed: the layer draws its random numbers from a state",
}
LAYERS = {}


def attend(q, k, v, *, causal=False, mask=None):
    B, T, H, D = q.shape
    K, dtype = k.shape[2], str(q.dtype)
    if (H, K, D, dtype) not in LAYERS:
        layer = keras.layers.GroupQueryAttention(D, H, K, use_bias=False, dtype=dtype)
        layer.build((B, T, H * D), (B, k.shape[1], K * D), (B, k.shape[1], K * D))
        shapes = [(H * D, H, D), (K * D, K, D), (K * D, K, D), (H, D, H * D)]
        weights = [jnp.eye(H * D if i in (0, 3) else K * D).reshape(shape) for i, shape in enumerate(shapes)]
        for variable, weight in zip(layer.weights, weights, strict=True):
            variable.assign(weight)
        LAYERS[H, K, D, dtype] = layer
    flat = (x.reshape(*x.shape[:2], -1) for x in (q, v, k))
    if mask is not None:
        mask = jnp.broadcast_to(mask, (B, *mask.shape[1:]))
        if mask.shape[1] == 1:  # documented as [B, T, S]
            mask = jnp.broadcast_to(mask[:, 0], (B, T, k.shape[1])) if mask.shape[2] == 1 else mask[:, 0]
    query, value, key = flat
    out = LAYERS[H, K, D, dtype](query, value, key, attention_mask=mask, use_causal_mask=causal)
    return out.reshape(B, T, H, D)
