"""`torch.nn.functional.scaled_dot_product_attention` of PyTorch, on the CPU."""
# /// script
# dependencies = ["torch==2.14.1"]
# ///

import torch

FRAMEWORK, PACKAGE = "torch", "torch"
LINK = "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html"
CONVENTIONS = {
    "aligned top left": "“upper left causal bias due to the alignment … when the mask is a non-square matrix”",
}
REFUSES = {"bias and mask": "one argument for both: add the mask to the bias"}


def attend(q, k, v, *, causal=False, mask=None, bias=None, scale=None, dropout=0.0):
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask if bias is None else bias, is_causal=causal, scale=scale, dropout_p=dropout,
        enable_gqa=k.shape[-3] != q.shape[-3],
    )  # fmt: skip
    return out.transpose(-3, -2)
