# /// script
# dependencies = ["flax==0.12.12", "jax==0.12.0.1"]
# ///
# shows: flax_linen: rows of −inf bias
# The documentation: a bias can be used "for incorporating causal masks, padding masks"; nothing of a row of −inf.
# Query 0 sees no key and its output is not used. Expected: the gradient of query 1 alone; got: NaN, as 0 · NaN is.
import jax
import jax.numpy as jnp
from flax import linen

q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 1, 4))
bias = jnp.array([[-jnp.inf, -jnp.inf], [0.0, 0.0]])[None, None]


def loss(k, q, bias):
    return linen.dot_product_attention(q, k, v, bias)[:, -1].sum()


got = jax.grad(loss)(k, q, bias)
expected = jax.grad(loss)(k, q[:, 1:], bias[:, :, 1:])
print("got", got)
print("expected", expected)
