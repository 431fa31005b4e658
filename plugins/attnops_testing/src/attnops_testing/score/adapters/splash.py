"""Splash attention of JAX, `make_splash_mha`, by Pallas's interpreter; lengths are multiples of 128."""
# /// script
# dependencies = ["jax==0.12.0.1"]
# ///

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from worker import Refused

FRAMEWORK, PACKAGE = "jax", "jax"
LINK = "https://github.com/jax-ml/jax/blob/main/jax/experimental/pallas/ops/tpu/splash_attention/splash_attention_kernel.py"
SIZE = {"length": 128, "head_dim": 128}
CONVENTIONS = {}
REFUSES = {
    "lse": "it is forward alone: “save_residuals”",
    "scale": "no argument for it: scale the query",
}


def attend(q, k, v, *, causal=False, mask=None, window=None, segments=None, soft_cap=None, sinks=None):
    _B, T, H, D = q.shape
    S = k.shape[1]
    if mask is not None and mask.shape[:2] != (1, 1):
        raise Refused("no argument for it: a mask is known when the kernel is made, and the same for all rows")
    if mask is not None:
        raise Refused("a mask is a NumPy array when the kernel is made, not an argument of the compiled call")
    pattern = masks.CausalMask((T, S)) if causal else masks.FullMask((T, S))
    if window is not None:
        pattern = masks.LocalMask((T, S), tuple(window), 0)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([pattern] * H), head_shards=1, q_seq_shards=1, attn_logits_soft_cap=soft_cap, interpret=True
    )
    ids = None if segments is None else splash.SegmentIds(segments, segments)
    q = q * np.asarray(D**-0.5, q.dtype)  # splash does not scale

    def row(q, k, v, ids):
        return kernel(q, k, v, ids, sinks) if sinks is not None else kernel(q, k, v, ids)

    swapped = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.vmap(row, (0, 0, 0, None if ids is None else 0))(*swapped, ids).swapaxes(1, 2)
