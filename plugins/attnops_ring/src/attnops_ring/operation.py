"""RingAttention: the operation for sequences sharded over a mesh, also inside a `jax.shard_map` of the caller."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops import (
    AttentionRequest,
    Call,
    FlashOptions,
    Limits,
    OperationImpl,
    OperationOutput,
    OperationRegistry,
    Rank,
    Reason,
    Request,
    Source,
    UnsupportedError,
    forward_for,
)
from attnops.kernels import equally_varying
from attnops.masks import Mask, block_map
from attnops.operations.flash import FlashAttention
from attnops.partition import Boundary, mesh_of_types, run_sharded, unsharded
from attnops.sharding import KV_LENGTH, MODE_TRAIN, canonicalize_mode, get_names_from_partition_spec
from attnops.softmax import PartialSoftmax, with_sinks
from attnops_ring.block import Extras, Inner, whole_block
from attnops_ring.gather import (
    all_gather,
    heads_for_tokens,
    slice_heads,
    spread_kv_heads,
    to_device_order,
    to_sequence_order,
    tokens_for_heads,
)
from attnops_ring.orders import Order, check_order, chunk_ids, chunks_per_device
from attnops_ring.reduce import reduced
from attnops_ring.ring import ring
from attnops_ring.shards import (
    NO_RULES,
    ManualSharding,
    WholeArrays,
    check_free,
    check_varying,
    find_manual_sharding,
    run_here,
)

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.typing import Function, Options, PyTree

STRATEGIES: Final = ("ring", "all_gather", "ulysses", "usp")


class RingOptions(FlashOptions, total=False):
    """The options of a call of `RingAttention`.

    Attributes:
        mode: the runtime mode.
        strategy: one of `STRATEGIES`.
        order: the order of the tokens on the devices.
    """

    mode: str
    strategy: str
    order: Order


class RingAttention(OperationImpl):
    """Attention over a sequence that is sharded over a mesh; each device runs the operation ``flash`` on its shard.

    A call may also be inside a `jax.shard_map` of the caller in which the mesh axes that the rules name for keys are
    manual. Then query, key and value are this device's shards of the sequence, and so are output and logsumexp. Masks
    and biases describe the whole sequence: each of their arrays has the whole T and S, or is this device's shard in
    ``order``, which is gathered; the array's length tells which. If the caller shards batch or heads too, arrays with
    these dimensions are this device's shards. Dropout counts tokens in the whole sequence, but batch and heads from
    this device's first, unless ``dropout_key`` is an `attnops.dropout.ShiftedKey` that says where they start.

    Options of a call in addition to the contract's:
        strategy: one of `STRATEGIES`. ``"ring"``: keys and values rotate through the devices; O((T + S) / n) memory.
            ``"all_gather"``: every device gathers them; O(S) memory. ``"ulysses"``: devices exchange tokens for heads,
            whose number must be a multiple of n; O((T + S) / n) memory. ``"usp"``: the sequence is sharded over at
            least two mesh axes; devices of the last ones exchange tokens for heads, while keys and values rotate along
            the first, whose devices ``order`` refers to.
            If the rules replicate the queries, as in decoding, this option is ignored: each device attends to its own
            keys, and one reduction merges the results.
        order: how tokens are laid out on devices: "contiguous", "zigzag" or "striped" (`attnops_ring.orders`). Masks
            and biases refer to positions in the original sequence. Both T and S are in that order; with replicated
            queries, S only.
    """

    computes: ClassVar[str | None] = "attention"
    limits: ClassVar[Mapping[str, Limits]] = {"native": Limits(bias_kinds=None)}

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        """The name ``"ring"``."""
        return "ring"

    @classmethod
    def rank(cls, request: Request) -> Rank | None:
        """`Rank.EXCHANGES_KEYS`, the first rank, if a mesh shards the sequence; else None: `auto` never picks it."""
        return Rank.EXCHANGES_KEYS if isinstance(request, AttentionRequest) and request.sequence_axes else None

    def bind(
        self,
        query: ArrayLike,
        key: ArrayLike | Source,
        value: ArrayLike | None = None,
        *,
        parts: tuple[int, int] | None = None,
        **options: Any,
    ) -> Call:
        """See `attnops.OperationImpl.bind`; inside a `jax.shard_map` that shards the sequence, binds the whole one."""
        arrays: dict[str, Any] = {"query": query, "key": key, "value": value}
        are_arrays = all(getattr(x, "ndim", 0) == 4 for x in arrays.values())  # False for caches, None and lists
        sharding = (
            find_manual_sharding(self.metadata, self._mode(options.get("mode")))
            if are_arrays and parts is None
            else None
        )
        if sharding is None:
            return super().bind(query, key, value, parts=parts, **options)
        check_varying(sharding, arrays)
        order, strategy = self._layout(options, sharding.axes)
        axis = 1 if self.metadata.layout == "BTHD" else 2
        lengths = tuple(arrays[name].shape[axis] for name in ("query", "key"))
        is_usp = strategy == "usp" and not sharding.has_all_queries
        whole = WholeArrays(sharding, lengths, order, sharding.sizes[0] if is_usp else math.prod(sharding.sizes))
        for name in ("mask", "bias"):
            if options.get(name) is not None:
                options[name] = whole.gather(options[name], name)
        call = super().bind(query, key, value, parts=sharding.shards, **options)
        return call._replace(request=call.request.replace(sequence_axes=sharding.axes))

    def _mode(self, mode: str | None) -> str:
        """The mode whose rules apply; by default train, even if each device has one query: all have several."""
        stated = self.metadata.mode if mode is None else mode
        return MODE_TRAIN if stated is None else canonicalize_mode(stated)

    def environment_key(self) -> Hashable:
        """What traces depend on besides the arguments, including what the devices' operation depends on."""
        flash: Any = OperationRegistry.create("flash", self.metadata.replace(mesh=None))
        return self._has_one_device(), flash.environment_key()

    def _has_one_device(self) -> bool:
        """Whether the rules' mesh axes have one device."""
        sizes = [self._mesh().shape[name] for name in self._axes()]
        return bool(sizes) and math.prod(sizes) == 1

    def _mesh(self) -> Any:
        ambient = jax.sharding.get_abstract_mesh()
        return self.metadata.mesh if ambient.empty else ambient

    def _axes(self) -> tuple[str, ...]:
        """The mesh axes that the rules name for keys, including axes of size 1."""
        mesh = self._mesh()
        names = get_names_from_partition_spec(self.metadata.axis_rules.spec([KV_LENGTH]))
        return tuple(name for name in names if mesh is not None and name in mesh.shape)

    def invoke(self, forward: str, function: Function, call: Call, options: Options) -> Any:
        """See `attnops.OperationImpl.invoke`; the sequence is sharded too."""
        assert isinstance(call.request, AttentionRequest)
        boundary = call.boundary
        sharding = find_manual_sharding(self.metadata, call.request.mode) if boundary is None else None
        if sharding is None and (boundary is None or not boundary.sequence):
            return super().invoke(forward, function, call, options)
        where: Any = boundary if sharding is None else sharding
        by_query, by_key = where.lengths
        if by_key is None or by_query not in (None, by_key):
            rule = "must shard keys, and queries over the same axes or not at all"
            reason = Reason("axis_rules", f"query_length={by_query}, kv_length={by_key}", rule,
                            "give both rules the same axes, or set query_length=None")  # fmt: skip
            raise UnsupportedError(f"RingAttention can't serve {call.request}:\n  - {reason}", [reason])
        order, strategy = self._layout(options, by_key)
        handled = ("order", "strategy", "mode")
        options = {name: x for name, x in options.items() if name not in handled}
        output = _run(self, where, by_key, call, options, order, strategy)
        return output if boundary is None else boundary.typed(output)

    def _layout(self, options: Options, by_key: tuple[str, ...]) -> tuple[Order, str]:
        """The order and the strategy of a call whose keys are sharded over ``by_key``."""
        order: Any = options.get("order") or "contiguous"
        strategy = options.get("strategy") or "ring"
        check_order(order)
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy={strategy!r} is unknown; use one of {list(STRATEGIES)}")
        if strategy == "usp":
            named = self._axes()
            if len(named) > 1 and named[0] not in by_key:
                # The ring has one device, for which all orders are equal.
                strategy, order = "ulysses", "contiguous"
            elif len(named) > 1 and by_key == named[:1]:
                strategy = "ring"
        return order, strategy

    def reasons_for(self, forward: str, request: Request) -> list[Reason]:
        reasons = super().reasons_for(forward, request)
        if isinstance(request, AttentionRequest) and not request.sequence_axes and not self._has_one_device():
            reasons.append(Reason("mesh", "none, or sequences not sharded", "must shard the keys",
                                  "create 'flash'; or set metadata.mesh and AxisRules' kv_length"))  # fmt: skip
        return reasons

    def forward_native(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[RingOptions]
    ) -> OperationOutput:
        """Attention on one device, for which all orders are equal."""
        layout: dict[str, Any] = {name: options.pop(name, None) for name in ("order", "strategy")}  # type: ignore[misc]
        self._layout(layout, self._axes())  # raises for unknown ones
        metadata = self.metadata.replace(mesh=None, layout="BTHD", mode=options.pop("mode", None))
        flash: Any = OperationRegistry.create("flash", metadata)
        output: OperationOutput = flash(query, key, value, **options)
        return output


def _run(
    operation: RingAttention,
    where: Boundary | ManualSharding,
    axis: tuple[str, ...],
    call: Call,
    options: dict[str, Any],
    order: Order,
    strategy: str,
) -> OperationOutput:
    query, key, value = call.args
    assert isinstance(call.request, AttentionRequest)
    T, S = call.request.query_length, call.request.key_length
    sizes = where.sizes if isinstance(where, ManualSharding) else _sizes(where, axis)
    if where.lengths[0] is None:
        if strategy == "usp" and order != "contiguous" and len(sizes) > 1:
            reason = Reason("order", order, "of replicated queries, must be 'contiguous' with strategy='usp'",
                            "restore the keys' order")  # fmt: skip
            raise UnsupportedError(f"RingAttention can't serve {call.request}:\n  - {reason}", [reason])
        strategy = "reduce"  # queries are replicated
    _check_heads(call.request, where, sizes, strategy)
    # With "usp" the ring is along the first axis.
    devices = sizes[0] if strategy == "usp" else math.prod(sizes)
    multiple = math.prod(sizes) * chunks_per_device(order)
    Tp, Sp = (-(-length // multiple) * multiple for length in (T, S))
    if strategy == "reduce":
        Tp = T
    if order != "contiguous" and (Tp, Sp) != (T, S):
        raise ValueError(f"T={T} and S={S} must be multiples of {multiple} for order={order!r}; pad before reordering")
    inner = Inner(
        metadata=operation.metadata.replace(mesh=None, layout="BTHD", mode=call.request.mode, axis_rules=NO_RULES),
        scale=options.pop("softmax_scale", None), cap=options.pop("logits_soft_cap", None), T=T, S=S,
        order=order, devices=devices, is_padded=Sp != S, has_all_queries=strategy == "reduce",
        queries_are_padded=Tp != T, max_logits="return_max_logits" in options,
    )  # fmt: skip
    if order == "striped" and "dropout_key" in options and not _draws_with_steps(inner, call.request.platform):
        name = type(inner.operation).__name__
        rule = f"is not supported with order='striped': {name} may draw for adjacent tokens only"
        reason = Reason("dropout_key", "given", rule, "use order='zigzag'")
        raise UnsupportedError(f"RingAttention can't serve {call.request}:\n  - {reason}", [reason])
    hops = devices
    if strategy in ("ring", "usp") and order != "striped":
        hops = needed_hops(options.get("mask"), inner, query.shape, Tp, Sp)
    function = functools.partial(_local, inner, axis, hops, strategy)
    if isinstance(where, ManualSharding):
        check_free(where, call.request, inner.operation)
        return run_here(function, call, options)
    padded = _padded(query, Tp), _padded(key, Sp), _padded(value, Sp)
    lengths = None if strategy == "reduce" else axis, axis
    operation_key = operation.program_key("native")
    key = None if operation_key is None else (operation_key, inner, axis, hops, strategy)
    output = run_sharded(
        where, function, padded, options, lengths, is_interpreted=call.request.interpret, key=key
    )  # fmt: skip
    out, by_query = output.attention_outputs, (output.logsumexp, output.max_logits)
    if Tp != T:
        out, by_query = _first(out, 1, T), jax.tree.map(lambda x: _first(x, 2, T), by_query)
    return OperationOutput(out.astype(query.dtype), None, *by_query)


def _draws_with_steps(inner: Inner, platform: str) -> bool:
    """Whether the devices' operation honours `attnops.dropout.dropout_step`: True for all on the flash skeleton."""
    serving: Any = inner.operation
    return isinstance(serving, FlashAttention) and serving.backend(forward_for(type(serving), platform)) is not None


def _sizes(boundary: Boundary, entry: str | tuple[str, ...] | None) -> list[int]:
    return [boundary.mesh.shape[name] for name in get_names_from_partition_spec((entry,))]


def _check_heads(
    request: AttentionRequest, where: Boundary | ManualSharding, sizes: Sequence[int], strategy: str
) -> None:
    """Raise an `UnsupportedError` unless the devices can exchange heads for tokens."""
    if strategy not in ("ulysses", "usp"):
        return
    across = math.prod(sizes[1:] if strategy == "usp" else sizes)
    heads = request.heads // (1 if isinstance(where, ManualSharding) else math.prod(_sizes(where, where.heads)))
    reasons = []
    if strategy == "usp" and len(sizes) < 2:
        reasons.append(Reason("strategy", strategy, "needs a sequence sharded over two mesh axes", "use 'ring'"))
    if heads % across:
        reasons.append(Reason("H", heads, f"a device's query heads must be a multiple of {across}", "use 'ring'"))
    if reasons:
        listed = "".join(f"\n  - {reason}" for reason in reasons)
        raise UnsupportedError(f"RingAttention can't serve {request}:{listed}", reasons)


def _local(
    inner: Inner, axis: tuple[str, ...], hops: int, strategy: str,
    query: jax.Array, key: jax.Array, value: jax.Array, *,
    mask: Mask | None = None, bias: PyTree = None, sinks: jax.Array | None = None, dropout_key: jax.Array | None = None,
    return_lse: bool = False, return_max_logits: bool = False,
) -> OperationOutput:  # fmt: skip
    """One device's attention, inside `jax.shard_map`, with the keyword arguments of the call."""
    operands = (query, key, value, Extras(mask, bias, dropout_key))
    if strategy == "reduce":
        partial = reduced(inner, axis, *operands)
    else:
        operands = equally_varying(operands)
        if strategy == "ring":
            partial = ring(inner, axis, hops, *operands)
        elif strategy == "all_gather":
            partial = all_gather(inner, axis, *operands)
        else:
            partial = _by_heads(inner, axis, hops, strategy, *operands)
    if sinks is not None:
        partial = with_sinks(partial, sinks)
    return OperationOutput(partial.out, None, partial.lse if return_lse else None,
                           partial.max_logits if return_max_logits else None)  # fmt: skip


def _by_heads(
    inner: Inner, axis: tuple[str, ...], hops: int, strategy: str, query: jax.Array, key: jax.Array, value: jax.Array,
    extras: Extras,
) -> PartialSoftmax:  # fmt: skip
    """Exchange tokens for heads (Jacobs et al. 2023, arXiv:2309.14509), then attend alone, or in a ring on axis 0."""
    around, across = (axis[:1], axis[1:]) if strategy == "usp" else ((), axis)
    n = lax.axis_size(across)
    B, _, H, _ = query.shape
    q, k, v = (
        heads_for_tokens(x, across) for x in (query, *(spread_kv_heads(x, H, n) for x in (key, value)))
    )  # fmt: skip
    extras = slice_heads(extras, lax.axis_index(across) * (H // n), B, H // n)
    if strategy == "usp":
        partial = ring(inner, around, hops, q, k, v, equally_varying((extras, q))[0])
    else:
        q, k, v = (to_sequence_order(x, inner) for x in (q, k, v))
        local = dataclasses.replace(inner, devices=1, order="contiguous")
        partial = whole_block(local, q, k, v, extras, 0, 0)
        by_query = jax.tree.map(lambda x: to_device_order(x.swapaxes(1, 2), inner).swapaxes(1, 2), partial[1:])
        partial = PartialSoftmax(to_device_order(partial.out, inner), *by_query)
    by_query = jax.tree.map(
        lambda x: tokens_for_heads(x.swapaxes(1, 2)[..., None], across)[..., 0].swapaxes(1, 2), partial[1:]
    )
    return PartialSoftmax(tokens_for_heads(partial.out, across), *by_query)


def needed_hops(mask: Mask | None, inner: Inner, shape: tuple[int, ...], Tp: int, Sp: int) -> int:
    """The number of devices whose keys a device needs, itself included; all of them if the mask is traced.

    Args:
        mask: bound, or None.
        inner: how the devices compute; not in striped order.
        shape: the shape of the query, [B, T, H, D].
        Tp: queries, padding included.
        Sp: keys, padding included.
    """
    n, chunks = inner.devices, inner.devices * inner.chunks
    if mask is None or mesh_of_types(jax.tree.leaves(mask)) is not None:
        return n  # arrays that are sharded over explicit mesh axes can't be sliced into tiles
    by_chunk = block_map(mask, (shape[0], shape[2], inner.T, inner.S), Tp // chunks, Sp // chunks)
    if not by_chunk.is_static:
        return n
    is_active = np.asarray(by_chunk.coverage).max(axis=(0, 1)) > 0
    is_active = np.pad(is_active, [(0, chunks - size) for size in is_active.shape])
    ids = [chunk_ids(device, n, inner.chunks) for device in range(n)]
    needed = [any(is_active[np.ix_(ids[i], ids[(i - r) % n])].any() for i in range(n)) for r in range(n)]
    return max((r for r in range(n) if needed[r]), default=0) + 1


def _first(x: jax.Array, axis: int, length: int) -> jax.Array:
    """The first ``length`` tokens of an array, without padding."""
    return lax.slice_in_dim(unsharded(x, axis), 0, length, axis=axis)


def _padded(x: jax.Array, length: int) -> jax.Array:
    if x.shape[1] == length:
        return x
    return jnp.pad(unsharded(x, 1), ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))
