"""The options of the attention contract by name, for signatures: ``**options: Unpack[AttentionOptions]``.

A forward that has only some of the options names them in its signature instead.
"""

from __future__ import annotations

from typing import TypedDict

import jax

from attnops.biases import Bias
from attnops.dropout import ShiftedKey
from attnops.masks.base import Mask


class ScoreOptions(TypedDict, total=False):
    """What the scores and the softmax depend on; an option that the caller did not set is missing.

    Attributes:
        mask: bound to the scores [B, H, T, S].
        bias: an array that broadcasts to [B, H, T, S], or an `attnops.biases.Bias` that is bound to them.
        softmax_scale: the scale; without it ``D ** -0.5``.
        logits_soft_cap: the cap; without it there is none.
        sinks: [H], one logit per head.
    """

    mask: Mask
    bias: jax.Array | Bias
    softmax_scale: float
    logits_soft_cap: float
    sinks: jax.Array


class FlashOptions(ScoreOptions, total=False):
    """The options of an operation without attention weights.

    Attributes:
        dropout_key: a PRNG key.
        return_lse: whether the output has ``logsumexp``, float32 [B, H, T].
        return_max_logits: whether the output has ``max_logits``, float32 [B, H, T].
    """

    dropout_key: jax.Array | ShiftedKey
    return_lse: bool
    return_max_logits: bool


class AttentionOptions(FlashOptions, total=False):
    """All options of the contract.

    Attributes:
        return_weights: whether the output has ``attention_weights``, [B, H, T, S] in the query's dtype.
    """

    return_weights: bool
