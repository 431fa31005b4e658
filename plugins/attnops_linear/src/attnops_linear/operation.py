"""LinearAttention: the operation ``"linear_attention"``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp

from attnops import BaseOperation, Call, Request
from attnops.kernels import equally_varying
from attnops_linear.binding import bind_linear
from attnops_linear.chunks import FEW, linear_attention
from attnops_linear.derivatives import differentiable
from attnops_linear.described import described
from attnops_linear.masks import Tokens
from attnops_linear.nonfinite import apart, apart_if_needed
from attnops_linear.output import LinearOutput
from attnops_linear.packed import step_linear
from attnops_linear.partition import run_on_shards
from attnops_linear.state import StateCache, check_cache, step_mask

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.masks import Mask
    from attnops.typing import Function
    from attnops_caches import Rows


class Reverse(NamedTuple):
    """The kernels of reverse mode.

    Attributes:
        forward: a function of the arguments of a kernel that gives the output, and what ``backward`` needs.
        backward: a function of the metadata, what ``forward`` kept, the gradients of the output, and its arguments but
            for ``return_state``, that gives the gradients of the arrays by name.
    """

    forward: Callable[..., tuple[LinearOutput, Any]]
    backward: Callable[..., dict[str, jax.Array]]


class LinearArguments(TypedDict, total=False):
    """The optional arguments of a forward; see `LinearAttention.forward_native`."""

    decay: jax.Array | None
    beta: jax.Array | None
    scale: float | None
    initial_state: jax.Array | None
    mask: Tokens | None
    return_state: bool


class LinearAttention(BaseOperation):
    """Linear attention with decays and the delta rule, of which many models' layers are cases.

    A plugin subclasses it and overrides `forward_tpu`, `forward_gpu` or `forward_cpu`, which have the arguments of
    `forward_native`. See `__call__` for the definition.
    """

    computes: ClassVar[str | None] = "linear_attention"
    reads: ClassVar[frozenset[str]] = frozenset({"axis_rules", "mesh", "precision"})

    @classmethod
    def get_impl_name(cls) -> str:
        """``"linear_attention"``."""
        return "linear_attention"

    def __call__(  # type: ignore[override]
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        *,
        decay: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        scale: float | None = None,
        initial_state: ArrayLike | None = None,
        mask: Mask | None = None,
        return_state: bool = False,
        mode: str | None = None,
    ) -> LinearOutput:
        """The outputs of a recurrence over tokens, and its last state.

        Per row and value head, with key head ``h // (Hv / K)`` and a float32 state S [D, Dv], token t computes::

            S ← exp(decay_t) S                                 by row of S where decays are by channel
            S ← S + k_t v_tᵀ                                   without beta: GLA, RetNet, lightning attention, Mamba-2
            S ← S + β_t k_t (v_t − Sᵀ k_t)ᵀ                    with beta: DeltaNet, gated delta rule, KDA
            o_t = scale · Sᵀ q_t

        Differentiable in all arrays, any number of times.

        Args:
            query: [B, T, K, D] float32, bfloat16 or float16; T may be 0.
            key: [B, T, K, D].
            value: [B, T, Hv, Dv]; K divides Hv.
            decay: the natural logarithm of what is kept of the state, at most 0: [Hv], [B, T, Hv], or [B, T, Hv, D] by
                key channel. Minus infinity empties the state. None: nothing decays. Positive values are refused where
                they are known, and computed where they are traced.
            beta: [B, T, Hv], the delta rule's rate. None: values are added.
            scale: a finite number. None: ``D ** -0.5``.
            initial_state: [B, Hv, D, Dv]. None: 0.
            mask: `attnops.masks.Segments`: a segment begins with the state 0, the first one of a row with the initial
                state; a token begins one if its id differs from that of the token before. NaN and infinities in
                the arguments of a segment reach no other one; a state that overflows may. `attnops.masks.KeyPadding`:
                padding changes no state, may hold NaN, and has the output 0. Or both, joined by ``&``.
            return_state: whether the output has ``state``.
            mode: runtime mode; see `attnops.OperationMetadata`.

        Raises:
            ValueError: shapes, dtypes or values that fit no implementation.
            TypeError: an option that no forward of this operation names.
            UnsupportedError: see `attnops.BaseOperation.__call__`.
        """
        options = {"decay": decay, "beta": beta, "initial_state": initial_state, "mask": mask}
        given = {name: x for name, x in options.items() if x is not None}
        output: LinearOutput = self.run(
            self.prepare(query, key, value, scale=scale, return_state=return_state, mode=mode, **given)
        )
        return output

    def described(self, sizes: Mapping[str, int], dtype: Any, mask: Any, options: Mapping[str, str]) -> Request:
        """The request of a call that ``attnops explain`` describes; see `attnops_linear.described`."""
        return described(self, sizes, dtype, mask, options)

    def bind(self, query: Any, key: Any, value: Any, **options: Any) -> Call:  # type: ignore[override]
        """The checked call of these arguments, with its request."""
        call = super().bind(query, key, value, **options)
        bound = dict(call.options)
        args, request = bind_linear(query, key, value, bound)
        return Call(request.replace(mode=call.request.mode, interpret=call.request.interpret), args, bound)

    def invoke(self, forward: str, function: Function, call: Call, options: Mapping[str, object]) -> LinearOutput:
        """Run a forward on a call; on a mesh each device runs it on its rows, heads and part of the sequence."""
        return run_on_shards(function, call.args, options, self.metadata, call.request.mode)

    def forward_native(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        decay: jax.Array | None = None,
        beta: jax.Array | None = None,
        scale: float | None = None,
        initial_state: jax.Array | None = None,
        mask: Tokens | None = None,
        return_state: bool = False,
    ) -> LinearOutput:
        """See `__call__`; ``mask`` says which tokens are padding and which begin a segment."""
        arrays: dict[str, Any] = {
            "query": query, "key": key, "value": value, "decay": decay, "beta": beta, "initial_state": initial_state,
            "mask": mask,
        }  # fmt: skip
        forward = functools.partial(self._forward, scale=scale, return_state=return_state)
        return apart(forward, arrays) if _has_documents(arrays) else forward(**arrays)

    def _forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array | None, beta: jax.Array | None,
        initial_state: jax.Array | None, mask: Tokens | None, scale: float | None, return_state: bool,
    ) -> LinearOutput:  # fmt: skip
        """`forward_native`, where infinities and NaN may reach other documents of their row."""
        is_token, starts = Tokens() if mask is None else mask
        (B, T, _, D), (H, Dv) = query.shape, value.shape[2:]
        is_constant = decay is not None and decay.ndim == 1
        if decay is not None:
            decay = decay[:, None] if decay.ndim == 1 else decay.reshape(B, T, H, 1 if decay.ndim == 3 else D)
            decay = jnp.broadcast_to(decay, (B, T, H, decay.shape[-1]))
        if initial_state is None:
            initial_state = jnp.zeros((B, H, D, Dv), jnp.float32)

        def prepared(x: jax.Array) -> jax.Array:
            if is_token is not None:
                x = jnp.where(is_token.reshape(B, T, *[1] * (x.ndim - 2)), x, 0)
            return x.astype(jnp.float32)

        precision = "highest" if self.metadata.precision is None else self.metadata.precision.name.lower()
        with jax.default_matmul_precision(precision):
            outputs, state = linear_attention(
                prepared(query) * (D**-0.5 if scale is None else scale), prepared(key), prepared(value),
                None if decay is None else prepared(decay), None if beta is None else prepared(beta), starts,
                initial_state.astype(jnp.float32), is_constant,
            )  # fmt: skip
        if is_token is not None:
            outputs = jnp.where(is_token[:, :, None, None], outputs, 0)
        return LinearOutput(outputs.astype(query.dtype), state if return_state else None)

    def with_derivatives(
        self,
        kernel: Callable[..., LinearOutput],
        reverse: Reverse | None,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        **options: Unpack[LinearArguments],
    ) -> LinearOutput:
        """What a kernel computes, with derivatives of all orders.

        Args:
            kernel: a function of the metadata and the arguments of `forward_native`. It is not called without tokens.
            reverse: kernels for reverse mode of first order. All other derivatives are those of `forward_native`. With
                None it computes all derivatives, and the outputs of what is differentiated.
            query: [B, T, K, D].
            key: [B, T, K, D].
            value: [B, T, Hv, Dv].
            **options: the other arguments of `forward_native`.
        """
        static: Any = {name: x for name, x in options.items() if name in ("scale", "return_state")}
        arrays: Any = {name: x for name, x in options.items() if name not in static}
        arrays |= {"query": query, "key": key, "value": value}

        def native(arrays: Any) -> LinearOutput:
            return self.forward_native(**arrays, **static)

        if 0 in (*query.shape[:2], value.shape[2]):
            return native(arrays)

        @jax.custom_jvp
        def run(arrays: Any) -> LinearOutput:
            forward = functools.partial(kernel, self.metadata, **static)
            if not _has_documents(arrays):
                return forward(**arrays)
            # Pallas's interpreter waits for all devices in each call: they must make equally many.
            if self.metadata.interpret and jax.sharding.get_abstract_mesh().manual_axes:
                return apart(forward, arrays)
            return apart_if_needed(forward, arrays)

        def reversible(**arrays: Any) -> LinearOutput:
            assert reverse is not None
            forward, shared = (
                functools.partial(reverse.forward, self.metadata, **static),
                {"scale": static.get("scale")},
            )

            def backward(arrays: Any, kept: Any, d: LinearOutput) -> list[jax.Array]:
                found = reverse.backward(self.metadata, kept, d, **arrays, **shared)
                return [found[name] for name in sorted(found)]  # the order of a dict's leaves

            # Gradients vary over all mesh axes that an array varies over; the cast sums them for the others.
            arrays = equally_varying(arrays)
            output: LinearOutput = differentiable(lambda arrays: forward(**arrays), backward, native, arrays)
            return output

        @run.defjvp
        def tangent(primals: Any, tangents: Any) -> tuple[LinearOutput, LinearOutput]:
            if reverse is None:  # the native forward, which tangents need anyway
                return jax.jvp(native, primals, tangents)
            wrapped = apart if _has_documents(primals[0]) else lambda forward, arrays: forward(**arrays)
            return jax.jvp(functools.partial(wrapped, reversible), primals, tangents)

        output: LinearOutput = run(arrays)
        return output

    def step(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        cache: StateCache,
        *,
        query_lengths: ArrayLike | None = None,
        rows: Rows | None = None,
        **options: Any,
    ) -> tuple[LinearOutput, StateCache]:
        """Advance the states of a cache by T tokens of each row: a decoding step, or a chunk of a prompt.

        With ``rows`` the arrays are [1, N, ...], tokens of several rows one after the other. It has no reverse mode.

        Args:
            query: [B, T, K, D].
            key: [B, T, K, D].
            value: [B, T, Hv, Dv].
            cache: one layer of the rows' states; see `StateCache`.
            query_lengths: the number of tokens of each row, integers [B] from 0 to T; the rest is padding. None: T.
            rows: an `attnops_caches.Rows`: which packed tokens are of which row of the cache.
            **options: ``decay``, ``beta``, ``scale``, ``mask`` and ``mode`` of `__call__`.

        Returns:
            The output, without a state, and the cache after the tokens.

        Raises:
            ValueError: see `__call__`; or the cache has several layers, or other shapes; or ``rows`` are given with
                ``query_lengths`` or ``mask``, or are not those of the tokens.
        """
        for name in ("initial_state", "return_state"):
            if name in options:
                raise ValueError(f"{name} is given, but step takes the state from the cache and returns it in it")
        check_cache(cache)
        if rows is not None:
            given = options | {"query_lengths": query_lengths}
            outputs, cache = step_linear(self, (query, key, value), cache, rows, given)
            return LinearOutput(outputs), cache
        B, T = (*getattr(query, "shape", ()), 0, 0)[:2]
        mask, counts = step_mask(query_lengths, options.pop("mask", None), B, T)
        output = self(query, key, value, initial_state=cache.state, return_state=True, mask=mask, **options)
        assert output.state is not None
        return output._replace(state=None), cache.advanced(output.state, counts)


def _has_documents(arrays: Mapping[str, Any]) -> bool:
    """Whether products over several tokens may have several documents; few tokens are computed one by one."""
    mask = arrays.get("mask")
    return mask is not None and mask.starts is not None and arrays["query"].shape[1] > FEW
