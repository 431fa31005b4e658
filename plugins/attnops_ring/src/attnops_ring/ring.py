"""Ring attention: keys and values rotate through all devices (Liu et al. 2023, arXiv:2310.01889).

Derivatives are computed by `attnops.kernels.attend`. The forward pass saves only the output and its logsumexp; the
backward pass rotates keys and values again, together with their gradients.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from attnops.kernels import Passes, ReverseInputs, attend
from attnops.softmax import Contribution, PartialSoftmax, contribution, identity
from attnops_ring.block import Chunks, Extras, Inner, LogSumExp, add, block, block_gradients, concatenate

if TYPE_CHECKING:
    from attnops.kernels import Result
    from attnops.typing import Index, Leaf, PyTree

Axis = str | tuple[str, ...]


def rotate(x: Leaf, axis: Axis, shift: int, devices: int) -> PyTree:
    """Sends every array of ``x`` to the device ``shift`` further along the mesh axes, cyclically."""
    pairs = [(i, (i + shift) % devices) for i in range(devices)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), x)


def ring(
    inner: Inner, axis: Axis, hops: int, query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras
) -> PartialSoftmax:
    """Attention over all keys, inside `jax.shard_map`, without sinks.

    Args:
        inner: how devices compute.
        axis: the mesh axes that shard the sequence.
        hops: the number of devices whose keys a device needs, itself included; all other keys are fully masked.
        query: [B, t, H, D], this device's shard.
        key: [B, s, K, D], this device's shard.
        value: [B, s, K, Dv], this device's shard.
        extras: mask, bias and dropout key, varying over the same mesh axes.
    """
    given = query, key, value, extras.bias
    arrays, tree = jax.tree.flatten((given, (extras.mask, extras.dropout_key)))
    out, statistics, *highest = attend(RingPasses(inner, axis, hops, tree, len(jax.tree.leaves(given))), arrays)
    return PartialSoftmax(out, *statistics, *highest)


@dataclasses.dataclass(frozen=True, eq=False)
class RingPasses(Passes):
    """The passes of a call.

    Attributes:
        inner: how devices compute.
        axis: the mesh axes that shard the sequence.
        hops: the number of devices whose keys a device needs.
        tree: the structure of the arrays: query, key, value and bias; mask and dropout key.
        differentiable: the number of arrays in query, key, value and bias.
    """

    inner: Inner
    axis: Axis
    hops: int
    tree: PyTree
    differentiable: int

    def _given(self, arrays: list[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array, Extras]:
        (query, key, value, bias), (mask, dropout_key) = jax.tree.unflatten(self.tree, arrays)
        return query, key, value, Extras(mask, bias, dropout_key)

    def forward(self, arrays: list[jax.Array]) -> Result:
        inner, n, here = self.inner, self.inner.devices, lax.axis_index(self.axis)
        query, key, value, extras = self._given(arrays)
        # Split once here, rather than in every hop.
        queries, keys, values = inner.split(query, key, value)

        def hop(r: Index, state: tuple[PyTree, PyTree, PyTree]) -> tuple[PyTree, PyTree, PyTree]:
            k, v, seen = state
            # Send before computing, so that the computation hides the transfer.
            sent = rotate((k, v), self.axis, 1, n)
            return (*sent, block(inner, Chunks(queries, k, v), extras, here, (here - r) % n, seen))

        seen = [identity(x, value, inner.max_logits) for x in queries]
        k, v, seen = lax.fori_loop(0, self.hops - 1, hop, (keys, values, seen))
        last = (here - (self.hops - 1)) % n
        out, lse, residual, highest = concatenate(block(inner, Chunks(queries, k, v), extras, here, last, seen))
        return out, (lse, residual), *jax.tree.leaves(highest)

    def contribution(self, arrays: list[jax.Array], lse: jax.Array, lse_residual: jax.Array) -> Contribution:
        inner, n, here = self.inner, self.inner.devices, lax.axis_index(self.axis)
        query, key, value, extras = self._given(arrays)

        @jax.checkpoint
        def term(query: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, r: Index) -> Contribution:
            seen = block(inner, inner.split(query, k, v), extras, here, (here - r) % n)
            return contribution(concatenate(seen), lse, lse_residual)

        def hop(state: tuple[PyTree, Contribution], r: Index) -> tuple[tuple[PyTree, Contribution], None]:
            (k, v), total = state
            sent = rotate((k, v), self.axis, 1, n)
            return (sent, jax.tree.map(jnp.add, total, term(query, k, v, extras, r))), None

        start = (key, value), contribution(identity(query, value), lse, lse_residual)
        return lax.scan(hop, start, jnp.arange(self.hops))[0][1]

    def gradients(self, wanted: tuple[int, ...], arrays: list[jax.Array], given: ReverseInputs) -> list[jax.Array]:
        out, statistics, d_out, d_lse = given
        inner, n, here = self.inner, self.inner.devices, lax.axis_index(self.axis)
        query, key, value, extras = self._given(arrays)
        wants_bias = any(i > 2 for i in wanted)
        # Split once here, rather than in every hop.
        queries, d_outs = inner.split_queries(query), inner.split_queries(d_out)
        d_weight = d_lse if out is None else d_lse - (d_out * out).sum(-1).swapaxes(1, 2)
        lses, lse_residuals, d_weights = (jnp.split(x, len(d_outs), axis=2) for x in (*statistics, d_weight))
        lse = [LogSumExp(*x) for x in zip(lses, lse_residuals, strict=True)]
        d = [Contribution(*x) for x in zip(d_outs, d_weights, strict=True)]

        def gradients(k: jax.Array, v: jax.Array, r: Index) -> tuple[PyTree, jax.Array, jax.Array]:
            """This hop's gradients of the chunks of queries and of the bias, of the keys, and of the values."""
            chunks = Chunks(queries, inner.split_keys(k), inner.split_keys(v))
            more = block_gradients(inner, chunks, extras, here, (here - r) % n, lse, d, wants_bias)
            return (more.queries, more.bias), jnp.concatenate(more.keys, axis=1), jnp.concatenate(more.values, axis=1)

        def hop(r: Index, state: PyTree) -> PyTree:
            k, v, (query_gradients, dk, dv) = state
            # Send before computing, so that the computation hides the transfer. Keys and values go to the device that
            # computes with them next; the gradients that this device computed in the previous hop follow their keys.
            # The last hop sends keys and values to a device that does not need them. There are only four arrays, since
            # XLA overlaps at most five transfers.
            k_sent, v_sent, dk, dv = rotate((k, v, dk, dv), self.axis, 1, n)
            more = gradients(k, v, r)
            return k_sent, v_sent, (add(query_gradients, more[0]), dk + more[1], dv + more[2])

        k, v = rotate((key, value), self.axis, 1, n) if self.hops > 1 else (key, value)
        _, _, ((dq, d_bias), dk, dv) = lax.fori_loop(1, self.hops, hop, (k, v, gradients(key, value, 0)))
        # Gradients go from the last device back to the one that has their keys.
        dk, dv = rotate((dk, dv), self.axis, -(self.hops - 1), n)
        of_bias: PyTree = jax.tree.structure(extras.bias)
        results = [jnp.concatenate(dq, axis=1), dk, dv, *(of_bias.flatten_up_to(d_bias) if wants_bias else ())]
        return [results[i] for i in wanted]
