"""Limits: which requests a forward can serve, declared as data."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import jax.numpy as jnp

from attnops.dispatch.request import AttentionRequest, Request, is_symbolic
from attnops.errors import Reason
from attnops.sharding.modes import printed_mode

if TYPE_CHECKING:
    from jax.typing import DTypeLike

# Limits that apply to attention only, with its query, key and value.
ATTENTION_ONLY: Final = (
    "max_head_dim", "head_dim_multiple", "equal_head_dims", "mask_kinds", "bias_kinds", "mask_primitives",
    "bias_primitives", "linear_memory", "symbolic",
)  # fmt: skip
# The values of `Limits.symbolic`.
SYMBOLIC: Final = frozenset({"batch", "length"})
_KINDS: Final = {
    "batch": "batch", "query_length": "length", "key_length": "length", "heads": "heads", "kv_heads": "heads",
    "head_dim": "head_dim", "value_head_dim": "head_dim",
}  # fmt: skip
# The kinds of `Mask.kinds` that are not names of classes.
_OPERATORS: Final = {"And": "&", "Or": "|", "Not": "~", "At": "at"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The requests that a forward can serve, beyond what its signature states.

    Attributes:
        dtypes: dtypes that query, key and value may have; for other operations, all floating-point arguments. Given as
            dtypes or their names, stored as names.
        same_dtype: these arguments must share one dtype.
        max_head_dim: the largest D, and the largest Dv.
        head_dim_multiple: D and Dv must be multiples of it.
        equal_head_dims: D must equal Dv.
        mask_kinds: mask primitives and operators that it evaluates. None: all.
        bias_kinds: kinds of bias that it evaluates: "array", and classes of `attnops.biases`. None: all.
        mask_primitives: JAX's primitives that it evaluates for each score of a mask with a `MaskFn`. None: all.
        bias_primitives: JAX's primitives that it evaluates for each score of a `ScoreFn`. None: all.
        differentiable: it has a backward pass. Without one it serves prefill, decode and insert only.
        interpretable: its kernel language has an interpreter, so that ``interpret=True`` works.
            True for plain JAX, which needs none.
        exportable: `jax.export` can serialise its programs. False if they call `jax.ffi`, which JAX does not serialise.
        linear_memory: forward and backward need O(T + S) memory, as the conformance suite checks; False for O(T · S).
        symbolic: the dimensions that may be symbolic (`jax.export.symbolic_shape`): "batch", "length" or both. If
            another one is, ``unsupported`` is not called, since comparisons with it may be inconclusive.

    A class that is not an `OperationImpl` may declare dtypes, same_dtype, differentiable, interpretable and exportable.

    Raises:
        ValueError: a field is outside its range, or names an unknown dtype or an unknown kind of mask or bias.
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
    exportable: bool = True
    linear_memory: bool = True
    symbolic: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", frozenset(_dtype(dtype) for dtype in _collection("dtypes", self.dtypes)))
        for name in ("mask_kinds", "bias_kinds", "mask_primitives", "bias_primitives"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, frozenset(_collection(name, value)))
        # Imported only for classes that limit them, so that the dispatcher loads neither masks nor biases.
        if self.mask_kinds is not None:
            from attnops.masks import Mask

            _check_kinds("mask_kinds", self.mask_kinds, _names(Mask) - {*_OPERATORS} | {*_OPERATORS.values()})
        if self.bias_kinds is not None and self.bias_kinds != {"array"}:
            from attnops.biases import Bias

            _check_kinds("bias_kinds", self.bias_kinds, _names(Bias) | {"array"})
        for name in ("head_dim_multiple", "max_head_dim"):
            number = getattr(self, name)
            if number is None and name == "max_head_dim":
                continue
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number!r} must be an int of at least 1; leave it out for any")
        object.__setattr__(self, "symbolic", frozenset(_collection("symbolic", self.symbolic)))
        if unknown := sorted(self.symbolic - SYMBOLIC):
            raise ValueError(f"symbolic={unknown} must be among {sorted(SYMBOLIC)}")

    def attention_only(self) -> list[str]:
        """The fields of `ATTENTION_ONLY` that are not at their defaults."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [name for name in ATTENTION_ONLY if getattr(self, name) != defaults[name]]

    def reasons(self, request: Request) -> list[Reason]:
        """Every limit that ``request`` breaks."""
        reasons = []
        if request.needs_grad and not self.differentiable:
            reasons.append(
                Reason("mode", printed_mode(request.mode),
                       "has no backward pass and serves prefill, decode and insert only",
                       "without gradients, call it with mode='prefill'")
            )  # fmt: skip
        if request.interpret and not self.interpretable:
            reasons.append(Reason("interpret", True, "this kernel has no interpreter", "run it on its own platform"))
        reasons += self._dtype_reasons(request)
        if isinstance(request, AttentionRequest):
            reasons += self._attention_reasons(request)
        return reasons

    def _dtype_reasons(self, request: Request) -> list[Reason]:
        is_attention, reasons, dtypes = isinstance(request, AttentionRequest), [], request.dtypes
        todo = "cast it, or set metadata.runtime_dtype" if is_attention else "cast it"
        wrong = {dtype: "dtype" for dtype in dtypes if dtype not in self.dtypes}
        if is_attention and len(set(dtypes)) > 1:
            names = ("query.dtype", "key.dtype", "value.dtype")
            wrong = {dtype: ", ".join(n for n, d in zip(names, dtypes, strict=True) if d == dtype) for dtype in wrong}
        for dtype, arguments in wrong.items():
            reasons.append(Reason(arguments, dtype, f"must be one of {sorted(self.dtypes)}", todo))
        if self.same_dtype and len(set(dtypes)) > 1:
            who = "query, key and value" if is_attention else "floating-point arguments"
            reasons.append(
                Reason("dtypes", "/".join(dtypes), f"{who} must share one dtype", todo.replace("it", "them", 1))
            )
        return reasons

    def symbolic_reasons(self, request: Request) -> list[Reason]:
        """The dimensions of ``request`` that are symbolic and may not be."""
        if not isinstance(request, AttentionRequest):
            return []
        reasons = []
        for name, kind in _KINDS.items():
            if kind not in self.symbolic and is_symbolic(size := getattr(request, name)):
                reasons.append(
                    Reason(name, size, "must be a number when tracing, not symbolic",
                           "export for each size"
                           + ('; or create "vanilla", which has O(T · S) memory' if kind in SYMBOLIC else ""))
                )  # fmt: skip
        return reasons

    def _attention_reasons(self, request: AttentionRequest) -> list[Reason]:
        reasons = self.symbolic_reasons(request)
        if any(is_symbolic(dim) for dim in (request.head_dim, request.value_head_dim)):
            return reasons  # comparisons with symbolic dimensions may be inconclusive
        # One entry where they are equal.
        dims = {request.value_head_dim: "value_head_dim", request.head_dim: "head_dim"}
        for dim, name in sorted(dims.items(), key=lambda item: item[1]):
            if self.max_head_dim is not None and dim > self.max_head_dim:
                reasons.append(Reason(name, dim, f"must be at most {self.max_head_dim}"))
            if dim % self.head_dim_multiple:
                reasons.append(
                    Reason(name, dim, f"must be a multiple of {self.head_dim_multiple}", "pad it with zeros")
                )
        if self.equal_head_dims and request.head_dim != request.value_head_dim:
            reasons.append(Reason("value_head_dim", request.value_head_dim, f"must equal head_dim={request.head_dim}"))
        if self.mask_kinds is not None and not request.mask_kinds <= self.mask_kinds:
            extra = sorted(request.mask_kinds - self.mask_kinds)
            reasons.append(Reason("mask", request.mask, f"can't evaluate {', '.join(extra)}"))
        if self.bias_kinds is not None and request.bias_kind and request.bias_kind not in self.bias_kinds:
            reasons.append(Reason("bias", request.bias_kind, f"must be one of {sorted(self.bias_kinds)}"))
        for name, primitives, known in (
            ("mask", request.mask_primitives, self.mask_primitives),
            ("bias", request.bias_primitives, self.bias_primitives),
        ):
            if known is not None and not primitives <= known:
                reasons.append(
                    Reason(name, ", ".join(sorted(primitives - known)),
                           "this kernel can't compute it for each score",
                           "look up by query, by key or by head alone, or write it elementwise"
                           + _derivative_hint(primitives - known))
                )  # fmt: skip
        return reasons


def _collection(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"{name}={value!r} must be a collection, such as {{{value!r}}}")
    return tuple(value)


def _dtype(dtype: DTypeLike) -> str:
    try:
        return str(jnp.dtype(dtype).name)
    except TypeError:
        raise ValueError(f"dtypes names {dtype!r}, which is not a dtype; use float32, bfloat16, float16, …") from None


def _names(base: type) -> frozenset[str]:
    """The names of the public subclasses of ``base``, at any depth."""
    names: frozenset[str] = frozenset()
    cls: Any
    for cls in base.__subclasses__():
        is_public = not cls.__name__.startswith("_") and not getattr(cls, "is_internal", False)
        names |= _names(cls) | ({cls.__name__} if is_public else set())
    return names


def _check_kinds(name: str, kinds: frozenset[str] | None, known: frozenset[str]) -> None:
    for kind in sorted(map(str, kinds or ())):
        if kind not in known:
            lower = {other.lower(): other for other in known} | {k.lower(): v for k, v in _OPERATORS.items()}
            same = [kind.lower()] if kind.lower() in lower else []
            near = same or difflib.get_close_matches(kind.lower(), lower)
            hint = (
                f"did you mean {' or '.join(repr(lower[x]) for x in near)}?" if near else f"known are {sorted(known)}"
            )
            raise ValueError(f"{name} names {kind!r}, which is not a class or operator of masks or biases; {hint}")


def _derivative_hint(primitives: frozenset[str]) -> str:
    """A further hint about functions with a custom derivative."""
    if "custom_vjp_call" in primitives:
        return ", or define its derivative by jax.custom_jvp"
    if any(name.startswith("custom_jvp_call") for name in primitives):
        return "; pass arrays that a jax.custom_jvp or its rule closes over as arguments, and return floats from it"
    return ""
