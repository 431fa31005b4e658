"""`attnops.attention`: attention as one function, over the operation `auto`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.registry import OperationRegistry
from attnops.masks import Causal, Mask, SlidingWindow

if TYPE_CHECKING:
    import jax
    from jax.typing import ArrayLike

    from attnops.biases import Bias
    from attnops.dispatch.source import Source
    from attnops.output import OperationOutput


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike | Source,
    value: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    return_weights: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    **options: Any,
) -> jax.Array: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike | Source,
    value: ArrayLike | None = None,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    return_max_logits: bool = False,
    **options: Any,
) -> OperationOutput: ...


def attention(
    query: ArrayLike,
    key: ArrayLike | Source,
    value: ArrayLike | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: ArrayLike | Mask | None = None,
    bias: ArrayLike | Bias | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout_key: jax.Array | None = None,
    dropout_prob: float | None = None,
    mode: str | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    return_max_logits: bool = False,
    operation: str = "auto",
    metadata: OperationMetadata | None = None,
    **options: Any,
) -> jax.Array | OperationOutput:
    """Attention of ``query`` over ``key`` and ``value``, or over a cache: ``attention(query, cache, causal=True)``.

    ::

        out = attnops.attention(query, key, value, causal=True, window=(1023, 0))  # [B, T, H, Dv]

    The same as an operation of `OperationRegistry.create` with the masks `attnops.masks.Causal` and
    `attnops.masks.SlidingWindow`, combined by ``&`` with ``mask`` if that is given too. To append to a cache in the
    same call, use `OperationImpl.step`.

    Args:
        query: [B, T, H, D] float32, bfloat16 or float16; [B, H, T, D] with ``metadata.layout="BHTD"``.
        key: [B, S, K, D], or [B, K, S, D] with ``layout="BHTD"``, K dividing H; or an `attnops.Source` that
            already holds the queries' tokens, such as a cache of attnops-caches.
        value: [B, S, K, Dv], or [B, K, S, Dv] with ``layout="BHTD"``. None with a source.
        causal: whether a query sees no later key. Positions are aligned at the end where T ≠ S: the last query sees
            all keys.
        window: (left, right), how many keys a query sees before and after the key at its own position; None in place
            of a number for all. A config's ``sliding_window=4096`` is ``(4095, 0)``.
        mask: a boolean array that broadcasts to [B, H, T, S], True where a query may attend; or an
            `attnops.masks.Mask`. This and all that follow are described in `OperationImpl.__call__`.
        bias: an array that broadcasts to [B, H, T, S], or an `attnops.biases.Bias`.
        softmax_scale: None: the metadata's, else ``D ** -0.5``.
        logits_soft_cap: None: the metadata's, else no cap.
        sinks: floating [H] or [H, n], a logit per query head or n, added to the softmax's denominator.
        dropout_key: a PRNG key, needed in train mode where ``dropout_prob`` is not 0.
        dropout_prob: in [0, 1). None: the metadata's.
        mode: "train", "prefill", "decode" or "insert". None: the metadata's, else decode for one query, else train.
        return_lse: whether to return an `OperationOutput` with ``logsumexp``, float32 [B, H, T].
        return_weights: whether to return an `OperationOutput` with ``attention_weights``, [B, H, T, S].
        return_max_logits: whether to return an `OperationOutput` with ``max_logits``, [B, H, T] float32.
        operation: the operation's name; ``"auto"`` is the fastest that serves the call.
        metadata: further settings, such as platform, mesh and layout.
        **options: options that only some implementations, or the source, have; ``cu_seqlens``, or ``cu_seqlens_q`` and
            ``cu_seqlens_k``, of the layout "THD".

    Returns:
        [B, T, H, Dv], or [B, H, T, Dv] with ``layout="BHTD"``; an `OperationOutput` with ``return_lse``,
        ``return_weights`` or ``return_max_logits``.

    Raises:
        ValueError, TypeError, UnsupportedError: see `OperationImpl.__call__`.
        UnknownOperationError, AmbiguousOperationError, PluginError: see `OperationRegistry.create`.
    """
    metadata = OperationMetadata() if metadata is None else metadata
    if dropout_prob is not None:
        metadata = metadata.replace(dropout_prob=dropout_prob)
    out: OperationOutput = OperationRegistry.create(operation, metadata)(
        query,
        key,
        value,
        mask=_mask(causal, window, mask),
        bias=bias,
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        dropout_key=dropout_key,
        mode=mode,
        return_lse=return_lse,
        return_weights=return_weights,
        return_max_logits=return_max_logits,
        **options,
    )
    return out if return_lse or return_weights or return_max_logits else out.attention_outputs


def _mask(causal: bool, window: object, mask: ArrayLike | Mask | None) -> ArrayLike | Mask | None:
    if not isinstance(causal, (bool, np.bool_)):
        raise ValueError(f"causal={causal!r} must be True or False, known when tracing")
    if window is not None and not (isinstance(window, tuple) and len(window) == 2):
        raise ValueError(
            f"window={window!r} must be (left, right), the keys before and after a query, None for all; a config's "
            f"sliding_window=n is (n - 1, 0), jax.nn's local_window_size=n is (n, n)"
        )
    if not causal and window is None:
        return mask
    given: Mask = SlidingWindow(*window) if isinstance(window, tuple) else Causal()
    if causal and window is not None:
        given = Causal() & given
    return given if mask is None else given & mask
