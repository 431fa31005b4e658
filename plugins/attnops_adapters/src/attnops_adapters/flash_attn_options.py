"""The arguments that flash-attn's functions share, as attnops' masks, biases and options."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops import OperationMetadata, OperationOutput, OperationRegistry
from attnops.biases import ALiBi, ScoreFn
from attnops.masks import Causal, Mask, SlidingWindow

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.biases import Bias


def flag(name: str, value: object) -> bool:
    """A bool that is known when tracing."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={value!r} must be True or False, known when tracing")
    return bool(value)


def band(causal: object, window_size: object, offset: Any = None) -> Mask | None:
    """The mask of ``causal`` and ``window_size``, queries aligned at the end or by ``offset``; None for no mask."""
    sides = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or not all(isinstance(x, (int, np.integer)) and not isinstance(x, bool) for x in sides):
        raise ValueError(f"window_size={window_size!r} must be (left, right), ints known when tracing, -1 for no limit")
    left, right = (None if x < 0 else int(x) for x in sides)
    if flag("causal", causal):
        right = 0
    if left is None and right is None:
        return None
    return Causal(offset) if (left, right) == (None, 0) else SlidingWindow(left, right, offset)


def alibi(slopes: ArrayLike | None, heads: int, batch: int | None, offset: Any = None) -> Bias | None:
    """The bias of ``alibi_slopes``, [H] or [B, H].

    Args:
        slopes: the slopes; None for no bias.
        heads: H.
        batch: B; None for documents, which share the slopes.
        offset: the position of query 0 among the keys, int32 [B]; None for alignment at the end.
    """
    if slopes is None:
        return None
    slopes = jnp.asarray(slopes, jnp.float32)
    shape = slopes.shape
    if shape == (heads,) and offset is None:
        return ALiBi(slopes)
    if batch is None or shape not in ((heads,), (batch, heads)):
        allowed = f"[{heads}]" if batch is None else f"[{heads}] or [{batch}, {heads}]"
        raise ValueError(
            f"alibi_slopes has shape {shape}, but must have shape {allowed}"
            + ("; for slopes by document call flash_attn_func on each, or pad them to a batch" if batch is None else "")
        )
    return ScoreFn(_add_slopes, (jnp.broadcast_to(slopes, (batch, heads)), offset))


def _add_slopes(
    scores: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array, slopes: jax.Array, offset: jax.Array
) -> jax.Array:
    return scores - slopes[b, h] * jnp.abs(q + offset[b] - kv).astype(scores.dtype)


def attend(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    mask: Mask | None,
    bias: Bias | None,
    softmax_scale: float | None,
    softcap: object,
    operation: str,
    metadata: OperationMetadata | None,
    dropout_p: object = 0.0,
    dropout_key: jax.Array | None = None,
    layout: str = "BTHD",
    **options: Any,
) -> OperationOutput:
    """Call an attnops operation; the output has the logsumexp.

    Raises:
        ValueError: dropout without a key, an argument that must be a number and is not, or metadata with a field that
            the function's arguments determine.
    """
    for name, value in (("softcap", softcap), ("dropout_p", dropout_p)):
        if not isinstance(value, (numbers.Real, np.generic)) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be a number known when tracing")
    cap, probability = float(softcap), float(dropout_p)  # type: ignore[arg-type]
    if math.isnan(cap):
        raise ValueError("softcap is NaN, but must be a number; 0.0 for none")
    if probability and dropout_key is None:
        raise ValueError(
            f"dropout_p={probability} needs dropout_key=jax.random.key(...), which flash-attn draws from PyTorch's "
            f"generator; give a new key for each call, or dropout_p=0.0"
        )
    default = OperationMetadata()
    metadata = default if metadata is None else metadata
    for name in ("layout", "dropout_prob", "softmax_scale", "logits_soft_cap"):
        if (value := getattr(metadata, name)) != getattr(default, name):
            raise ValueError(f"metadata.{name}={value!r} must not be given: the function's arguments determine it")
    metadata = metadata.replace(layout=layout, dropout_prob=probability)
    out: OperationOutput = OperationRegistry.create(operation, metadata)(
        q, k, v, mask=mask, bias=bias, softmax_scale=softmax_scale, logits_soft_cap=cap if cap > 0 else None,
        dropout_key=dropout_key if probability else None, return_lse=True, **options,
    )  # fmt: skip
    return out
