"""`flax.nnx.dot_product_attention` of Flax."""
# /// script
# dependencies = ["flax==0.12.12", "jax==0.12.0.1"]
# ///

import jax
from flax import nnx

FRAMEWORK, PACKAGE = "jax", "flax"
LINK = "https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/nn/attention.html"
CONVENTIONS = {}


def attend(q, k, v, *, causal=False, mask=None, bias=None, dropout=0.0):
    return nnx.dot_product_attention(
        q, k, v, bias, mask, is_causal=causal, dropout_rate=dropout, dropout_rng=jax.random.key(0)
    )
