"""`flash_attn_func` of FlyWheel, `flash_attn_varlen_func` for documents: kernels for TPUs, in Pallas's interpreter."""
# /// script
# requires-python = ">=3.12"
# dependencies = ["flywheel-tpu==0.3.0", "jax==0.12.0.1"]
# ///

import flywheel_tpu
import jax.numpy as jnp

FRAMEWORK, PACKAGE = "jax", "flywheel-tpu"
LINK = "https://github.com/heavyball-research/flywheel-tpu#how-to-use-flywheel"
SIZE = {"length": 128, "head_dim": 128, "dtype": "bfloat16"}
CONVENTIONS = {}
NOT_RUN = {
    "does not have trivial BlockSpec": "Pallas's interpreter fails: it does not serve what `jax.vmap` makes of it",
}


def attend(
    q, k, v, *, causal=False, window=None, soft_cap=0.0, segments=None, scale=None, lse=False, dropout=0.0,
):  # fmt: skip
    options = {
        "softmax_scale": scale, "causal": causal, "window_size": tuple(window or (-1, -1)), "softcap": soft_cap,
        "return_softmax_lse": lse, "dropout_p": dropout, "interpret": True,
    }  # fmt: skip
    if segments is None:
        out = flywheel_tpu.flash_attn_func(*(x.swapaxes(1, 2) for x in (q, k, v)), **options)
        return (out[0].swapaxes(1, 2), out[1]) if lse else out.swapaxes(1, 2)
    (B, T), most = segments.shape, 8  # documents of all rows, at most 8 in each
    ids = (segments + most * jnp.arange(B)[:, None]).reshape(-1)
    starts = jnp.searchsorted(ids, jnp.unique(ids, size=B * most, fill_value=B * most * 2)).astype(jnp.int32)
    starts = jnp.append(starts, B * T).astype(jnp.int32)
    packed = [x.reshape(B * T, *x.shape[2:]).swapaxes(0, 1) for x in (q, k, v)]
    out = flywheel_tpu.flash_attn_varlen_func(*packed, starts, starts, T, T, **options)
    return out.swapaxes(0, 1).reshape(B, T, q.shape[2], -1)
