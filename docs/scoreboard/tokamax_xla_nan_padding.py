# /// script
# requires-python = ">=3.12"
# dependencies = ["tokamax==0.0.17", "jax==0.12.0.1"]
# ///
# shows: tokamax_xla: lengths, NaN in the padding
# The documentation is jax.nn's: "key_value_seq_lengths: int32 array of sequence lengths for key and value"; nothing of
# what the array holds after them. Expected: as if it ended there; got: NaN, as 0 · NaN is.
import jax
import jax.numpy as jnp
import tokamax

q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 3, 1, 4))
expected = tokamax.dot_product_attention(q, k[:, :2], v[:, :2], implementation="xla")
k, v = (x.at[:, 2].set(jnp.nan) for x in (k, v))
got = tokamax.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.array([2]), implementation="xla")
print("got", got)
print("expected", expected)
