"""`flax.linen.dot_product_attention` of Flax."""
# /// script
# dependencies = ["flax==0.12.12", "jax==0.12.0.1"]
# ///

import jax
from flax import linen

FRAMEWORK, PACKAGE = "jax", "flax"
LINK = "https://flax-linen.readthedocs.io/en/latest/api_reference/flax.linen/layers.html"
CONVENTIONS = {}


def attend(q, k, v, *, mask=None, bias=None, dropout=0.0):
    return linen.dot_product_attention(q, k, v, bias, mask, dropout_rate=dropout, dropout_rng=jax.random.key(0))
