"""`tokamax.dot_product_attention` of tokamax, with ``implementation="xla"``."""
# /// script
# requires-python = ">=3.12"
# dependencies = ["tokamax==0.0.17", "jax==0.12.0.1"]
# ///

import tokamax

FRAMEWORK, PACKAGE = "jax", "tokamax"
LINK = "https://github.com/openxla/tokamax/blob/main/tokamax/_src/ops/attention/api.py"
CONVENTIONS = {
    "the bias is added before the cap": "“logits_soft_cap * tanh(logits / logits_soft_cap), where logits are scale * "
    "query @ key.T + bias”",
}
IMPLEMENTATION = "xla"


def attend(q, k, v, *, causal=False, mask=None, bias=None, window=None, lengths=None, scale=None, soft_cap=None):
    return tokamax.dot_product_attention(
        q, k, v, bias, mask, scale=scale, is_causal=causal, local_window_size=window and tuple(window),
        key_value_seq_lengths=lengths, logits_soft_cap=soft_cap, implementation=IMPLEMENTATION,
    )  # fmt: skip
