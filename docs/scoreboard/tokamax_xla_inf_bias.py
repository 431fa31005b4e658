# /// script
# requires-python = ">=3.12"
# dependencies = ["tokamax==0.0.17", "jax==0.12.0.1"]
# ///
# shows: tokamax_xla: rows of −inf bias
# The documentation: "See `jax.nn.dot_product_attention` for more details"; nothing of a row that is −inf throughout.
# Query 0 sees no key and its output is not used. Expected: the gradient of query 1 alone; got: NaN, as 0 · NaN is.
import jax
import jax.numpy as jnp
import numpy as np
import tokamax

rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.normal(size=(1, 2, 1, 4)), jnp.float32) for _ in range(3))
bias = jnp.array([[-jnp.inf, -jnp.inf], [0.0, 0.0]])[None, None]


def loss(k):
    return tokamax.dot_product_attention(q, k, v, bias=bias, implementation="xla")[:, 1].sum()


got = np.asarray(jax.grad(loss)(k))[0, :, 0]
s = np.float64(q[0, 1, 0]) @ np.float64(k[0, :, 0]).T / 2
p = np.exp(s) / np.exp(s).sum()
d_p = np.float64(v[0, :, 0]).sum(-1)
expected = (p * (d_p - p @ d_p))[:, None] * np.float64(q[0, 1, 0]) / 2
print("got", got)
print("expected", expected)
