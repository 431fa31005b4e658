# /// script
# dependencies = ["jax==0.12.0.1"]
# ///
# shows: jax_nn: rows of −inf bias
# The documentation: "For an additive mask, users should pass it to `bias`"; nothing of a row that is −inf throughout.
# Query 0 sees no key and its output is not used. Expected: the gradient of query 1 alone; got: NaN, as 0 · NaN is.
import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(1, 2, 1, 4)).astype(np.float32) for _ in range(3))
bias = jnp.array([[-jnp.inf, -jnp.inf], [0.0, 0.0]])[None, None]


def loss(k):
    return jax.nn.dot_product_attention(q, k, v, bias=bias)[:, 1].sum()


got = np.asarray(jax.grad(loss)(jnp.asarray(k)))[0, :, 0]
s = np.float64(q[0, 1, 0]) @ np.float64(k[0, :, 0]).T / 2
p = np.exp(s) / np.exp(s).sum()
d_p = np.float64(v[0, :, 0]).sum(-1)
expected = (p * (d_p - p @ d_p))[:, None] * np.float64(q[0, 1, 0]) / 2
print("got", got)
print("expected", expected)
