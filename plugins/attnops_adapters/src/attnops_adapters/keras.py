"""Attention of Keras 3 on its JAX backend by attnops' operations.

::

    from attnops_adapters.keras import use

    with use("flash"):
        model.fit(...)

`use` replaces the function that `keras.ops.dot_product_attention`, `keras.layers.MultiHeadAttention` and
`keras.layers.GroupQueryAttention` call. Layers that drop weights (``dropout`` > 0, in inference too), return attention
scores, or attend over several axes compute attention themselves: Keras does not call the function for them, and `use`
has no effect. `attnops_adapters.jax_nn.use` has no effect on Keras, which asks `jax.nn` for "xla" or "cudnn".

Differences from Keras:

| | Keras on JAX | here |
|---|---|---|
| a fully masked row | the mean of the values | 0 |
| masks that differ by batch row or head, on TPU | the first row's and head's for all | each row's and head's |
| ``attn_logits_soft_cap`` | ``cap · tanh(s / cap)`` on TPU, else refused by `keras.ops` | ``cap · tanh(s / cap)`` |
| ``attn_logits_soft_cap`` with a bias | caps scores plus bias | refused: attnops caps before it adds the bias |
| integers | computed in integers | computed in float32 |
| a mask [B, T, S] | a mask for each batch row | refused: give it as [B, 1, T, S] |
| float64; a batch of size 0 | computed | refused |
| ``flash_attention`` | requires or forbids a fused kernel | no effect: `use` names the operation |
| head dim of the values | the key's | any |
| a call that fails on TPU | falls back to `jax.nn` with a log message | raises |
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import jax.numpy as jnp

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Dense, Mask
from attnops_adapters.arrays import boolean, promoted
from attnops_adapters.precision import precision_of
from attnops_adapters.used import Stack, checked_metadata

if TYPE_CHECKING:
    import jax

__all__ = ["use"]

_USED: Final = Stack(("auto", OperationMetadata()))


@contextlib.contextmanager
def use(operation: str = "auto", **metadata: Any) -> Iterator[None]:
    """A context in which an operation of attnops computes Keras' dot-product attention, in all threads.

    Programs that Keras traced before, such as a compiled ``train_step``, do not change.

    Args:
        operation: the operation's name.
        **metadata: fields of `attnops.OperationMetadata`.

    Raises:
        ValueError: Keras has another backend than JAX, the operation is unknown, or a field of the metadata is outside
            its range.
        ImportError: Keras is not installed: ``pip install 'attnops-adapters[keras]'``.
    """
    import keras
    from keras.src import backend

    if keras.config.backend() != "jax":
        raise ValueError(f"Keras' backend is {keras.config.backend()!r}, but must be 'jax'; set KERAS_BACKEND=jax")
    meta = checked_metadata(metadata)
    OperationRegistry.create(operation, meta)
    with _USED.pushed((operation, meta), backend.nn, "dot_product_attention", _attend):
        yield


def _attend(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> jax.Array:
    """Query [B, T, N, D], key [B, S, K, D] and value [B, S, K, Dv]: [B, T, N, Dv]."""
    from keras.src import backend

    query, key, value = promoted(tuple(backend.convert_to_tensor(x) for x in (query, key, value)), None)
    if bias is not None:
        if attn_logits_soft_cap is not None:
            raise ValueError(
                f"attn_logits_soft_cap={attn_logits_soft_cap!r} with a bias: Keras caps the sum, attnops the scores"
                " before the bias is added; leave one of them out"
            )
        bias = _as_scores("bias", backend.convert_to_tensor(bias, dtype=query.dtype))
    masks: list[Mask] = [Causal(offset=0)] if is_causal else []
    if mask is not None:
        masks.append(Dense(_as_scores("mask", boolean(backend.convert_to_tensor(mask)))))
    operation, metadata = _USED.last
    op = OperationRegistry.create(operation, metadata.replace(precision=precision_of(None, metadata.precision)))
    out = op(
        query,
        key,
        value,
        mask=functools.reduce(lambda a, b: a & b, masks) if masks else None,
        bias=bias,
        softmax_scale=scale,
        logits_soft_cap=attn_logits_soft_cap,
    )
    return out.attention_outputs


def _as_scores(name: str, x: jax.Array) -> jax.Array:
    """An array that broadcasts to [B, N, T, S], with four axes."""
    if x.ndim > 4:
        raise ValueError(f"{name} has shape {x.shape}, but must broadcast to [B, N, T, S]")
    return jnp.reshape(x, (1,) * (4 - x.ndim) + x.shape)
