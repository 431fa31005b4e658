"""Splash attention of JAX, a kernel for TPUs, in Pallas's interpreter, with its default tiles of 128."""
# /// script
# dependencies = ["jax==0.12.0.1"]
# ///

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

FRAMEWORK, PACKAGE = "jax", "jax"
LINK = "https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/splash_attention"
SIZE = {"length": 128, "head_dim": 128}
CONVENTIONS = {
    "aligned top left": "`CausalMask` has an “offset of q start wrt kv”, which is 0 unless a caller gives another",
}
REFUSES = {
    "scale": "no argument for it: the caller scales the query",
    "negative scale": "no argument for it: the caller scales the query",
    "mask and causal": "one argument for both",
}


def attend(q, k, v, *, causal=False, mask=None, window=None, soft_cap=None, sinks=None, segments=None, lse=False):
    (B, T, H, D), S = q.shape, k.shape[1]
    seen = splash.CausalMask((T, S)) if causal else splash.FullMask((T, S))
    if window is not None:
        seen = splash.LocalMask((T, S), tuple(window), offset=0)
    ids = None if segments is None else splash.SegmentIds(segments, segments)

    def row(q, k, v, ids, mask):
        heads = splash.MultiHeadMask([seen] * H) if mask is None else jnp.broadcast_to(mask, (H, T, mask.shape[-1]))
        kernel = splash.make_splash_mha_single_device(
            heads, attn_logits_soft_cap=soft_cap, save_residuals=lse, interpret=True
        )
        return kernel(q, k, v, ids, sinks)

    if mask is not None:
        mask = jnp.broadcast_to(mask, (B, *mask.shape[1:]))
    q, k, v = (x.swapaxes(1, 2) for x in ((q * D**-0.5).astype(q.dtype), k, v))
    out = jax.vmap(row)(q, k, v, ids, mask)
    return (out[0].swapaxes(1, 2), out[1][0]) if lse else out.swapaxes(1, 2)
