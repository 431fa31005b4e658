"""RingAttention: the operation for sequences that a mesh cuts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops import (
    AttentionRequest,
    Call,
    Limits,
    OperationImpl,
    OperationOutput,
    OperationRegistry,
    Rank,
    Reason,
    Request,
    UnsupportedError,
    forward_for,
)
from attnops.kernels import REVERSE_ONLY, equally_varying, reverse_mode_only
from attnops.masks import Mask, block_map
from attnops.operations.flash import FlashAttention
from attnops.partition import Boundary, mesh_of_types, run_in_parts, uncut
from attnops.sharding import KV_LENGTH, get_names_from_partition_spec
from attnops.softmax import PartialSoftmax, with_sinks
from attnops_ring.block import Extras, Inner, at_once
from attnops_ring.gather import (
    all_gather,
    heads_for_tokens,
    in_order,
    in_sequence,
    some_heads,
    spread_kv_heads,
    tokens_for_heads,
)
from attnops_ring.orders import Order, check_order, stretches
from attnops_ring.reduce import reduced
from attnops_ring.ring import ring

STRATEGIES: Final = ("ring", "all_gather", "ulysses", "usp")


class RingAttention(OperationImpl):
    """Attention over a sequence that the mesh's axes cut; devices compute by the operation ``flash``.

    Options of a call beside the contract's:
        strategy: ``"ring"``: keys and values go round; O((T + S) / n) memory. ``"all_gather"``: every device gathers
            them; O(S) memory. ``"ulysses"``: devices exchange tokens for heads, of which there must be a multiple of n;
            O((T + S) / n) memory. ``"usp"``: the sequence is cut by two mesh axes or more, the last of which exchange
            tokens for heads, while keys and values go round the first; ``order`` is of the first's devices.
            Queries that the rules do not cut, as in decoding, are on every device, and one reduction joins what these
            find among their keys, whatever the strategy.
        order: how the caller laid out the tokens, see `attnops_ring.orders`; masks and biases speak of the sequence as
            it was. Both T and S are in that order; of queries that are not cut, S alone.
    """

    computes: ClassVar[str | None] = "attention"
    limits: ClassVar[Mapping[str, Limits]] = {"native": Limits(bias_kinds=None)}

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        """See `attnops.BaseOperation.get_impl_name`."""
        return "ring"

    @classmethod
    def rank(cls, request: Request) -> Rank | None:
        """First where a mesh cuts the sequence; else never picked."""
        return Rank.EXCHANGES_KEYS if isinstance(request, AttentionRequest) and request.sequence_axes else None

    def environment_key(self) -> bool:
        """Whether there is a mesh in which the rules' axes have one device."""
        sizes = [self._mesh().shape[name] for name in self._axes()]
        return bool(sizes) and math.prod(sizes) == 1

    def _mesh(self) -> Any:
        ambient = jax.sharding.get_abstract_mesh()
        return self.metadata.mesh if ambient.empty else ambient

    def _axes(self) -> tuple[str, ...]:
        """The mesh axes that the rules name for keys, those of one device too."""
        mesh = self._mesh()
        names = get_names_from_partition_spec(self.metadata.axis_rules.spec([KV_LENGTH]))
        return tuple(name for name in names if mesh is not None and name in mesh.shape)

    def invoke(self, forward: str, function: Callable[..., Any], call: Call, options: Mapping[str, Any]) -> Any:
        """See `attnops.dispatch.attention.OperationImpl.invoke`: parts are of the sequence too."""
        assert isinstance(call.request, AttentionRequest)
        boundary = self.boundary(call)
        if boundary is None or not boundary.sequence:
            return super().invoke(forward, function, call, options)
        order, strategy = _checked(options.get("order", "contiguous"), options.get("strategy", "ring"))
        rest = {name: x for name, x in options.items() if name not in ("order", "strategy", "mode")}
        by_query, by_key = boundary.lengths
        if by_key is None or by_query not in (None, by_key):
            rule = "must cut keys, and queries by the same axes or not at all"
            reason = Reason("axis_rules", f"query_length={by_query}, kv_length={by_key}", rule,
                            "state both rules alike, or query_length=None")  # fmt: skip
            raise UnsupportedError(f"RingAttention can't serve {call.request}:\n  - {reason}", [reason])
        if strategy == "usp":
            named = self._axes()
            if len(named) > 1 and named[0] not in by_key:
                # One device round the ring, where every order is the same.
                strategy, order = "ulysses", "contiguous"
            elif len(named) > 1 and by_key == named[:1]:
                strategy = "ring"
        return boundary.typed(_run(self, boundary, by_key, call, rest, order, strategy))

    def _reasons(self, forward: str, request: Request) -> list[Reason]:
        found = super()._reasons(forward, request)
        if isinstance(request, AttentionRequest) and not request.sequence_axes and not self.environment_key():
            found.append(Reason("mesh", "none, or whole sequences", "must cut the keys",
                                "create 'flash'; or cut them, by metadata.mesh and AxisRules' kv_length"))  # fmt: skip
        return found

    def forward_native(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: Mask | None = None,
        bias: Any = None,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sinks: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        mode: str | None = None,
        return_lse: bool = False,
        strategy: str = "ring",
        order: str = "contiguous",
    ) -> OperationOutput:
        """See `attnops.OperationImpl.__call__`. Of one device, which has the whole sequence in any order."""
        _checked(order, strategy)
        metadata = self.metadata.replace(mesh=None, layout="BTHD", mode=mode)
        flash: Any = OperationRegistry.create("flash", metadata)
        found: OperationOutput = flash(
            query, key, value, mask=mask, bias=bias, softmax_scale=softmax_scale, logits_soft_cap=logits_soft_cap,
            sinks=sinks, dropout_key=dropout_key, return_lse=return_lse,
        )  # fmt: skip
        return found


def _checked(order: str, strategy: str) -> tuple[Order, str]:
    check_order(order)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is unknown; use one of {list(STRATEGIES)}")
    return order, strategy  # type: ignore[return-value]


def _run(
    operation: RingAttention,
    boundary: Boundary,
    axis: tuple[str, ...],
    call: Call,
    options: dict[str, Any],
    order: Order,
    strategy: str,
) -> OperationOutput:
    query, key, value = call.args
    T, S = query.shape[1], key.shape[1]
    if boundary.lengths[0] is None:
        strategy = "reduce"  # a few queries, which every device has
    sizes = [boundary.mesh.shape[name] for name in axis]
    _check_heads(boundary, call.request, sizes, strategy)
    # Of "usp" the first axis is the ring.
    devices, n = sizes[0] if strategy == "usp" else math.prod(sizes), stretches(order)
    multiple = math.prod(sizes) * n
    Tp, Sp = (-(-length // multiple) * multiple for length in (T, S))
    if strategy == "reduce":
        Tp = T
    if order != "contiguous" and (Tp, Sp) != (T, S):
        raise ValueError(f"T={T} and S={S} must be multiples of {multiple} for order={order!r}; pad before reordering")
    inner = Inner(
        metadata=operation.metadata.replace(mesh=None, layout="BTHD", mode=call.request.mode),
        scale=options.pop("softmax_scale", None), cap=options.pop("logits_soft_cap", None), T=T, S=S,
        stride=devices if order == "striped" else 1, devices=devices, stretches=n, is_padded=Sp != S,
        queries_are_whole=strategy == "reduce", queries_are_padded=Tp != T,
    )  # fmt: skip
    if order == "striped" and "dropout_key" in options and not _draws_with_steps(inner, call.request.platform):
        name = type(inner.operation).__name__
        reason = Reason("dropout_key", "given", f"{name} may draw for tokens that are adjacent", "use order='zigzag'")
        raise UnsupportedError(f"RingAttention can't serve {call.request}:\n  - {reason}", [reason])
    hops = devices
    if strategy in ("ring", "usp") and order != "striped":
        hops = needed_hops(options.get("mask"), inner, query.shape, Tp, Sp)
    function = functools.partial(_part, inner, axis, hops, strategy, order)
    padded = _padded(query, Tp), _padded(key, Sp), _padded(value, Sp)
    lengths = None if strategy == "reduce" else axis, axis
    found = run_in_parts(boundary, function, padded, options, lengths, is_interpreted=call.request.interpret)
    out, lse = found.attention_outputs, found.logsumexp
    if Tp != T:
        out, lse = _first(out, 1, T), None if lse is None else _first(lse, 2, T)
    return OperationOutput(out.astype(query.dtype), None, lse)


def _draws_with_steps(inner: Inner, platform: str) -> bool:
    """Whether devices honour `attnops.dropout.dropout_step`, as everything on the flash skeleton does."""
    serving: Any = inner.operation
    return isinstance(serving, FlashAttention) and serving.backend(forward_for(type(serving), platform)) is not None


def _check_heads(boundary: Boundary, request: Any, sizes: list[int], strategy: str) -> None:
    """Refuse what devices can't share."""
    if strategy not in ("ulysses", "usp"):
        return
    across = math.prod(sizes[1:] if strategy == "usp" else sizes)
    heads = request.heads // math.prod(
        boundary.mesh.shape[name] for name in get_names_from_partition_spec((boundary.heads,))
    )
    found = []
    if strategy == "usp" and len(sizes) < 2:
        found.append(Reason("strategy", strategy, "needs two mesh axes that cut the sequence", "use 'ring'"))
    if heads % across:
        found.append(Reason("H", heads, f"a device's query heads must be a multiple of {across}", "use 'ring'"))
    if found:
        listed = "".join(f"\n  - {reason}" for reason in found)
        raise UnsupportedError(f"RingAttention can't serve {request}:{listed}", found)


def _part(
    inner: Inner, axis: tuple[str, ...], hops: int, strategy: str, order: Order, query: Any, key: Any, value: Any, *,
    mask: Any = None, bias: Any = None, sinks: Any = None, dropout_key: Any = None, return_lse: bool = False,
) -> OperationOutput:  # fmt: skip
    """What one device computes, inside `jax.shard_map`."""
    given = (query, key, value, Extras(mask, bias, dropout_key))
    if strategy == "reduce":
        found = reduced(inner, axis, *given)
    else:
        given = reverse_mode_only(equally_varying(given), REVERSE_ONLY)
        if strategy == "ring":
            found = ring(inner, axis, hops, *given)
        elif strategy == "all_gather":
            found = all_gather(inner, axis, order, *given)
        else:
            found = _by_heads(inner, axis, hops, strategy, order, *given)
    if sinks is not None:
        found = with_sinks(found, sinks)
    return OperationOutput(found.out, None, found.lse if return_lse else None)


def _by_heads(
    inner: Inner, axis: tuple[str, ...], hops: int, strategy: str, order: Order, query: jax.Array, key: jax.Array,
    value: jax.Array, extras: Extras,
) -> PartialSoftmax:  # fmt: skip
    """Tokens for heads (Jacobs et al. 2023, arXiv:2309.14509), then all at once, or round the first axis."""
    around, across = (axis[:1], axis[1:]) if strategy == "usp" else ((), axis)
    n = lax.axis_size(across)
    B, _, H, _ = query.shape
    q, k, v = (
        heads_for_tokens(x, across) for x in (query, *(spread_kv_heads(x, H, n) for x in (key, value)))
    )  # fmt: skip
    some = some_heads(extras, lax.axis_index(across) * (H // n), B, H // n)
    if strategy == "usp":
        found = ring(inner, around, hops, q, k, v, equally_varying((some, q))[0])
    else:
        q, k, v = (in_sequence(x, inner.devices, order) for x in (q, k, v))
        whole = dataclasses.replace(inner, devices=1, stretches=1, stride=1)
        found = at_once(whole, q, k, v, some, 0, 0)
        out, lse = in_order(found.out, inner.devices, order), in_order(found.lse.swapaxes(1, 2), inner.devices, order)
        rest = in_order(found.lse_residual.swapaxes(1, 2), inner.devices, order)
        found = PartialSoftmax(out, lse.swapaxes(1, 2), rest.swapaxes(1, 2))
    lse, rest = (
        tokens_for_heads(x.swapaxes(1, 2)[..., None], across)[..., 0].swapaxes(1, 2)
        for x in (found.lse, found.lse_residual)
    )
    return PartialSoftmax(tokens_for_heads(found.out, across), lse, rest)


def needed_hops(mask: Mask | None, inner: Inner, shape: tuple[int, ...], Tp: int, Sp: int) -> int:
    """How many devices' keys a device must see, its own among them, by what is known of the mask when tracing.

    Args:
        mask: bound, or None.
        inner: how the devices compute; their stretches have no stride.
        shape: of the query, [B, T, H, D].
        Tp: queries, padding included.
        Sp: keys, likewise.
    """
    n, parts = inner.devices, inner.devices * inner.stretches
    if mask is None or mesh_of_types(jax.tree.leaves(mask)) is not None:
        return n  # of arrays that explicit axes cut, a program can't take tiles
    known = block_map(mask, (shape[0], shape[2], inner.T, inner.S), Tp // parts, Sp // parts)
    if not known.is_static:
        return n
    due = np.asarray(known.coverage).max(axis=(0, 1)) > 0
    due = np.pad(due, [(0, parts - size) for size in due.shape])
    where = [[i, 2 * n - 1 - i] if inner.stretches == 2 else [i] for i in range(n)]
    needed = [any(due[np.ix_(where[i], where[(i - r) % n])].any() for i in range(n)) for r in range(n)]
    return max((r for r in range(n) if needed[r]), default=0) + 1


def _first(x: jax.Array, axis: int, length: int) -> jax.Array:
    """The first tokens of an array, its padding left out."""
    return lax.slice_in_dim(uncut(x, axis), 0, length, axis=axis)


def _padded(x: jax.Array, length: int) -> jax.Array:
    if x.shape[1] == length:
        return x
    return jnp.pad(uncut(x, 1), ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))
