"""`mlx.core.fast.scaled_dot_product_attention` of MLX on the CPU; forward alone here."""
# /// script
# dependencies = ["mlx[cpu]==0.32.4", "ml_dtypes"]
# ///

import mlx.core as mx
import numpy as np

FRAMEWORK, PACKAGE = "numpy", "mlx"
LINK = "https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.fast.scaled_dot_product_attention.html"
GRADIENTS = False
CONVENTIONS = {}
REFUSES = {
    "bias and mask": "one argument for both: add the mask to the bias",
    "mask and causal": "one argument for both",
    "bias and causal": "one argument for both",
    "second derivatives": "it is not probed",
    "vmap": "it is not probed",
}


def attend(q, k, v, *, causal=False, mask=None, bias=None, sinks=None, scale=None):
    arrays = [mx.array(np.swapaxes(x, 1, 2).astype(np.float32)).astype(getattr(mx, str(q.dtype))) for x in (q, k, v)]
    given = None
    if bias is not None:
        given = mx.array(bias.astype(np.float32)).astype(getattr(mx, str(bias.dtype)))
    elif mask is not None:
        given = mx.array(mask)
    if sinks is not None:
        sinks = mx.array(sinks.astype(np.float32)).astype(arrays[0].dtype)
    out = mx.fast.scaled_dot_product_attention(
        *arrays, scale=q.shape[-1] ** -0.5 if scale is None else scale, mask="causal" if causal else given, sinks=sinks
    )
    return np.swapaxes(np.array(out.astype(mx.float32)), 1, 2)
