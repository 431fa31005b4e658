"""The attention "sdpa" of transformers, its default: masks are booleans, and a bias is its ``position_bias``."""
# /// script
# dependencies = ["transformers==5.24.0", "torch==2.14.1"]
# ///

import types

from transformers.integrations.sdpa_attention import sdpa_attention_forward

FRAMEWORK, PACKAGE = "torch", "transformers"
LINK = "https://huggingface.co/docs/transformers/attention_interface"
CONVENTIONS = {
    "aligned top left": "PyTorch's documentation of the function that it calls: “upper left causal bias”",
}
REFUSES = {"mask and causal": "one argument for both: the mask of a causal model is causal"}


def attend(q, k, v, *, causal=False, mask=None, bias=None, scale=None, soft_cap=None, dropout=0.0):
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    module = types.SimpleNamespace(num_key_value_groups=q.shape[-3] // k.shape[-3])
    more = {"softcap": soft_cap} if soft_cap is not None else {}
    out, _ = sdpa_attention_forward(
        module, q, k, v, mask, dropout=dropout, scaling=scale, is_causal=causal, position_bias=bias, **more
    )
    return out
