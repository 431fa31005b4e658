"""Eager attention of transformers, of Gemma 2 (soft cap) and of GPT-OSS (sinks), with masks in floats."""
# /// script
# dependencies = ["transformers==5.24.0", "torch==2.14.1"]
# ///

import types

import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks
from worker import Refused

FRAMEWORK, PACKAGE = "torch", "transformers"
LINK = "https://huggingface.co/docs/transformers/attention_interface"
CONVENTIONS = {}


def attend(q, k, v, *, causal=False, mask=None, bias=None, sinks=None, scale=None, soft_cap=None, dropout=0.0):
    if causal and sinks is None:
        raise Refused("no argument for it: a model makes the mask")
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    H, D = q.shape[-3], q.shape[-1]
    module = types.SimpleNamespace(
        num_key_value_groups=H // k.shape[-3], head_dim=D, training=bool(dropout), sinks=sinks
    )
    if mask is not None:  # as `eager_mask` of transformers' masking_utils does
        low = torch.tensor(torch.finfo(q.dtype).min, dtype=q.dtype)
        mask = torch.where(mask, torch.tensor(0.0, dtype=q.dtype), low)
        bias = mask if bias is None else bias + mask
    scale = D**-0.5 if scale is None else scale
    if sinks is not None:
        T, S = q.shape[-2], k.shape[-2]
        if causal:
            bias = torch.full((T, S), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)[None, None]
        return with_sinks(module, q, k, v, bias, scale, dropout)[0]
    return eager_attention_forward(module, q, k, v, bias, dropout=dropout, scaling=scale, softcap=soft_cap)[0]
