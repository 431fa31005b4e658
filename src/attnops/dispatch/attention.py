"""OperationImpl: the base class of attention operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from jax.sharding import PartitionSpec

from attnops.dispatch import border, on_mesh
from attnops.dispatch.binding import bind_attention, refuse_total, shapes_of
from attnops.dispatch.call import Call, resolve_mode
from attnops.dispatch.documents import NAMES
from attnops.dispatch.forwards import forward_for
from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.partial import PartialAttention
from attnops.dispatch.rank import Rank, RankBetween
from attnops.dispatch.request import AttentionRequest, Request
from attnops.dispatch.result import check_output
from attnops.dispatch.source import Source, SourceType, bound, stepped
from attnops.errors import Reason
from attnops.models.heads import repeat_kv_heads
from attnops.models.remat import LOGSUMEXP_NAME, OUTPUT_NAME, tag
from attnops.output import OPTIONAL_FIELDS, OperationOutput
from attnops.partition.boundary import find_boundary
from attnops.partition.options import CONTRACT
from attnops.partition.run import run_sharded
from attnops.sharding.modes import RUNTIME_MODE_TYPES
from attnops.sharding.specs import create_stable_sharding

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.biases import Bias
    from attnops.masks.base import Mask


class OperationImpl(PartialAttention):
    """Base class of attention operations: it binds the attention contract and has helpers for implementations.

    A forward names the options of `__call__` that it has, or all as ``**options: Unpack[attnops.AttentionOptions]``. It
    is given the layout "BTHD", ``mask`` as an `attnops.masks.Mask` bound to the call's shapes, and the metadata's scale
    and soft cap if the caller gives none; ``mode`` only if its signature names it. It returns an `OperationOutput`,
    whose shapes and dtypes are checked.

    `auto` and `explain` consider only classes with ``computes = "attention"``: linear attention, for example, has the
    same arguments but computes something else. Subclasses of the core's operations inherit the attribute; any other
    class that computes what `__call__` documents must declare it.

    Class attributes:
        option_axes: the axes of array options that are not in the contract, by option: a letter for each dimension, "b"
            for the batch, "h" for query heads, "k" for kv heads, "-" for anything else; ``""`` for an array that is the
            same on every device. A dimension has the size of its axis, or 1. Under a mesh the arrays are sharded
            along these axes, and an array option that is missing here is refused. ``{"decay": "h"}`` is for decays [H].
        readers: the reader of each forward that reads sources in place: an `attnops_caches.CacheReader` for caches. For
            a forward without one, sources are read into arrays. An inherited forward has its base class's reader.
        is_partitioned: whether XLA itself shards the computation over batch and heads, as the arrays are sharded. If
            not, a call warns of mesh axes that no axis rule names.
    """

    reads: ClassVar[frozenset[str]] = frozenset(field.name for field in dataclasses.fields(OperationMetadata))
    option_axes: ClassVar[Mapping[str, str]] = MappingProxyType({})
    readers: ClassVar[Mapping[str, object]] = MappingProxyType({})
    is_partitioned: ClassVar[bool] = False

    @classmethod
    def rank(cls, request: Request) -> Rank | RankBetween | None:
        """The rank by which `auto` picks this operation for a request that it serves. None: never picked."""
        return Rank.KERNEL if forward_for(cls, request.platform) != "native" else Rank.NATIVE

    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | Source,
        value: ArrayLike | None = None,
        *,
        mask: ArrayLike | Mask | None = None,
        bias: ArrayLike | Bias | None = None,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sinks: ArrayLike | None = None,
        dropout_key: jax.Array | None = None,
        mode: str | None = None,
        return_lse: bool = False,
        return_weights: bool = False,
        return_max_logits: bool = False,
        cu_seqlens: ArrayLike | None = None,
        cu_seqlens_q: ArrayLike | None = None,
        cu_seqlens_k: ArrayLike | None = None,
        **options: object,
    ) -> OperationOutput:
        """Attention of ``query`` over ``key`` and ``value``, or over a source that holds them: ``op(query, cache)``.

        The scores are ``s = cap · tanh(scale · q·k / cap)`` (the cap only if set), plus the bias, then the mask;
        softmax and accumulation are float32.

        Args:
            query: [B, T, H, D] float32, bfloat16 or float16; [B, H, T, D] with ``metadata.layout="BHTD"``.
            key: [B, S, K, D], or [B, K, S, D] with ``layout="BHTD"``; dtypes as for query. K divides H, and query head
                h uses kv head ``h // (H // K)``. Or an `attnops.Source` that already holds the queries' tokens, such as
                a cache of attnops-caches; its class documents the queries' positions and further options. Masks and
                biases are then evaluated at positions, and the call has no gradient.
            value: [B, S, K, Dv], or [B, K, S, Dv] with ``layout="BHTD"``; dtypes as for query. None with a source.
            mask: a boolean array, 4-D, that broadcasts to [B, H, T, S], True where a query may attend; or a
                `attnops.masks.Mask`. A fully masked row gives output 0, logsumexp −inf and gradients 0.
            bias: added to the scores; a floating-point array, 4-D, that broadcasts to [B, H, T, S]; or an
                `attnops.biases.Bias`. Finite or −inf; +inf or NaN at an allowed key makes only its own row NaN
                (output and all that is asked for); gradients of that row, and of the keys and values, are NaN.
            softmax_scale: a finite number. None: the metadata's, else ``D ** -0.5``.
            logits_soft_cap: a positive number. None: the metadata's, else no cap.
            sinks: [H] or [H, n], one learnable logit per head or n, whose exponentials are added to the softmax's
                denominator only. Finite or −inf; +inf or NaN makes the rows of its head NaN, except fully masked ones.
            dropout_key: a PRNG key; drops attention weights with the metadata's ``dropout_prob``, each by a hash of
                the key and (b, h, i, j). Under `jax.vmap` and in the caller's `jax.shard_map` these are indices
                within the slice: use different keys if slices must draw different masks.
            mode: runtime mode; see `OperationMetadata`. Over a source "train" is refused, and None is the metadata's,
                else decode for one query, else prefill.
            return_lse: whether the output has ``logsumexp``.
            return_weights: whether the output has ``attention_weights``, in the query's dtype; O(B · H · T · S) memory.
            return_max_logits: whether the output has ``max_logits``, the largest score that each query sees, float32
                [B, H, T]; −inf where it sees none. Sinks and dropout don't change it. It has no gradient: it counts as
                a constant, as by `jax.lax.stop_gradient`.
            cu_seqlens: the cumulative lengths of documents, integers [documents + 1], [0, n₁, n₁ + n₂, …], for
                ``metadata.layout="THD"``: query, key, value and output are [total, heads, head_dim], logsumexp and
                max_logits [H, T], weights [H, T, S]. Tokens see only their own document; tokens after the last document
                are padding, fully masked. Masks and biases by position are evaluated within each document (`Causal` is
                aligned at its end); masks with given positions, and array masks, ids and biases (as for B = 1), are by
                token. Known numbers must rise from 0; a traced one below an earlier one is raised to it, so that its
                document is empty.
            cu_seqlens_q: the cumulative lengths of the queries' documents, if the keys' differ.
            cu_seqlens_k: the cumulative lengths of the keys' documents, as many as the queries'.
            **options: options that only some implementations, or the source, have.

        Raises:
            ValueError: shapes, dtypes or values that fit no implementation.
            TypeError: an option that no forward of this operation names.
            UnsupportedError: the operation can't serve the call; see `BaseOperation.__call__`.
        """
        if options:
            self._check_own_options(key, options)
        total = dict(zip(NAMES, (cu_seqlens, cu_seqlens_q, cu_seqlens_k), strict=True))
        call = self.prepare(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            softmax_scale=softmax_scale,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks,
            dropout_key=dropout_key,
            mode=mode,
            return_lse=return_lse,
            return_weights=return_weights,
            return_max_logits=return_max_logits,
            **{name: x for name, x in total.items() if x is not None},
            **options,
        )
        result: OperationOutput = self.run(call)
        return result

    def step(
        self, query: ArrayLike, key: ArrayLike, value: ArrayLike | None, source: SourceType, **options: Any
    ) -> tuple[OperationOutput, SourceType]:
        """Append tokens to a source and attend over it: a decoding step, or a chunk of a prompt.

        Args:
            query: [B, T, H, D]; heads before length with ``layout="BHTD"``.
            key: [B, T, K, D]; heads before length with ``layout="BHTD"``.
            value: [B, T, K, Dv]; heads before length with ``layout="BHTD"``. None for a source that stores no values.
            source: the source before these tokens, such as a cache.
            **options: the options of `__call__`, and the source's.

        Returns:
            The output, and the source with the tokens.

        Raises:
            ValueError: as in `__call__`; or the source, whose class documents it, refuses the tokens.
        """
        if not isinstance(source, Source):
            raise ValueError(
                f"source is a {type(source).__name__}, but must be an attnops.Source, such as a cache of "
                f"attnops-caches: op.step(query, key, value, cache)"
            )
        call_options = CONTRACT | {"mode", *OPTIONAL_FIELDS}
        self._check_own_options(source, {name: x for name, x in options.items() if name not in call_options})
        refuse_total(self.metadata, source, options)
        return stepped(source.step(self, query, key, value, options), source)

    def _check_own_options(self, key: object, options: Mapping[str, object]) -> None:
        """Raise a `TypeError` for an option that neither a forward nor the source has."""
        self._check_options(options, key.options if isinstance(key, Source) else frozenset())

    def chosen(self, call: Call) -> OperationImpl:
        """The operation that runs a call."""
        return self

    def bind(
        self,
        query: ArrayLike,
        key: ArrayLike | Source,
        value: ArrayLike | None = None,
        *,
        parts: tuple[int, int] | None = None,
        **options: Any,
    ) -> Call:
        """The checked call of these arguments in the layout "BTHD", with its request; a source binds its own calls.

        Args:
            query: [B, T, H, D]; heads before length with ``layout="BHTD"``.
            key: [B, S, K, D], or heads before length; or an `attnops.Source`.
            value: [B, S, K, Dv], or heads before length; None with a source.
            parts: the number of sequence shards (query, key), for an operation that exchanges keys inside the caller's
                `jax.shard_map`; the arrays given are one shard. The call then has no boundary.
            **options: the other options of `__call__`, and the source's.
        """
        if isinstance(key, Source):
            if value is not None:
                name = type(key).__name__
                raise ValueError(f"key is a {name} and value is given too: the {name} has the values; leave value out")
            refuse_total(self.metadata, key, options)
            return bound(key, self, query, options)
        if value is None:
            raise ValueError("value=None, but must be an array [B, S, K, Dv]; only a cache has its values with it")
        call = bind_attention(self.metadata, query, key, value, options, parts or (1, 1))
        if parts is not None:
            return call
        assert isinstance(call.request, AttentionRequest)
        arrays = jax.tree.leaves((call.args, dict(call.options)))
        boundary = find_boundary(self.metadata.mesh, self.metadata.axis_rules, call.request, arrays)
        if boundary is None:
            return call
        request = call.request.replace(sequence_axes=boundary.sequence) if boundary.sequence else call.request
        return call._replace(request=request, boundary=boundary)

    def _run(self, forward: str, call: Call) -> OperationOutput:
        request = call.request
        assert isinstance(request, AttentionRequest)
        if request.source is not None:
            source: Source = call.args[1]
            return source.run(self, forward, call)
        result: OperationOutput = super()._run(forward, call)
        return result

    def reasons_for(self, forward: str, request: Request) -> list[Reason]:
        """See `BaseOperation.reasons_for`; for a request over a source, its `SourceRequest` gives the reasons."""
        if isinstance(request, AttentionRequest) and request.source is not None:
            source = request.source
            return border.reasons_of(type(source), "reasons", lambda: source.reasons(self, forward, request))
        return self.own_reasons(forward, request)

    def invoke(
        self, forward: str, function: Callable[..., OperationOutput], call: Call, options: Mapping[str, object]
    ) -> OperationOutput:
        """Run a forward on a call; under a mesh each device runs it on its shard, see `attnops.partition`."""
        assert isinstance(call.request, AttentionRequest)
        boundary = call.boundary
        if boundary is not None or not self.is_partitioned:
            on_mesh.repeats(self, call, boundary)
        if boundary is None:
            return super().invoke(forward, function, call, options)
        if boundary.is_nested and self.is_plain(forward):  # JAX has no gradient of a `jax.shard_map` in another
            args, given = boundary.replicated((call.args, dict(options)))
            return boundary.typed(function(*args, **given))
        if boundary.sequence:
            on_mesh.gathers(self, boundary.sequence)

        def checked(*args: jax.Array, **rest: object) -> OperationOutput:
            return check_output(type(self).__name__, args, rest, function(*args, **rest))

        output = run_sharded(boundary, checked, call.args, options, is_interpreted=call.request.interpret,
                             option_axes=self.option_axes, key=self.program_key(forward))  # fmt: skip
        return boundary.typed(output)

    def is_plain(self, forward: str) -> bool:
        """Whether the forward of this name is plain JAX, which the compiler can partition; kernels are not."""
        return forward == "native"

    def program_key(self, forward: str) -> Hashable | None:
        """The key of a forward's compiled programs: all that it depends on besides its arguments.

        None for an operation with state other than its metadata, whose programs are not cached.
        """
        if vars(self).keys() != {"metadata"}:
            return None
        function = getattr(type(self), f"forward_{forward}")
        return type(self), function, self.metadata, border.environment_key(self)

    def finish(self, call: Call, result: OperationOutput) -> OperationOutput:
        """A forward's result in the caller's layout, with the fields asked for, tagged for checkpoint policies.

        Raises:
            TypeError: the forward did not return an `OperationOutput`, left out a field that was asked for, or returned
                another shape or dtype than the contract's.
        """
        request = call.request
        over_source = isinstance(request, AttentionRequest) and request.source is not None
        name = f"{type(call.args[1]).__name__}.run" if over_source else type(self).__name__
        check_output(name, shapes_of(call), call.options, result)
        out = tag(result.attention_outputs, OUTPUT_NAME)
        if self.metadata.layout == "BHTD":
            out = out.swapaxes(1, 2)
        asked = {field: getattr(result, field) for option, field in OPTIONAL_FIELDS.items() if option in call.options}
        by_query = {name: tag(x, LOGSUMEXP_NAME) for name, x in asked.items() if name != "attention_weights"}
        output = OperationOutput(out, **asked | by_query)
        one_row: OperationOutput = jax.tree.map(lambda x: x[0], output) if self.metadata.layout == "THD" else output
        return one_row

    def get_mode(self, query: jax.Array, BTHD: bool = True) -> RUNTIME_MODE_TYPES:
        """The runtime mode: the metadata's, else decode where the query's length is 1, else train.

        Args:
            query: [B, T, H, D], or [B, H, T, D].
            BTHD: whether the shape is [B, T, H, D].
        """
        return resolve_mode(self.metadata, query.shape[1 if BTHD else 2])

    repeat_kv_heads = staticmethod(repeat_kv_heads)

    def create_stable_sharding(
        self,
        state_ps: PartitionSpec | None = None,
        preserved_indices: list[int] | None = None,
        clone_ps: PartitionSpec | None = None,
        dep: PartitionSpec | bool | None = True,
        tensor: jax.Array | None = None,
    ) -> PartitionSpec | None:
        """See `attnops.sharding.create_stable_sharding`; the mesh is the metadata's."""
        return create_stable_sharding(state_ps, preserved_indices, clone_ps, dep, tensor, self.metadata.mesh)
