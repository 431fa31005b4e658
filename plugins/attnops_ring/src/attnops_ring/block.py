"""Attention of one device's queries over the keys at hand, by the operation that serves its platform."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops import OperationMetadata, OperationRegistry
from attnops.kernels import inexact_vjp
from attnops.softmax import Contribution, PartialSoftmax, identity, merge
from attnops_ring.pieces import Stretch, piece_of_bias, piece_of_key, piece_of_mask, sees_any

Arrays = Sequence[jax.Array]


class Extras(NamedTuple):
    """What scores depend on beside query and key, of the whole sequence.

    Attributes:
        mask: bound, or None.
        bias: bound, an array, or None.
        dropout_key: a `ShiftedKey`, or None.
    """

    mask: Any
    bias: Any
    dropout_key: Any


@dataclasses.dataclass(frozen=True)
class Inner:
    """How the devices compute. Static and hashable.

    Attributes:
        metadata: of the operation, without a mesh.
        scale: the softmax scale, or None.
        cap: the soft cap, or None.
        T, S: tokens of the whole call, padding left out.
        stride: see `Stretch`.
        devices: that the sequence is cut for.
        stretches: that each of them has.
        is_padded: whether there may be keys beyond the last.
        keys_are_whole: whether keys are all of the sequence's, in its order.
        queries_are_whole: whether queries are, likewise.
        queries_are_padded: whether there may be queries beyond the last.
    """

    metadata: OperationMetadata
    scale: float | None
    cap: float | None
    T: int
    S: int
    stride: int
    devices: int
    stretches: int
    is_padded: bool
    keys_are_whole: bool = False
    queries_are_whole: bool = False
    queries_are_padded: bool = False

    def _stretch(self, device: Any, number: int, size: int, length: int) -> Stretch:
        """A stretch of a device: for two, one from the front, and its mirror from the back."""
        if self.stride > 1:
            return Stretch(device, size, self.stride, length)
        place = device if number == 0 else 2 * self.devices - 1 - device
        return Stretch(place * size, size, 1, length)

    def queries(self, query: jax.Array) -> list[jax.Array]:
        """A device's queries by stretch."""
        return jnp.split(query, 1 if self.queries_are_whole else self.stretches, axis=1)

    def keys(self, x: jax.Array) -> list[jax.Array]:
        """A device's keys, or values, by stretch."""
        return jnp.split(x, 1 if self.keys_are_whole else self.stretches, axis=1)

    def of_queries(self, device: Any, number: int, size: int) -> Stretch:
        """Where queries stand."""
        return Stretch(0, size, 1, self.T) if self.queries_are_whole else self._stretch(device, number, size, self.T)

    def of_keys(self, device: Any, number: int, size: int) -> Stretch:
        """Where keys stand."""
        return Stretch(0, size, 1, self.S) if self.keys_are_whole else self._stretch(device, number, size, self.S)

    @property
    def operation(self) -> Any:
        """What computes."""
        return OperationRegistry.create("flash", self.metadata)


def block(
    inner: Inner, queries: Arrays, keys: Arrays, values: Arrays, extras: Extras, here: Any, there: Any,
    seen: Sequence[PartialSoftmax] | None = None,
) -> list[PartialSoftmax]:  # fmt: skip
    """Of the queries of device ``here`` over the keys of device ``there``; stretches that see nothing are skipped.

    Args:
        inner: how.
        queries: by stretch, each [B, t, H, D].
        keys: likewise, [B, s, K, D].
        values: likewise, [B, s, K, Dv].
        extras: what scores depend on beside these.
        here: the device's number, an integer array [].
        there: likewise.
        seen: what the queries have seen before, by stretch.

    Returns:
        What they have seen now, by stretch.
    """
    rows = []
    for i, query in enumerate(queries):
        q = inner.of_queries(here, i, query.shape[1])
        parts = [] if seen is None else [seen[i]]
        for j, (key, value) in enumerate(zip(keys, values, strict=True)):
            kv = inner.of_keys(there, j, key.shape[1])
            mask = piece_of_mask(extras.mask, q, kv, inner.is_padded, inner.queries_are_padded)

            def compute(qkv: Any, mask: Any, extras: Extras, q: Stretch = q, kv: Stretch = kv) -> PartialSoftmax:
                found: PartialSoftmax = inner.operation.partial(*qkv, **_options(inner, mask, extras, q, kv))
                return found

            given = (query, key, value), mask, extras
            due = for_any(sees_any(mask, q.size, kv.size))
            if due is True:
                parts.append(compute(*given))
            else:
                parts.append(lax.cond(due, compute, lambda qkv, *_: identity(qkv[0], qkv[2]), *given))
        rows.append(parts[0] if len(parts) == 1 else merge(*parts))
    return rows


def together(rows: Sequence[PartialSoftmax]) -> PartialSoftmax:
    """`PartialSoftmax` of all of a device's queries, of those of its stretches."""
    if len(rows) == 1:
        return rows[0]
    outs, *others = zip(*rows, strict=True)
    return PartialSoftmax(jnp.concatenate(outs, axis=1), *(jnp.concatenate(x, axis=2) for x in others))


class LogSumExp(NamedTuple):
    """The logsumexp over all keys, float32 [B, H, t], and its rounding error."""

    lse: jax.Array
    lse_residual: jax.Array


class Gradients(NamedTuple):
    """Gradients, all float32.

    Attributes:
        queries: by stretch, each [B, t, H, D].
        keys: likewise, [B, s, K, D].
        values: likewise, [B, s, K, Dv].
        bias: of the bias's structure, None for an array that has none; or None where none is wanted.
    """

    queries: list[jax.Array]
    keys: list[jax.Array]
    values: list[jax.Array]
    bias: Any


def added(total: Any, more: Any) -> Any:
    """A sum of float32 gradients and further ones, of any dtype; None where there is none."""
    return jax.tree.map(
        lambda a, b: None if a is None else a + b.astype(jnp.float32), total, more, is_leaf=lambda x: x is None
    )


def block_gradients(
    inner: Inner, queries: Arrays, keys: Arrays, values: Arrays, extras: Extras, here: Any, there: Any,
    wholes: Sequence[LogSumExp], cotangents: Sequence[Contribution], wants_bias: bool,
) -> Gradients:  # fmt: skip
    """What `block` gives to the gradients of a softmax over all devices' keys, whose logsumexp is known.

    Args:
        inner: see `block`.
        queries: likewise.
        keys: likewise.
        values: likewise.
        extras: likewise.
        here: likewise.
        there: likewise.
        wholes: the logsumexp over all keys, by stretch of queries.
        cotangents: by stretch of queries, of what these keys give to the output, and of their weight.
        wants_bias: whether the bias has a gradient.
    """
    learnt = extras.bias if wants_bias else None
    found = Gradients(*(jax.tree.map(_wide_zeros, x) for x in (list(queries), list(keys), list(values), learnt)))
    for i, query in enumerate(queries):
        q = inner.of_queries(here, i, query.shape[1])
        for j, (key, value) in enumerate(zip(keys, values, strict=True)):
            kv = inner.of_keys(there, j, key.shape[1])
            mask = piece_of_mask(extras.mask, q, kv, inner.is_padded, inner.queries_are_padded)

            def compute(
                before: Any, qkv: Any, whole: LogSumExp, d: Contribution, mask: Any, extras: Extras,
                q: Stretch = q, kv: Stretch = kv,
            ) -> Any:  # fmt: skip
                options = _options(inner, mask, extras, q, kv)
                *more, d_bias = inner.operation.partial_vjp(*qkv, *whole, d, wants_bias=wants_bias, **options)
                if wants_bias:
                    d_bias = inexact_vjp(lambda bias: piece_of_bias(bias, q, kv), extras.bias)(d_bias)
                return added(before, (*more, d_bias))

            before = found.queries[i], found.keys[j], found.values[j], found.bias
            operands = before, (query, key, value), wholes[i], cotangents[i], mask, extras
            due = for_any(sees_any(mask, q.size, kv.size))
            after = compute(*operands) if due is True else lax.cond(due, compute, lambda before, *_: before, *operands)
            found.queries[i], found.keys[j], found.values[j] = after[:3]
            found = found._replace(bias=after[3])
    return found


def _wide_zeros(x: jax.Array) -> jax.Array | None:
    """To begin a sum with; None for what has no gradient."""
    return jnp.zeros_like(x, dtype=jnp.float32) if jnp.issubdtype(x.dtype, jnp.inexact) else None


def for_any(due: Any) -> Any:
    """A condition under which to compute, of mapped calls the same for all: else `jax.vmap` would compute both ways."""
    if due is True:
        return True

    @jax.custom_batching.custom_vmap
    def any_of(due: jax.Array) -> jax.Array:
        return due

    @any_of.def_vmap
    def _(size: int, in_batched: Any, due: jax.Array) -> tuple[jax.Array, bool]:
        return for_any(due.any(0)), False

    return any_of(due)


def _options(inner: Inner, mask: Any, extras: Extras, q: Stretch, kv: Stretch) -> dict[str, Any]:
    """Of the call for a stretch of queries and one of keys."""
    return {
        "mask": mask,
        "bias": piece_of_bias(extras.bias, q, kv),
        "softmax_scale": inner.scale,
        "logits_soft_cap": inner.cap,
        "dropout_key": piece_of_key(extras.dropout_key, q, kv),
    }


def at_once(
    inner: Inner, query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras, here: Any, there: Any
) -> PartialSoftmax:
    """`block`, of and for tokens that are not taken apart."""
    stretches = inner.queries(query), inner.keys(key), inner.keys(value)
    return together(block(inner, *stretches, extras, here, there))
