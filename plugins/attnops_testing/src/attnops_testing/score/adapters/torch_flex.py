"""FlexAttention of PyTorch, eager on the CPU: masks are functions, as its documentation writes them."""
# /// script
# dependencies = ["torch==2.14.1"]
# ///

import functools

import torch
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask, flex_attention

FRAMEWORK, PACKAGE = "torch", "torch"
LINK = "https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html"
CONVENTIONS = {
    "aligned top left": "a caller's function of indices: “q_idx >= kv_idx” of the documentation",
}
REFUSES = {
    "sinks": "no argument for it: the caller scales by the logsumexp",
    "lengths, NaN in the padding": "no argument for lengths: a mask function hides keys, which exist",
    "refuses a mask of another length": "no argument for it: a mask is the caller's function",
}


def attend(
    q, k, v, *, causal=False, mask=None, bias=None, window=None, segments=None, lengths=None, scale=None,
    soft_cap=None, lse=False,
):  # fmt: skip
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    (B, H, T), S = q.shape[-4:-1], k.shape[-2]
    mods = []
    if causal:
        mods.append(lambda b, h, i, j: i >= j)
    if window is not None:
        left, right = window
        mods.append(lambda b, h, i, j: (i - j <= left) & (j - i <= right))
    if segments is not None:
        mods.append(lambda b, h, i, j: segments[b, i] == segments[b, j])
    if lengths is not None:
        mods.append(lambda b, h, i, j: j < lengths[b])
    if mask is not None:
        given = mask.expand(B, H, T, mask.shape[-1])
        mods.append(lambda b, h, i, j: given[b, h, i, j])
    wide = None if bias is None else bias.expand(B, H, T, S)

    def score_mod(score, b, h, i, j):
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        return score if wide is None else score + wide[b, h, i, j]

    block_mask = create_block_mask(functools.reduce(and_masks, mods), B, H, T, S, device="cpu") if mods else None
    out = flex_attention(
        q, k, v, score_mod=None if bias is None and soft_cap is None else score_mod, block_mask=block_mask, scale=scale,
        enable_gqa=k.shape[-3] != q.shape[-3], return_aux=AuxRequest(lse=True) if lse else None,
    )  # fmt: skip
    return (out[0].transpose(-3, -2), out[1].lse) if lse else out.transpose(-3, -2)
