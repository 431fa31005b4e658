"""PartialAttention: attention over some of a softmax's keys, for operations that exchange keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attnops.dispatch.call import Call
from attnops.dispatch.decision import decide
from attnops.dispatch.operation import BaseOperation
from attnops.dispatch.request import AttentionRequest
from attnops.dispatch.source import Source
from attnops.kernels.rules import inexact_vjp
from attnops.output import OPTIONAL_FIELDS, OperationOutput
from attnops.partition.options import CONTRACT
from attnops.softmax import Contribution, PartialSoftmax, contribution
from attnops.typing import PyTree


class PartialAttention(BaseOperation):
    """The methods of `attnops.OperationImpl` that attend to some of the keys."""

    def partial(self, query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: object) -> PartialSoftmax:
        """Attention over some of a softmax's keys, to be merged with others by `attnops.softmax.merge`.

        Args:
            query: [B, T, H, D].
            key: [B, S, K, D], some of the keys.
            value: [B, S, K, Dv].
            **options: ``mask``, ``bias``, ``softmax_scale``, ``logits_soft_cap``, ``dropout_key``, ``mode`` and
                ``return_max_logits`` of `__call__`, for these keys. Sinks belong to all keys: add them by
                `attnops.softmax.with_sinks`.

        Returns:
            The result, in float32 for any dtype of the query. An implementation without partial softmaxes computes it
            from its output and logsumexp: the rounding error of the logsumexp (1e-4 if scores are 1e3) becomes an
            error of the weights.

        Raises:
            ValueError: an option that belongs to all keys together, another layout than "BTHD", or a mesh that shards
                the call: call it inside `jax.shard_map`, with no mesh in the metadata.
            TypeError: an option that no forward of this operation names.
        """
        call = self._bind_partial(query, key, value, options)
        return self.run_partial(decide(self, call.request), call)

    def partial_vjp(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        lse: jax.Array,
        lse_residual: jax.Array,
        d: Contribution,
        *,
        wants_bias: bool = False,
        **options: object,
    ) -> tuple[jax.Array, jax.Array, jax.Array, PyTree]:
        """The gradients of the contribution of some keys to a softmax, from its logsumexp over all keys.

        Args:
            query: [B, T, H, D].
            key: [B, S, K, D], some of the keys.
            value: [B, S, K, Dv].
            lse: the logsumexp over all keys, float32 [B, H, T].
            lse_residual: the rounding error of ``lse``, float32 [B, H, T].
            d: the cotangents of `attnops.softmax.contribution`.
            wants_bias: whether to compute the bias's gradient.
            **options: the options of `partial`.

        Returns:
            The gradients of query, key and value, float32, and of the bias in its structure, None for arrays without
            gradient. Implementations of `flash` compute them from ``lse``, without another forward pass.

        Raises:
            ValueError: as in `partial`; or a logsumexp or a cotangent has another shape or dtype.
        """
        call = self._bind_partial(query, key, value, options)
        request = call.request
        assert isinstance(request, AttentionRequest)
        B, T, H, Dv = request.batch, request.query_length, request.heads, request.value_head_dim
        rows = "[B, H, T]", (B, H, T)
        for name, x, (letters, shape) in (
            ("lse", lse, rows),
            ("lse_residual", lse_residual, rows),
            ("d.out", getattr(d, "out", None), ("[B, T, H, Dv]", (B, T, H, Dv))),
            ("d.weight", getattr(d, "weight", None), rows),
        ):
            given = f"{x.dtype} {tuple(x.shape)}" if hasattr(x, "dtype") else repr(x)  # type: ignore[union-attr]
            if given != f"float32 {shape}":
                raise ValueError(f"{name} is {given}, but must be float32 {letters}={shape}")
        return self.run_partial_vjp(decide(self, call.request), call, wants_bias, lse, lse_residual, d)

    def run_partial(self, forward: str, call: Call) -> PartialSoftmax:
        """`partial` by the forward of this name; an implementation may override it."""
        output: OperationOutput = self.run(call)
        assert output.logsumexp is not None
        out = output.attention_outputs.astype(jnp.float32)
        return PartialSoftmax(out, output.logsumexp, jnp.zeros_like(output.logsumexp), output.max_logits)

    def run_partial_vjp(
        self, forward: str, call: Call, wants_bias: bool, lse: jax.Array, lse_residual: jax.Array, d: Contribution
    ) -> tuple[jax.Array, jax.Array, jax.Array, PyTree]:
        """`partial_vjp` by the forward of this name; an implementation may override it."""

        def contributed(given: tuple[object, ...]) -> Contribution:
            *args, bias = given
            options = call.options | {"bias": bias} if wants_bias else call.options
            partial = self.run_partial(forward, call._replace(args=tuple(args), options=options))
            return contribution(partial, lse, lse_residual)

        given = (*call.args, call.options.get("bias") if wants_bias else None)
        *d_args, d_bias = inexact_vjp(contributed, given)(d)
        dq, dk, dv = (x.astype(jnp.float32) for x in d_args)
        return dq, dk, dv, d_bias

    def _bind_partial(self, query: ArrayLike, key: ArrayLike, value: ArrayLike, options: dict[str, object]) -> Call:
        for name in ("sinks", "return_weights", "return_lse"):
            given = options.pop(name, None)
            if given is not None and given is not False:
                raise ValueError(f"{name} belongs to all keys together; leave it out of a partial softmax")
        if isinstance(key, Source):
            raise ValueError(f"key is a {type(key).__name__}, but a partial softmax needs arrays: give what it holds")
        if self.metadata.layout != "BTHD":
            raise ValueError(f"layout={self.metadata.layout!r}, but a partial softmax needs the layout 'BTHD'")
        self._check_options(
            {name: x for name, x in options.items() if name not in CONTRACT | {"mode", *OPTIONAL_FIELDS}}
        )
        call = self.prepare(query, key, value, return_lse=True, **options)
        assert isinstance(call.request, AttentionRequest)
        if call.boundary is not None:
            raise ValueError(
                "mesh: a partial softmax is of one device's keys; call it inside jax.shard_map, with no mesh in the "
                "metadata"
            )
        return call
