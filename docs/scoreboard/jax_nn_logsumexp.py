# /// script
# dependencies = ["jax==0.12.0.1"]
# ///
# shows: jax_nn: logsumexp
# The documentation: "return_residual: Whether to return the logsumexp tensor of shape BTN … to users"; nothing of its
# gradient. It is zero by `stop_gradient`: a loss on the logsumexp (a z-loss) has no effect, and nothing says so.
import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(1, 2, 1, 4)).astype(np.float32) for _ in range(3))


def loss(q):
    return jax.nn.dot_product_attention(q, k, v, return_residual=True)[1].sum()


got = np.asarray(jax.grad(loss)(jnp.asarray(q)))[0, :, 0]
s = np.float64(q[0, :, 0]) @ np.float64(k[0, :, 0]).T / 2
expected = np.exp(s) / np.exp(s).sum(-1, keepdims=True) @ np.float64(k[0, :, 0]) / 2
print("got", got)
print("expected", expected)
