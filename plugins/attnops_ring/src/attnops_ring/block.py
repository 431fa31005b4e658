"""Attention of one device's queries over the keys at hand, by the operation that serves its platform."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops import OperationMetadata, OperationRegistry
from attnops.kernels.parts import Partial, Share, joined, none_seen, partial, share
from attnops_ring.pieces import Stretch, piece_of_bias, piece_of_key, piece_of_mask, sees_any


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

    def stretch(self, device: Any, number: int, size: int, length: int) -> Stretch:
        """A stretch of a device: for two, one from the front, and its mirror from the back."""
        if self.stride > 1:
            return Stretch(device, size, self.stride, length)
        place = device if number == 0 else 2 * self.devices - 1 - device
        return Stretch(place * size, size, 1, length)

    def queries(self, query: jax.Array, device: Any) -> list[Stretch]:
        """The stretches of a device's queries."""
        if self.queries_are_whole:
            return [Stretch(0, query.shape[1], 1, self.T)]
        n = self.stretches
        return [self.stretch(device, i, query.shape[1] // n, self.T) for i in range(n)]

    def keys(self, key: jax.Array, device: Any) -> list[Stretch]:
        """Those of its keys."""
        if self.keys_are_whole:
            return [Stretch(0, key.shape[1], 1, self.S)]
        n = self.stretches
        return [self.stretch(device, i, key.shape[1] // n, self.S) for i in range(n)]

    @property
    def operation(self) -> Any:
        """What computes."""
        return OperationRegistry.create("flash", self.metadata)


def block(
    inner: Inner, query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras, here: Any, there: Any
) -> Partial:
    """Of the queries of device ``here`` over the keys of device ``there``; stretches that see nothing are skipped.

    Args:
        inner: how.
        query: [B, t, H, D].
        key: [B, s, K, D].
        value: [B, s, K, Dv].
        extras: what scores depend on beside these.
        here: the device's number, an integer array [].
        there: likewise.
    """
    rows = []
    for i, q in enumerate(inner.queries(query, here)):
        parts = []
        for j, kv in enumerate(inner.keys(key, there)):
            mask = piece_of_mask(extras.mask, q, kv, inner.is_padded)

            def compute(qkv: Any, mask: Any, extras: Extras, q: Stretch = q, kv: Stretch = kv) -> Partial:
                return partial(inner.operation, *qkv, **_options(inner, mask, extras, q, kv))

            given = q.cut(query, i), kv.cut(key, j), kv.cut(value, j)
            due = sees_any(mask, q.size, kv.size)
            if due is True:
                parts.append(compute(given, mask, extras))
            else:
                parts.append(lax.cond(due, compute, lambda qkv, *_: none_seen(qkv[0], qkv[2]), given, mask, extras))
        rows.append(functools.reduce(joined, parts))
    return rows[0] if len(rows) == 1 else Partial(
        jnp.concatenate([row.out for row in rows], axis=1), jnp.concatenate([row.lse for row in rows], axis=2)
    )  # fmt: skip


class Gradients(NamedTuple):
    """Gradients, all float32; of a bias, for each of its arrays that may have one, else None.

    Attributes:
        query: [B, t, H, D].
        key: [B, s, K, D].
        value: [B, s, K, Dv].
        bias: of the bias's structure, or None where none is wanted.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: Any


def no_gradients(query: jax.Array, key: jax.Array, value: jax.Array, bias: Any) -> Gradients:
    """To begin a sum with."""

    def wide(x: Any) -> Any:
        return jnp.zeros_like(x, dtype=jnp.float32) if jnp.issubdtype(x.dtype, jnp.inexact) else None

    return Gradients(wide(query), wide(key), wide(value), jax.tree.map(wide, bias))


def added(total: Any, more: Any) -> Any:
    """A sum of float32 gradients and further ones, of any dtype; None where there is none."""
    return jax.tree.map(
        lambda a, b: None if a is None else a + b.astype(jnp.float32), total, more, is_leaf=lambda x: x is None
    )


def block_gradients(
    inner: Inner, query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras, here: Any, there: Any,
    lse: jax.Array, cotangents: Share, wants_bias: bool,
) -> Gradients:  # fmt: skip
    """What `block` gives to the gradients of a softmax over all devices' keys, whose logsumexp is known.

    Args:
        inner: see `block`.
        query: likewise.
        key: likewise.
        value: likewise.
        extras: likewise.
        here: likewise.
        there: likewise.
        lse: [B, H, t], of all keys.
        cotangents: of what these keys give to the output, and of their weight.
        wants_bias: whether the bias has a gradient.
    """
    bias = extras.bias if wants_bias else None
    total = no_gradients(query, key, value, bias)
    for i, q in enumerate(inner.queries(query, here)):
        rows = slice(i * q.size, (i + 1) * q.size)
        d = Share(cotangents.out[:, rows], cotangents.weight[:, :, rows])
        for j, kv in enumerate(inner.keys(key, there)):
            mask = piece_of_mask(extras.mask, q, kv, inner.is_padded)

            def compute(
                total: Gradients, qkv: Any, lse: Any, d: Share, mask: Any, extras: Extras, q: Stretch = q,
                kv: Stretch = kv, rows: slice = rows, i: int = i, j: int = j,
            ) -> Gradients:  # fmt: skip
                def given(query: Any, key: Any, value: Any, bias: Any) -> Share:
                    with_bias = extras._replace(bias=bias) if wants_bias else extras
                    return share(inner.operation, query, key, value, lse, **_options(inner, mask, with_bias, q, kv))

                more = jax.vjp(given, *qkv, extras.bias if wants_bias else None)[1](d)
                columns = slice(j * kv.size, (j + 1) * kv.size)
                return Gradients(
                    total.query.at[:, rows].add(more[0].astype(jnp.float32)),
                    total.key.at[:, columns].add(more[1].astype(jnp.float32)),
                    total.value.at[:, columns].add(more[2].astype(jnp.float32)),
                    added(total.bias, more[3]),
                )

            operands = total, (q.cut(query, i), kv.cut(key, j), kv.cut(value, j)), lse[:, :, rows], d, mask, extras
            due = sees_any(mask, q.size, kv.size)
            total = compute(*operands) if due is True else lax.cond(due, compute, lambda total, *_: total, *operands)
    return total


def _options(inner: Inner, mask: Any, extras: Extras, q: Stretch, kv: Stretch) -> dict[str, Any]:
    """Of the call for a stretch of queries and one of keys."""
    return {
        "mask": mask,
        "bias": piece_of_bias(extras.bias, q, kv),
        "softmax_scale": inner.scale,
        "logits_soft_cap": inner.cap,
        "dropout_key": piece_of_key(extras.dropout_key, q, kv),
    }
