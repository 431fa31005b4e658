"""`sdpa_attention_forward` of transformers, which models call with ``attn_implementation="sdpa"``."""
# /// script
# dependencies = ["transformers==5.24.0", "torch==2.14.1"]
# ///

import types

from transformers.integrations.sdpa_attention import sdpa_attention_forward

FRAMEWORK, PACKAGE = "torch", "transformers"
LINK = "https://huggingface.co/docs/transformers/attention_interface"
CONVENTIONS = {
    "aligned top left": "“SDPA's `is_causal` mask alignment is upper-left”, a comment in sdpa_attention.py",
}
REFUSES = {"sinks": "models with sinks declare that they do not support it: `_supports_sdpa = False` of GPT-OSS"}


def attend(q, k, v, *, causal=False, mask=None, bias=None, soft_cap=None, scale=None, dropout=0.0):
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    module = types.SimpleNamespace(num_key_value_groups=q.shape[-3] // k.shape[-3], is_causal=causal)
    return sdpa_attention_forward(
        module, q, k, v, mask, dropout=dropout, scaling=scale, position_bias=bias, softcap=soft_cap
    )[0]
