"""Attention of one device's queries over the keys that it holds at one hop, by the operation for its platform."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops import OperationMetadata, OperationRegistry
from attnops.kernels import inexact_vjp
from attnops.softmax import Contribution, PartialSoftmax, identity, merge
from attnops_ring.orders import Order, chunk_ids, chunks_per_device
from attnops_ring.slices import Chunk, sees_any, slice_bias, slice_dropout_key, slice_mask

if TYPE_CHECKING:
    from attnops.masks import Mask
    from attnops.typing import BoolArray, Index, PyTree


class Extras(NamedTuple):
    """What scores depend on besides query and key; all refer to the whole sequence.

    Attributes:
        mask: the bound mask, or None.
        bias: the bound bias, an array, or None.
        dropout_key: a `ShiftedKey`, or None.
    """

    mask: Mask | None
    bias: PyTree
    dropout_key: PyTree


class Chunks(NamedTuple):
    """The operands of one block, by chunk.

    Attributes:
        queries: a list of chunks, each [B, t, H, D].
        keys: a list of chunks, each [B, s, K, D].
        values: a list of chunks, each [B, s, K, Dv].
    """

    queries: Sequence[jax.Array]
    keys: Sequence[jax.Array]
    values: Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Inner:
    """How the devices compute. Static and hashable.

    Attributes:
        metadata: the operation's metadata, without a mesh.
        scale: the softmax scale, or None.
        cap: the soft cap, or None.
        T: queries of the call, without padding.
        S: keys of the call, without padding.
        order: the layout of the tokens on devices: "contiguous", "zigzag" or "striped".
        devices: the number of devices along the axes that shard the sequence.
        is_padded: whether the keys may include padding.
        has_all_keys: whether the device has all keys, in the order of the sequence.
        has_all_queries: whether the device has all queries, in the order of the sequence.
        queries_are_padded: whether the queries may include padding.
        max_logits: whether the largest scores are asked for.
    """

    metadata: OperationMetadata
    scale: float | None
    cap: float | None
    T: int
    S: int
    order: Order
    devices: int
    is_padded: bool
    has_all_keys: bool = False
    has_all_queries: bool = False
    queries_are_padded: bool = False
    max_logits: bool = False

    @property
    def chunks(self) -> int:
        """Chunks per device."""
        return chunks_per_device(self.order)

    def split(self, query: jax.Array, key: jax.Array, value: jax.Array) -> Chunks:
        """A device's queries [B, t, H, D], keys [B, s, K, D] and values [B, s, K, Dv] by chunk."""
        return Chunks(self.split_queries(query), self.split_keys(key), self.split_keys(value))

    def split_queries(self, x: jax.Array) -> list[jax.Array]:
        """A device's queries, or their cotangents, by chunk along axis 1."""
        return jnp.split(x, 1 if self.has_all_queries else self.chunks, axis=1)

    def split_keys(self, x: jax.Array) -> list[jax.Array]:
        """A device's keys, or values, by chunk along axis 1."""
        return jnp.split(x, 1 if self.has_all_keys else self.chunks, axis=1)

    def query_chunk(self, device: Index, number: int, size: int) -> Chunk:
        """The positions of a device's chunk of ``size`` queries."""
        return Chunk(0, size, 1, self.T) if self.has_all_queries else self._chunk(device, number, size, self.T)

    def key_chunk(self, device: Index, number: int, size: int) -> Chunk:
        """The positions of a device's chunk of ``size`` keys."""
        return Chunk(0, size, 1, self.S) if self.has_all_keys else self._chunk(device, number, size, self.S)

    def _chunk(self, device: Index, number: int, size: int, length: int) -> Chunk:
        if self.order == "striped":
            return Chunk(device, size, self.devices, length)
        return Chunk(chunk_ids(device, self.devices, self.chunks)[number] * size, size, 1, length)

    @property
    def operation(self) -> Any:
        """The operation that computes on a device."""
        return OperationRegistry.create("flash", self.metadata)


def block(
    inner: Inner,
    chunks: Chunks,
    extras: Extras,
    here: Index,
    there: Index,
    seen: Sequence[PartialSoftmax] | None = None,
) -> list[PartialSoftmax]:
    """Attention of the queries of device ``here`` over the keys of device ``there``; fully masked chunks are skipped.

    Args:
        inner: how devices compute.
        chunks: the queries, keys and values.
        extras: mask, bias and dropout key.
        here: the device that has the queries, an integer array [].
        there: the device whose keys these are, an integer array [].
        seen: partial softmaxes over keys seen before, by chunk of queries; None for none.

    Returns:
        The partial softmaxes over these keys and the keys seen before, by chunk of queries.
    """
    rows = []
    for i, query in enumerate(chunks.queries):
        q = inner.query_chunk(here, i, query.shape[1])
        partials = [] if seen is None else [seen[i]]
        for j, (key, value) in enumerate(zip(chunks.keys, chunks.values, strict=True)):
            kv = inner.key_chunk(there, j, key.shape[1])
            mask = slice_mask(extras.mask, q, kv, inner.is_padded, inner.queries_are_padded)

            def compute(qkv: PyTree, mask: Mask | None, extras: Extras, q: Chunk = q, kv: Chunk = kv) -> PartialSoftmax:
                partial: PartialSoftmax = inner.operation.partial(
                    *qkv, **_options(inner, mask, extras, q, kv), return_max_logits=inner.max_logits
                )
                return partial

            operands = (query, key, value), mask, extras
            is_active = any_in_batch(sees_any(mask, q.size, kv.size))
            if is_active is True:
                partials.append(compute(*operands))
            else:
                partials.append(
                    lax.cond(is_active, compute, lambda qkv, *_: identity(qkv[0], qkv[2], inner.max_logits), *operands)
                )
        rows.append(partials[0] if len(partials) == 1 else merge(*partials))
    return rows


def concatenate(rows: Sequence[PartialSoftmax]) -> PartialSoftmax:
    """The `PartialSoftmax` of all of a device's queries, from the ones of its chunks."""
    if len(rows) == 1:
        return rows[0]
    out = jnp.concatenate([row.out for row in rows], axis=1)
    by_query = jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *(row[1:] for row in rows))
    return PartialSoftmax(out, *by_query)


class LogSumExp(NamedTuple):
    """The logsumexp over all keys, float32 [B, H, t], and its rounding error."""

    lse: jax.Array
    lse_residual: jax.Array


class BlockGradients(NamedTuple):
    """Gradients, all float32.

    Attributes:
        queries: by chunk, each [B, t, H, D].
        keys: by chunk, each [B, s, K, D].
        values: by chunk, each [B, s, K, Dv].
        bias: a pytree like the bias, with None for arrays without gradient; None if the bias has no gradient.
    """

    queries: list[jax.Array]
    keys: list[jax.Array]
    values: list[jax.Array]
    bias: PyTree


def add(total: PyTree, more: PyTree) -> PyTree:
    """The sum of float32 gradients and further gradients of any dtype; None where there is no gradient."""
    return jax.tree.map(
        lambda a, b: None if a is None else a + b.astype(jnp.float32), total, more, is_leaf=lambda x: x is None
    )


def block_gradients(
    inner: Inner, chunks: Chunks, extras: Extras, here: Index, there: Index, lse: Sequence[LogSumExp],
    cotangents: Sequence[Contribution], wants_bias: bool,
) -> BlockGradients:  # fmt: skip
    """One block's terms of the gradients of a softmax over all devices' keys, from its global logsumexp.

    Args:
        inner: how devices compute.
        chunks: the queries, keys and values.
        extras: mask, bias and dropout key.
        here: the device that has the queries, an integer array [].
        there: the device whose keys these are, an integer array [].
        lse: the logsumexp over all keys, by chunk of queries.
        cotangents: by chunk of queries, the cotangents of these keys' contribution to the output and of its weight.
        wants_bias: whether the bias has a gradient.
    """
    bias = extras.bias if wants_bias else None
    total = BlockGradients(*(jax.tree.map(_float32_zeros, x) for x in (*map(list, chunks), bias)))
    for i, query in enumerate(chunks.queries):
        q = inner.query_chunk(here, i, query.shape[1])
        for j, (key, value) in enumerate(zip(chunks.keys, chunks.values, strict=True)):
            kv = inner.key_chunk(there, j, key.shape[1])
            mask = slice_mask(extras.mask, q, kv, inner.is_padded, inner.queries_are_padded)

            def compute(
                before: PyTree, qkv: PyTree, lse: LogSumExp, d: Contribution, mask: Mask | None, extras: Extras,
                q: Chunk = q, kv: Chunk = kv,
            ) -> PyTree:  # fmt: skip
                options = _options(inner, mask, extras, q, kv)
                *more, d_bias = inner.operation.partial_vjp(*qkv, *lse, d, wants_bias=wants_bias, **options)
                if wants_bias:
                    d_bias = inexact_vjp(lambda bias: slice_bias(bias, q, kv), extras.bias)(d_bias)
                return add(before, (*more, d_bias))

            before = total.queries[i], total.keys[j], total.values[j], total.bias
            operands = before, (query, key, value), lse[i], cotangents[i], mask, extras
            is_active = any_in_batch(sees_any(mask, q.size, kv.size))
            if is_active is True:
                after = compute(*operands)
            else:
                after = lax.cond(is_active, compute, lambda before, *_: before, *operands)
            total.queries[i], total.keys[j], total.values[j] = after[:3]
            total = total._replace(bias=after[3])
    return total


def _float32_zeros(x: jax.Array) -> jax.Array | None:
    """The initial value of a sum of gradients; None for an array without gradient."""
    return jnp.zeros_like(x, dtype=jnp.float32) if jnp.issubdtype(x.dtype, jnp.inexact) else None


def any_in_batch(condition: BoolArray) -> BoolArray:
    """A condition that under `jax.vmap` is true for the whole batch if it is true for any element.

    With a condition per element `lax.cond` would run both branches.
    """
    if condition is True:
        return True

    @jax.custom_batching.custom_vmap
    def any_of(condition: jax.Array) -> jax.Array:
        return condition

    @any_of.def_vmap
    def _(size: int, in_batched: PyTree, condition: jax.Array) -> tuple[BoolArray, bool]:
        return any_in_batch(condition.any(0)), False

    return any_of(condition)


def _options(inner: Inner, mask: Mask | None, extras: Extras, q: Chunk, kv: Chunk) -> dict[str, Any]:
    """The keyword arguments of a device's operation for a chunk of queries and a chunk of keys."""
    return {
        "mask": mask,
        "bias": slice_bias(extras.bias, q, kv),
        "softmax_scale": inner.scale,
        "logits_soft_cap": inner.cap,
        "dropout_key": slice_dropout_key(extras.dropout_key, q, kv),
    }


def whole_block(
    inner: Inner, query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras, here: Index, there: Index
) -> PartialSoftmax:
    """`block` for queries, keys and values that are not split into chunks yet."""
    return concatenate(block(inner, inner.split(query, key, value), extras, here, there))
