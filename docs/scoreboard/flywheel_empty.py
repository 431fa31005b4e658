# /// script
# requires-python = ">=3.12"
# dependencies = ["flywheel-tpu==0.3.0", "jax==0.12.0.1"]
# ///
# shows: flywheel: no queries (T = 0); no keys (S = 0)
# The documentation: "seqlen_q may be any length", "seqlen_k must be a multiple of 128", as 0 is. Expected: an empty
# output, or a refusal; got: an error of a reshape of the arrays to heads.
import flywheel_tpu
import jax.numpy as jnp

q, k = jnp.ones((1, 1, 0, 128), jnp.bfloat16), jnp.ones((1, 1, 128, 128), jnp.bfloat16)
expected = "an output (1, 1, 0, 128)"
try:
    got = f"an output {flywheel_tpu.flash_attn_func(q, k, k, interpret=True).shape}"
except ZeroDivisionError as error:
    got = f"ZeroDivisionError: {error}"
print("got", got)
print("expected", expected)
