"""What arguments of other libraries' attention are called here, for the error of an unknown option."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

# What to write here, and the words for it elsewhere.
_WORDS: Final = {
    "mask=attnops.masks.Causal(), or causal=True of attnops.attention": "causal is_causal use_causal_mask",
    "mask=attnops.masks.SlidingWindow(left, right), or window=(left, right) of attnops.attention":
        "window window_size local_window_size sliding_window sliding_window_size",
    "mask=attnops.masks.Segments(query_ids, key_ids)": "segment_ids q_segment_ids kv_segment_ids decoder_segment_ids",
    "cu_seqlens_q= and cu_seqlens_k= with OperationMetadata(layout='THD')": "cu_seqlens_kv max_seqlen_q max_seqlen_k",
    "mask=attnops.masks.Lengths(key_lengths), with integers [B]": "kv_lengths key_value_seq_lengths",
    "mask=, a boolean array [B, H, T, S] with True where a query may attend, or an attnops.masks.Mask":
        "attn_mask attention_mask key_padding_mask",
    "mask=attnops.masks.MaskFn(function)": "block_mask mask_mod",
    "bias=attnops.biases.ScoreFn(function)": "score_mod",
    "bias=, an array [B, H, T, S] that is added to the scores, or an attnops.biases.Bias":
        "attn_bias attention_bias ab",
    "bias=attnops.biases.ALiBi(slopes)": "alibi_slopes",
    "softmax_scale=": "scale sm_scale scaling",
    "logits_soft_cap=": "softcap soft_cap logits_softcap attn_logits_soft_cap",
    "dropout_key= of a call, with OperationMetadata(dropout_prob=...)":
        "dropout dropout_p dropout_prob dropout_rate dropout_rng",
    "sinks=, one logit per head, [H], or n, [H, n]": "s_aux softmax_aux attention_sinks",
    "return_lse=True": "return_residual return_residuals",
    "return_weights=True": "return_attn_probs need_weights output_attentions",
    "mode='prefill', or no dropout_key": "deterministic",
    "mode='train'": "is_training",
    "nothing: fewer heads of key and value than of query mean grouped heads": "enable_gqa",
    "the operation's name, OperationRegistry.create(name, ...)": "implementation backend",
    "OperationMetadata(layout='BTHD'), 'BHTD' or 'THD'": "layout",
    "OperationMetadata(precision=...)": "precision",
    "op(query, cache, query_lengths=...) of a cache; over arrays, mask=attnops.masks.Lengths(lengths)": "query_lengths",
    "op(query, cache, rows=...) of a cache; over arrays, mask=attnops.masks.Segments(ids)": "rows",
}  # fmt: skip
_HERE: Final = {word: here for here, words in _WORDS.items() for word in words.split()}


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
