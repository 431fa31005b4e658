"""LinearAttention for TPUs: the operation and its limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, Unpack

import jax

from attnops import Limits, OperationMetadata, Reason, Request
from attnops_linear import LinearArguments, LinearAttention, LinearOutput, LinearRequest, Reverse
from attnops_linear.chunks import FEW

# The head dims that vector memory has room for.
LARGEST: Final = 256


class TPULinearAttention(LinearAttention):
    """Linear attention in Pallas: one kernel for all chunks, with the state in vector memory between them.

    Serves TPUs; on other platforms, and for requests that it refuses, the native forward runs. ``metadata.interpret``
    runs the kernels in Pallas's interpreter on the host. Of more than 4 tokens, unless decays are by channel, reverse
    mode of first order is a kernel too, which needs the states before the chunks, float32 [T / 64, D, Dv] of each head
    and row, with D and Dv padded to multiples of 128, and with beta the inverses of the chunks' systems,
    [T / 64, 64, 64], bfloat16 with ``precision="default"`` and else float32. All other derivatives are those of the
    native forward.
    """

    limits: ClassVar[Mapping[str, Limits]] = {"tpu": Limits(dtypes=frozenset({"float32", "bfloat16"}))}

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        super().__init__(metadata)
        if (self.metadata.platform or self.current_backend()) == "tpu":
            # Now, and not in the first call, which may be traced: from JAX 0.12 on Pallas makes contexts of its own,
            # and functions that were traced before are traced again.
            import jax.experimental.pallas.tpu  # noqa: F401

    def unsupported(self, request: Request) -> Iterable[Reason]:
        """See `attnops.BaseOperation.unsupported`."""
        if not isinstance(request, LinearRequest):
            return
        for name, size in (("head_dim", request.head_dim), ("value_head_dim", request.value_head_dim)):
            if size > LARGEST:
                yield Reason(name, size, f"must be at most {LARGEST}", "the native forward takes any")

    def details(self, request: Request) -> Iterable[str]:
        """See `attnops.BaseOperation.details`."""
        if isinstance(request, LinearRequest):
            few = request.length <= FEW
            yield (
                "token by token, in float32" if few else "in chunks of 64 tokens, states in vector memory between them"
            )
            native = "those of the native forward, in plain JAX"
            if few or request.decay == "channel":
                yield f"derivatives are {native}"
            else:
                yield "gradients by a kernel, from the states before the chunks: 4 · D · Dv bytes for 64 tokens, padded"
                if request.beta:
                    yield "and the inverses of the chunks' systems: 16 KB for 64 tokens, 8 KB with precision=default"
                if "bfloat16" in request.dtypes:
                    yield "gradients of decays and betas are as exact as those of bfloat16 arrays"
                yield f"other derivatives are {native}"

    def forward_tpu(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[LinearArguments]
    ) -> LinearOutput:
        """See `attnops_linear.LinearAttention.forward_native`."""
        # Pallas is imported here, so that the plugin can be listed on machines without its requirements.
        from attnops_tpu.linear.backward import backward
        from attnops_tpu.linear.forward import forward, forward_with_states

        decay = options.get("decay")
        by_kernel = query.shape[1] > FEW and (decay is None or decay.ndim < 4)
        reverse = Reverse(forward_with_states, backward) if by_kernel else None
        return self.with_derivatives(forward, reverse, query, key, value, **options)
