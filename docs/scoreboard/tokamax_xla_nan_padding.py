# /// script
# requires-python = ">=3.12"
# dependencies = ["tokamax==0.0.17", "jax==0.12.0.1"]
# ///
# shows: tokamax_xla: lengths, NaN in the padding
# The documentation is jax.nn's: "key_value_seq_lengths: int32 array of sequence lengths for key and value"; nothing of
# what the array holds after them. Expected: as if it ended there; got: NaN, as 0 · NaN is.
import jax.numpy as jnp
import numpy as np
import tokamax

rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(1, 3, 1, 4)).astype(np.float32) for _ in range(3))
s = np.float64(q[0, :, 0]) @ np.float64(k[0, :2, 0]).T / 2
p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
expected = p @ np.float64(v[0, :2, 0])
k[:, 2], v[:, 2] = np.nan, np.nan
lengths = jnp.array([2])
q, k, v = map(jnp.asarray, (q, k, v))
out = tokamax.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation="xla")
got = np.asarray(out)[0, :, 0]
print("got", got)
print("expected", expected)
