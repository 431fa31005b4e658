"""LinearAttention for GPUs: the operation and its limits."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import ClassVar, Final, Unpack

import jax

from attnops import Limits, Reason, Request
from attnops_linear import LinearArguments, LinearAttention, LinearOutput, LinearRequest, Reverse
from attnops_linear.chunks import FEW
from attnops_triton.flash.operation import gpu_reasons
from attnops_triton.versions import missing

# The largest head dim of keys: a program has all of them, for some columns of values.
LARGEST: Final = 256


class TritonLinearAttention(LinearAttention):
    """Linear attention in Triton: one kernel for what chunks compute without a state, and one over their states.

    Serves NVIDIA and AMD GPUs; on other platforms, and for requests that it refuses, the native forward runs.
    ``metadata.interpret`` runs the kernels in Triton's interpreter on the host. Of more than 4 tokens, reverse mode of
    first order runs kernels too, which need the states before the chunks of 64 tokens (32 in float32), [T / 64, D, Dv]
    of each head and row, and with the delta rule an array like the values; both in the dtype of the arguments. All
    other derivatives are those of the native forward.
    """

    limits: ClassVar[Mapping[str, Limits]] = {"gpu": Limits(dtypes=frozenset({"float32", "bfloat16"}))}

    def environment_key(self) -> Hashable:
        """What traces depend on besides the arguments: the target."""
        from attnops_triton.targets import current

        return current()

    def unsupported(self, request: Request) -> Iterable[Reason]:
        """See `attnops.BaseOperation.unsupported`."""
        if not isinstance(request, LinearRequest):
            return
        yield from missing(request.interpret)
        if not request.interpret:
            yield from gpu_reasons(request)
        if request.decay == "channel" and request.length > FEW:
            yield Reason("decay", "channel", f"the kernel for more than {FEW} tokens has decays by head, constant ones "
                         "or none", "the native forward computes decays by channel")  # fmt: skip
        if request.head_dim > LARGEST:
            yield Reason("head_dim", request.head_dim, f"must be at most {LARGEST}", "the native forward takes any")

    def details(self, request: Request) -> Iterable[str]:
        """See `attnops.BaseOperation.details`."""
        if isinstance(request, LinearRequest):
            few = request.length <= FEW
            yield "token by token, in float32" if few else "in chunks of tokens, states in registers between them"
            native = "those of the native forward, in plain JAX"
            if few:
                yield f"derivatives are {native}"
            else:
                yield "gradients by kernels, from the states before the chunks, in the dtype of the arguments"
                yield f"other derivatives are {native}"

    def forward_gpu(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[LinearArguments]
    ) -> LinearOutput:
        """See `attnops_linear.LinearAttention.forward_native`."""
        # Triton is imported here, so that the plugin can be listed on machines without it.
        from attnops_triton.linear.backward import backward
        from attnops_triton.linear.forward import forward, forward_with_states

        reverse = Reverse(forward_with_states, backward) if query.shape[1] > FEW else None
        return self.with_derivatives(forward, reverse, query, key, value, **options)
