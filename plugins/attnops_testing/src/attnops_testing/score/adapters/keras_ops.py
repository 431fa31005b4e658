"""`keras.ops.dot_product_attention` of Keras, with JAX as its backend."""
# /// script
# dependencies = ["keras==3.15.1", "jax==0.12.0.1"]
# ///

import keras

FRAMEWORK, PACKAGE = "jax", "keras"
LINK = "https://keras.io/api/ops/nn/#dot_product_attention-function"
CONVENTIONS = {}


def attend(q, k, v, *, causal=False, mask=None, bias=None, scale=None, soft_cap=None):
    return keras.ops.dot_product_attention(
        q, k, v, bias=bias, mask=mask, scale=scale, is_causal=causal, attn_logits_soft_cap=soft_cap
    )
