"""Attention of one device's queries over the keys at hand, by the operation that serves its platform."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnops import OperationMetadata, OperationRegistry
from attnops_ring.pieces import Stretch, piece_of_bias, piece_of_key, piece_of_mask, sees_any


class Partial(NamedTuple):
    """What is known of a softmax when some of its keys have been seen.

    Attributes:
        out: the output so far, float32 [B, t, H, Dv].
        lse: its logsumexp, float32 [B, H, t]; −inf where nothing was seen.
    """

    out: jax.Array
    lse: jax.Array


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


def none_seen(query: jax.Array, value: jax.Array) -> Partial:
    """Of a softmax before it has seen a key."""
    B, t, H, _ = query.shape
    out = jnp.zeros_like(query, shape=(B, t, H, value.shape[3]), dtype=jnp.float32)
    return Partial(out, jnp.full_like(query, -jnp.inf, shape=(B, H, t), dtype=jnp.float32))


def joined(a: Partial, b: Partial) -> Partial:
    """Two softmaxes over different keys as one over all of them."""
    top = lax.stop_gradient(jnp.maximum(a.lse, b.lse))
    base = jnp.where(top == -jnp.inf, 0.0, top)
    weights = [jnp.exp(x.lse - base) for x in (a, b)]
    total = weights[0] + weights[1]
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    shares = ((w / safe).swapaxes(1, 2)[..., None] for w in weights)
    out = sum(x.out * share for x, share in zip((a, b), shares, strict=True))
    return Partial(out, jnp.where(seen, base + jnp.log(safe), -jnp.inf))  # type: ignore[arg-type]


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
    n = 1 if inner.queries_are_whole else inner.stretches
    n_kv = 1 if inner.keys_are_whole else inner.stretches
    t, s = query.shape[1] // n, key.shape[1] // n_kv
    rows = []
    for i in range(n):
        q = Stretch(0, t, 1, inner.T) if inner.queries_are_whole else inner.stretch(here, i, t, inner.T)
        q_ = query[:, i * t : (i + 1) * t]
        parts = []
        for j in range(n_kv):
            kv = Stretch(0, s, 1, inner.S) if inner.keys_are_whole else inner.stretch(there, j, s, inner.S)
            mask = piece_of_mask(extras.mask, q, kv, inner.is_padded)
            given = (q_, key[:, j * s : (j + 1) * s], value[:, j * s : (j + 1) * s])
            parts.append(_piece(inner, given, mask, extras, q, kv))
        rows.append(functools.reduce(joined, parts))
    return rows[0] if n == 1 else Partial(
        jnp.concatenate([row.out for row in rows], axis=1), jnp.concatenate([row.lse for row in rows], axis=2)
    )  # fmt: skip


def _piece(inner: Inner, qkv: tuple[Any, Any, Any], mask: Any, extras: Extras, q: Stretch, kv: Stretch) -> Partial:
    operation: Any = OperationRegistry.create("flash", inner.metadata)

    def compute(qkv: tuple[Any, Any, Any], mask: Any, extras: Extras) -> Partial:
        found = operation(
            *qkv, mask=mask, bias=piece_of_bias(extras.bias, q, kv), softmax_scale=inner.scale,
            logits_soft_cap=inner.cap, dropout_key=piece_of_key(extras.dropout_key, q, kv), return_lse=True,
        )  # fmt: skip
        return Partial(found.attention_outputs.astype(jnp.float32), found.logsumexp)

    due = sees_any(mask, q.size, kv.size)
    if due is True:
        return compute(qkv, mask, extras)
    return lax.cond(due, compute, lambda qkv, mask, extras: none_seen(qkv[0], qkv[2]), qkv, mask, extras)
