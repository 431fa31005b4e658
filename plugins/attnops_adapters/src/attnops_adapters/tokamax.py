"""attnops' operations as implementations of `tokamax.dot_product_attention`.

::

    import attnops_adapters.tokamax
    import tokamax

    op = OperationRegistry.create("flash", OperationMetadata())
    tokamax.dot_product_attention(q, k, v, implementation=(attnops_adapters.tokamax.implementation(op), "xla"))

A call that the operation can't serve raises `NotImplementedError`; tokamax then tries its next implementation.
Causal masks and lengths become `attnops.masks.Causal` and `Lengths`; windows given as the first and last key of each
query become tables of T numbers.

Differences from tokamax's own implementations:

| | tokamax | here |
|---|---|---|
| ``logits_soft_cap`` with a bias | caps scores plus bias | refused: attnops caps before it adds the bias |
| a fully masked row | the mean of the values | 0 |
| quantised arrays, ``q_sharding``, different precisions of both operands | served by some | refused |
| a traced scale | served by some | refused |
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from attnops.masks import Causal, Dense, Lengths, Mask, MaskFn
from attnops_adapters.arrays import flattened, flattened_scores
from attnops_adapters.precision import precision_of

if TYPE_CHECKING:
    from attnops import OperationImpl

__all__ = ["implementation"]


def implementation(operation: OperationImpl) -> Callable[..., jax.Array]:
    """A callable for the argument ``implementation`` of `tokamax.dot_product_attention`.

    Args:
        operation: an attention operation, such as ``OperationRegistry.create("flash", metadata)``.

    Raises:
        ValueError: the operation's layout is not "BTHD".
    """
    if operation.metadata.layout != "BTHD":
        raise ValueError(f"layout={operation.metadata.layout!r} must be 'BTHD', which is tokamax's")
    return functools.partial(_attend, operation)


def _attend(
    operation: OperationImpl,
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: jax.Array | None = None,
    mask: Any = None,
    logits_scale: Any = None,
    precision: Any = None,
    logits_soft_cap: float | None = None,
    q_sharding: Any = None,
) -> jax.Array:
    """Query [*B, T, N, D], key [*B, S, K, D] and value [*B, S, K, Dv]: [*B, T, N, Dv]."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, jax.Array):
            raise NotImplementedError(f"{name} is a {type(x).__name__}, but must be a jax.Array; dequantise it")
    if logits_soft_cap is not None and bias is not None:
        raise NotImplementedError(
            f"logits_soft_cap={logits_soft_cap!r} with a bias: tokamax caps their sum, attnops caps before it adds the "
            "bias"
        )
    if q_sharding is not None:
        raise NotImplementedError(f"{q_sharding=} must be None; set OperationMetadata's mesh, or shard the arrays")
    try:
        chosen = precision_of(precision, operation.metadata.precision)
    except ValueError as error:
        raise NotImplementedError(str(error)) from None
    batch, shape = query.shape[:-3], (*query.shape[:-1], value.shape[-1])
    op = type(operation)(operation.metadata.replace(precision=chosen))
    arrays = [flattened(x, 3) for x in (query, key, value)]
    try:
        out = op(
            *arrays,
            mask=_mask(mask, batch),
            bias=None if bias is None else flattened_scores("bias", bias, batch),
            softmax_scale=None if isinstance(logits_scale, type) else logits_scale,  # tokamax's AUTO is a class
            logits_soft_cap=logits_soft_cap,
        )
    except ValueError as error:  # tokamax's next implementation may serve it
        raise NotImplementedError(str(error)) from error
    return out.attention_outputs.reshape(shape)


def _mask(mask: Any, batch: tuple[int, ...]) -> Mask | None:
    """A tokamax mask, converted: an array, the range of queries of each key [*B, H, S], the range of keys of each query
    [*B, H, T], and causality.
    """
    masks: list[Mask] = []
    if mask is not None and mask.is_causal:
        masks.append(Causal(offset=0))
    if mask is not None and mask.bool_mask is not None:
        masks.append(Dense(flattened_scores("mask", mask.bool_mask, batch)))
    for name, seen in _RANGES.items():
        table = None if mask is None else getattr(mask, name)
        if table is None:
            continue
        # Ranges by query become [B, H, T, 1], ranges by key [B, H, 1, S].
        table = jnp.expand_dims(table, -2 if name.startswith("q_") else -1)
        table = flattened_scores(name, table, batch)
        if name == "k_end" and table.shape == (math.prod(batch), 1, 1, 1):
            masks.append(Lengths(table[:, 0, 0, 0]))
        else:
            masks.append(MaskFn(seen, (table,)))
    return functools.reduce(operator.and_, masks) if masks else None


def _at(table: jax.Array, *index: Any) -> Any:
    """An element of a table; axes of size 1 are broadcast."""
    return table[tuple(i if size > 1 else 0 for i, size in zip(index, table.shape, strict=True))]


_RANGES: dict[str, Callable[..., Any]] = {
    "q_start": lambda b, h, q, kv, table: q >= _at(table, b, h, q, kv),
    "q_end": lambda b, h, q, kv, table: q < _at(table, b, h, q, kv),
    "k_start": lambda b, h, q, kv, table: kv >= _at(table, b, h, q, kv),
    "k_end": lambda b, h, q, kv, table: kv < _at(table, b, h, q, kv),
}
