"""FlashAttention: the operation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, Unpack

import jax

from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.call import Call
from attnops.dispatch.forwards import check_named, forward_for
from attnops.dispatch.limits import Limits
from attnops.dispatch.operation import ATTENTION
from attnops.dispatch.options import AttentionOptions, FlashOptions
from attnops.dispatch.rank import Rank, RankBetween
from attnops.dispatch.request import AttentionRequest, Request, is_symbolic
from attnops.kernels.flash import FlashBackend, FlashCall, attention, partial, partial_vjp
from attnops.operations.flash.backend import NativeFlash
from attnops.operations.flash.contribution import PlainFlash
from attnops.operations.vanilla import VanillaAttention
from attnops.output import OperationOutput
from attnops.softmax import Contribution, PartialSoftmax
from attnops.typing import PyTree

# An array of this many scores or more is too large: 4 GB in float32.
_LARGE: Final = 1 << 30


class FlashAttention(OperationImpl):
    """Attention tile by tile with an online softmax: O(T + S) memory, forward and backward.

    The native forward runs on every platform of XLA and is laid out for CPUs. EMPTY tiles are computed neither forward
    nor backward, and FULL ones are not masked, whether the mask is known when tracing or traced. kv heads are not
    repeated. Tile sizes are the metadata's ``block_q`` and ``block_k``, else from
    `attnops.operations.flash.tile_sizes`.

    Plugins subclass it for their platform, so that requests that they can't serve run here. With ``return_weights`` it
    runs `vanilla`, in O(B · H · T · S) memory.

    Derivatives of every order and mode: reverse mode by the forward's kernels, all others by
    `attnops.operations.flash.contribution.PlainFlash`, in plain JAX on every platform, in O(T + S) memory.
    """

    computes: ClassVar[str | None] = ATTENTION
    limits: ClassVar[Mapping[str, Limits]] = {"native": Limits(bias_kinds=None, symbolic=frozenset({"batch"}))}

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        return "flash"

    @classmethod
    def rank(cls, request: Request) -> Rank | RankBetween | None:
        inherited = super().rank(request)
        if inherited is not Rank.NATIVE:
            return inherited  # a plugin's kernel, in a subclass
        if request.platform == "cpu":
            return Rank.NATIVE_LAYOUT
        return Rank.LINEAR_MEMORY if isinstance(request, AttentionRequest) and _scores(request) > _LARGE else Rank.LOOP

    def forward_native(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[AttentionOptions]
    ) -> OperationOutput:
        """See `OperationImpl.__call__`."""
        if options.get("return_weights"):
            return VanillaAttention(self.metadata).forward_native(query, key, value, **options)
        options.pop("return_weights", None)
        return self.run_backend("native", query, key, value, **options)  # type: ignore[misc]

    def details(self, request: Request) -> Iterable[str]:
        """See `attnops.BaseOperation.details`."""
        forward = forward_for(type(self), request.platform)
        is_kernel = forward != "native" and self.backend(forward) is not None
        if is_kernel and isinstance(request, AttentionRequest) and request.needs_grad:
            yield "derivatives: reverse mode by kernels; forward mode and higher orders in plain JAX, as native flash"

    def backend(self, forward: str) -> FlashBackend | None:
        """The kernels of a forward, by its name; None for a forward that does not use the flash skeleton."""
        return NativeFlash() if forward == "native" else None

    def run_backend(
        self, forward: str, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[FlashOptions]
    ) -> OperationOutput:
        """The result of a forward of this class: `attnops.kernels.flash.attention` with its backend."""
        check_named(FlashAttention.run_backend, options)
        backend = self.backend(forward)
        assert backend is not None
        call = FlashCall.of(self.metadata, query, key, value, options)
        out, lse, _, *highest = attention(backend, call, PlainFlash())
        return OperationOutput(out, None, lse if options.get("return_lse") else None, *highest)

    def run_partial(self, forward: str, call: Call) -> PartialSoftmax:
        """See `OperationImpl.partial`."""
        backend = self.backend(forward)
        if backend is None:
            return super().run_partial(forward, call)
        return partial(backend, self._flash_call(call), PlainFlash())

    def run_partial_vjp(
        self, forward: str, call: Call, wants_bias: bool, lse: jax.Array, lse_residual: jax.Array, d: Contribution
    ) -> tuple[jax.Array, jax.Array, jax.Array, PyTree]:
        """See `OperationImpl.partial_vjp`."""
        backend = self.backend(forward)
        if backend is None:
            return super().run_partial_vjp(forward, call, wants_bias, lse, lse_residual, d)
        return partial_vjp(backend, self._flash_call(call), PlainFlash(), wants_bias, lse, lse_residual, d)

    def _flash_call(self, call: Call) -> FlashCall:
        query, key, value = call.args
        return FlashCall.of(self.metadata, query, key, value, call.options)


def _scores(request: AttentionRequest) -> int:
    """The least number of scores of a call: a symbolic dimension counts as 1."""
    sizes = (request.batch, request.heads, request.query_length, request.key_length)
    return math.prod(1 if is_symbolic(size) else size for size in sizes)
