"""`jax.nn.dot_product_attention` of JAX, by XLA."""
# /// script
# dependencies = ["jax==0.12.0.1"]
# ///

import jax

FRAMEWORK, PACKAGE = "jax", "jax"
LINK = "https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html"
CONVENTIONS = {}


def attend(q, k, v, *, causal=False, mask=None, bias=None, window=None, lengths=None, scale=None, lse=False):
    window = None if window is None else tuple(window)
    out = jax.nn.dot_product_attention(
        q, k, v, bias, mask, scale=scale, is_causal=causal, local_window_size=window,
        key_value_seq_lengths=lengths, return_residual=lse,
    )  # fmt: skip
    return (out[0], out[1].swapaxes(1, 2)) if lse else out
