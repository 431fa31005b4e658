# /// script
# dependencies = ["jax==0.12.0.1"]
# ///
# shows: jax_nn: lengths, NaN in the padding
# The documentation: "key_value_seq_lengths: int32 array of sequence lengths for key and value"; nothing of what the
# array holds after them. Expected: as if it ended there; got: NaN, as 0 · NaN is.
import jax
import jax.numpy as jnp

q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 3, 1, 4))
expected = jax.nn.dot_product_attention(q, k[:, :2], v[:, :2])
k, v = (x.at[:, 2].set(jnp.nan) for x in (k, v))
got = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.array([2]))
print("got", got)
print("expected", expected)
