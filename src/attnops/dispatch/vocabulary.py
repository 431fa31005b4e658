"""What arguments of other libraries' attention are called here, for the error of an unknown option."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_CAUSAL: Final = "mask=attnops.masks.Causal(), or causal=True of attnops.attention"
_WINDOW: Final = "mask=attnops.masks.SlidingWindow(left, right), or window=(left, right) of attnops.attention"
_SEGMENTS: Final = "mask=attnops.masks.Segments(query_ids, key_ids)"
_PACKED: Final = "cu_seqlens_q= and cu_seqlens_k= with OperationMetadata(layout='THD')"
_LENGTHS: Final = "mask=attnops.masks.Lengths(key_lengths), with integers [B]"
_MASK: Final = "mask=, a boolean array [B, H, T, S] with True where a query may attend, or an attnops.masks.Mask"
_BIAS: Final = "bias=, an array [B, H, T, S] that is added to the scores, or an attnops.biases.Bias"
_SCALE: Final = "softmax_scale="
_CAP: Final = "logits_soft_cap="
_DROPOUT: Final = "dropout_key= of a call, with OperationMetadata(dropout_prob=...)"
_SINKS: Final = "sinks=, one logit per head, [H], or n, [H, n]"
_LSE: Final = "return_lse=True"
_NAME: Final = "the operation's name, OperationRegistry.create(name, ...)"

_HERE: Final = {
    "causal": _CAUSAL,
    "is_causal": _CAUSAL,
    "use_causal_mask": _CAUSAL,
    "window": _WINDOW,
    "window_size": _WINDOW,
    "local_window_size": _WINDOW,
    "sliding_window": _WINDOW,
    "sliding_window_size": _WINDOW,
    "segment_ids": _SEGMENTS,
    "q_segment_ids": _SEGMENTS,
    "kv_segment_ids": _SEGMENTS,
    "decoder_segment_ids": _SEGMENTS,
    "cu_seqlens_kv": _PACKED,
    "max_seqlen_q": _PACKED,
    "max_seqlen_k": _PACKED,
    "kv_lengths": _LENGTHS,
    "key_value_seq_lengths": _LENGTHS,
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "key_padding_mask": _MASK,
    "block_mask": "mask=attnops.masks.MaskFn(function)",
    "mask_mod": "mask=attnops.masks.MaskFn(function)",
    "score_mod": "bias=attnops.biases.ScoreFn(function)",
    "attn_bias": _BIAS,
    "attention_bias": _BIAS,
    "ab": _BIAS,
    "alibi_slopes": "bias=attnops.biases.ALiBi(slopes)",
    "scale": _SCALE,
    "sm_scale": _SCALE,
    "scaling": _SCALE,
    "softcap": _CAP,
    "soft_cap": _CAP,
    "logits_softcap": _CAP,
    "attn_logits_soft_cap": _CAP,
    "dropout": _DROPOUT,
    "dropout_p": _DROPOUT,
    "dropout_prob": _DROPOUT,
    "dropout_rate": _DROPOUT,
    "dropout_rng": _DROPOUT,
    "s_aux": _SINKS,
    "softmax_aux": _SINKS,
    "attention_sinks": _SINKS,
    "return_residual": _LSE,
    "return_residuals": _LSE,
    "return_attn_probs": "return_weights=True",
    "need_weights": "return_weights=True",
    "output_attentions": "return_weights=True",
    "deterministic": "mode='prefill', or no dropout_key",
    "is_training": "mode='train'",
    "enable_gqa": "nothing: fewer heads of key and value than of query mean grouped heads",
    "implementation": _NAME,
    "backend": _NAME,
    "layout": "OperationMetadata(layout='BTHD'), 'BHTD' or 'THD'",
    "precision": "OperationMetadata(precision=...)",
    "query_lengths": "op(query, cache, query_lengths=...) of a cache; over arrays, mask=attnops.masks.Lengths(lengths)",
    "rows": "op(query, cache, rows=...) of a cache; over arrays, mask=attnops.masks.Segments(ids)",
}


def hint(option: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown option; empty if nothing is similar.

    Args:
        option: the unknown option's name.
        known: the names of the known options.
    """
    if (here := _HERE.get(option)) is not None:
        return f"write {here}"
    near = difflib.get_close_matches(option, list(known))
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""
