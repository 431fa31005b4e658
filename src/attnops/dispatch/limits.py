"""Limits: what a forward can't serve, declared as data."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from attnops.dispatch.request import AttentionRequest, Reason, Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one forward of an implementation can serve and its signature can't say, declared as data.

    Attributes:
        dtypes: dtypes that query, key and value may have; given as dtypes or their names, kept as names.
        same_dtype: query, key and value must share one dtype.
        max_head_dim: the largest D, and the largest Dv.
        head_dim_multiple: D and Dv must be a multiple of it.
        equal_head_dims: D must equal Dv.
        mask_kinds: mask primitives and operators that it evaluates. None: all.
        bias_kinds: kinds of bias that it evaluates: "array", and classes of `attnops.biases`. None: all.
        mask_primitives: JAX's primitives that it evaluates for each score of a mask with a `MaskFn`. None: all.
        bias_primitives: of a `ScoreFn`, likewise.
        differentiable: it has a backward pass. Without one it serves prefill, decode and insert only.
        interpretable: its kernel language has an interpreter, so that ``interpret=True`` works.
            True for plain JAX, which runs anywhere as it is.
        linear_memory: forward and backward need O(T + S) memory. One that needs O(T · S) declares it; the conformance
            suite holds every other to it.
    """

    dtypes: frozenset[str] = frozenset({"float32", "bfloat16", "float16"})
    same_dtype: bool = False
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    equal_head_dims: bool = False
    mask_kinds: frozenset[str] | None = None
    bias_kinds: frozenset[str] | None = frozenset({"array"})
    mask_primitives: frozenset[str] | None = None
    bias_primitives: frozenset[str] | None = None
    differentiable: bool = True
    interpretable: bool = True
    linear_memory: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", frozenset(jnp.dtype(dtype).name for dtype in self.dtypes))
        for name in ("mask_kinds", "bias_kinds"):
            kinds = getattr(self, name)
            if kinds is not None:
                object.__setattr__(self, name, frozenset(kinds))
        if self.head_dim_multiple < 1:
            raise ValueError(f"head_dim_multiple={self.head_dim_multiple} must be at least 1; leave it out for any")

    def reasons(self, request: Request) -> list[Reason]:
        """Every limit that ``request`` breaks."""
        found = []
        if request.needs_grad and not self.differentiable:
            found.append(
                Reason("mode", request.mode, "has no backward pass and serves prefill, decode and insert only",
                       "say which with mode=...")
            )  # fmt: skip
        if request.interpret and not self.interpretable:
            found.append(Reason("interpret", True, "this kernel has no interpreter", "run it on its own platform"))
        if isinstance(request, AttentionRequest):
            found += self._attention_reasons(request)
        return found

    def _attention_reasons(self, request: AttentionRequest) -> list[Reason]:
        found = []
        for name, dtype in zip(("query", "key", "value"), request.dtypes, strict=True):
            if dtype not in self.dtypes:
                found.append(
                    Reason(f"{name}.dtype", dtype, f"must be one of {sorted(self.dtypes)}",
                           "cast it, or set metadata.runtime_dtype")
                )  # fmt: skip
        if self.same_dtype and len(set(request.dtypes)) > 1:
            found.append(
                Reason("dtypes", "/".join(request.dtypes), "query, key and value must share one",
                       "cast them, or set metadata.runtime_dtype")
            )  # fmt: skip
        for name, dim in (("head_dim", request.head_dim), ("value_head_dim", request.value_head_dim)):
            if self.max_head_dim is not None and dim > self.max_head_dim:
                found.append(Reason(name, dim, f"must be at most {self.max_head_dim}"))
            if dim % self.head_dim_multiple:
                found.append(Reason(name, dim, f"must be a multiple of {self.head_dim_multiple}", "pad it with zeros"))
        if self.equal_head_dims and request.head_dim != request.value_head_dim:
            found.append(Reason("value_head_dim", request.value_head_dim, f"must equal head_dim={request.head_dim}"))
        if self.mask_kinds is not None and not request.mask_kinds <= self.mask_kinds:
            extra = sorted(request.mask_kinds - self.mask_kinds)
            found.append(Reason("mask", request.mask, f"can't evaluate {', '.join(extra)}"))
        if self.bias_kinds is not None and request.bias_kind and request.bias_kind not in self.bias_kinds:
            found.append(Reason("bias", request.bias_kind, f"must be one of {sorted(self.bias_kinds)}"))
        for name, primitives, known in (
            ("mask", request.mask_primitives, self.mask_primitives),
            ("bias", request.bias_primitives, self.bias_primitives),
        ):
            if known is not None and not primitives <= known:
                found.append(
                    Reason(name, ", ".join(sorted(primitives - known)),
                           "this kernel can't compute it for each score",
                           "look up by query, by key or by head alone, or write it elementwise"
                           + _of_derivatives(primitives - known))
                )  # fmt: skip
        return found


def _of_derivatives(primitives: frozenset[str]) -> str:
    """What else to do about functions with a derivative of their own."""
    if "custom_vjp_call" in primitives:
        return ", or state its derivative by jax.custom_jvp"
    if any(name.startswith("custom_jvp_call") for name in primitives):
        return "; pass what a jax.custom_jvp or its rule closes over as arguments, and let it return floats"
    return ""
