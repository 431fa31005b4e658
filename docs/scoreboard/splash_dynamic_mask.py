# /// script
# dependencies = ["jax==0.12.0.1"]
# ///
# shows: splash: mask [B, H, T, S]; mask [1, 1, T, S]; mask of keys [B, 1, 1, S]; rows that see no key
# shows: splash: rows that see no key, GQA
# `make_splash_mha` declares a mask to be `np.ndarray | jax.Array | MultiHeadMask`. An array of JAX works outside of
# `jax.jit`; under it, the kernel's call asks a traced array, its `is_dynamic_mask`, for a value.
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

q = jnp.ones((1, 128, 128))


def attend(mask):
    return splash.make_splash_mha_single_device(mask, interpret=True)(q, q, q)


mask = jnp.ones((1, 128, 128), bool)
expected = "an output (1, 128, 128)"
try:
    got = f"an output {jax.jit(attend)(mask).shape}"
except jax.errors.TracerBoolConversionError as error:
    got = type(error).__name__
print("got", got)
print("expected", expected)
