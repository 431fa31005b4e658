"""LinearAttention for processors: the operation and its limits."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import ClassVar, Unpack

import jax

from attnops import Limits, Reason, Request
from attnops_cpu.library import library
from attnops_linear import LinearArguments, LinearAttention, LinearOutput, LinearRequest
from attnops_linear.chunks import FEW

# The largest head dim of keys and of values.
LARGEST = 1024


class CpuLinearAttention(LinearAttention):
    """Linear attention in a C++ kernel, in chunks of 48 tokens, with a head's state in the processor's cache.

    Serves processors; on other platforms, and for requests that it refuses, the native forward runs, and so it does for
    what is differentiated, and for at most 4 tokens. All is computed in float32. Results are the same to the bit for
    any number of threads.
    """

    limits: ClassVar[Mapping[str, Limits]] = {"cpu": Limits(interpretable=False, exportable=False)}

    def environment_key(self) -> Hashable:
        """What traces depend on besides the arguments: the instruction set."""
        return library().isa

    def unsupported(self, request: Request) -> Iterable[Reason]:
        """See `attnops.BaseOperation.unsupported`."""
        problem = library().problem
        if problem is not None:
            yield problem
        if not isinstance(request, LinearRequest):
            return
        if request.decay == "channel":
            yield Reason("decay", "channel", "the kernel has decays by head, constant ones or none",
                         "the native forward computes decays by channel")  # fmt: skip
        for name, size in (("head_dim", request.head_dim), ("value_head_dim", request.value_head_dim)):
            if size > LARGEST:
                yield Reason(name, size, f"must be at most {LARGEST}", "the native forward takes any")

    def details(self, request: Request) -> Iterable[str]:
        """See `attnops.BaseOperation.details`."""
        if isinstance(request, LinearRequest) and library().problem is None:
            if request.length <= FEW:
                yield "token by token in plain JAX, as the native forward"
            else:
                yield f"a kernel in C++ for {library().isa}, in chunks of 48 tokens"
                yield "where it is differentiated: the native forward, in plain JAX"

    def forward_cpu(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[LinearArguments]
    ) -> LinearOutput:
        """See `attnops_linear.LinearAttention.forward_native`."""
        if query.shape[1] <= FEW:
            return self.forward_native(query, key, value, **options)
        from attnops_cpu.linear.forward import forward

        return self.with_derivatives(forward, None, query, key, value, **options)
