"""The static description of a call."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax.numpy as jnp

from attnops.dispatch.platforms import FORWARD_CHAIN
from attnops.sharding.modes import MODE_TRAIN, RUNTIME_MODE_TYPES, canonicalize_mode, printed_mode
from attnops.typing import Aval

if TYPE_CHECKING:
    from attnops.dispatch.source import SourceRequest
    from attnops.masks.structure import MaskStructure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The static description of any call, known before it is traced.

    Attributes:
        platform: where the call runs, one of `attnops.dispatch.platforms.PLATFORMS`.
        options: the names of the options that the caller set.
        mode: the runtime mode.
        interpret: whether kernels are interpreted on the host.
        dtypes: the names of the dtypes of the floating-point arguments, each once, sorted.
    """

    platform: str = "cpu"
    options: frozenset[str] = frozenset()
    mode: RUNTIME_MODE_TYPES = MODE_TRAIN
    interpret: bool = False
    dtypes: tuple[str, ...] = ()

    computes: ClassVar[str | None] = None
    """The call's contract: `BaseOperation.computes` of the classes that may serve it."""

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["mode"] = printed_mode(self.mode)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def __str__(self) -> str:
        options = " ".join(sorted(self.options))
        return f"{printed_mode(self.mode)} on {self.platform}" + (f" with {options}" if options else "")

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", canonicalize_mode(self.mode))
        if self.platform not in FORWARD_CHAIN:
            raise ValueError(f"platform={self.platform!r} is unknown; use one of {list(FORWARD_CHAIN)}")

    @property
    def needs_grad(self) -> bool:
        """Whether the caller may differentiate the call: in train mode."""
        return self.mode == MODE_TRAIN

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AttentionRequest(Request):
    """The static description of a call of attention. Lengths are in tokens; the layout is not part of it.

    Attributes:
        batch: B.
        query_length: T.
        key_length: S.
        heads: H.
        kv_heads: K, a divisor of H.
        head_dim: D, of query and key.
        value_head_dim: Dv, of value and output.
        dtypes: the names of the dtypes of query, key and value.
        mask: the mask as text; empty for none.
        mask_kinds: the primitives and operators that the mask is made of, such as ``{"Causal"}``.
        mask_shape: the shape of an array mask.
        mask_structure: the mask's band, whether it has segments, and its other kinds; without a mask, a band without
            limits.
        mask_primitives: the names of JAX's primitives that a mask with a `MaskFn` evaluates for each score;
            values per query, key or head are computed before.
        bias_kind: ``"array"``, or the class of a structured bias; empty for none.
        bias_primitives: the names of JAX's primitives that a `ScoreFn` evaluates for each score.
        bias_shape: the shape of an array bias.
        bias_dtype: the name of the dtype of an array bias.
        softmax_scale: the scale; None for ``head_dim ** -0.5``.
        logits_soft_cap: the cap; None for none.
        sinks: whether the call has sinks.
        dropout_prob: the probability of dropout; 0 where the call has none.
        return_lse: whether the logsumexp is asked for.
        return_weights: whether the attention weights are asked for.
        return_max_logits: whether the largest scores are asked for.
        sequence_axes: the mesh axes over which the metadata's rules shard queries or keys.
        source: the description of what holds keys and values; None for arrays. ``key_length`` counts its slots, and
            mask and bias have one element per slot.
    """

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    dtypes: tuple[str, str, str] = ("float32", "float32", "float32")
    mask: str = ""
    mask_kinds: frozenset[str] = frozenset()
    mask_shape: tuple[int, ...] | None = None
    mask_structure: MaskStructure = None  # type: ignore[assignment]  # never after __post_init__
    mask_primitives: frozenset[str] = frozenset()
    bias_kind: str = ""
    bias_primitives: frozenset[str] = frozenset()
    bias_shape: tuple[int, ...] | None = None
    bias_dtype: str = ""
    softmax_scale: float | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
    dropout_prob: float = 0.0
    return_lse: bool = False
    return_weights: bool = False
    return_max_logits: bool = False
    sequence_axes: tuple[str, ...] = ()
    source: SourceRequest | None = None

    computes: ClassVar[str | None] = "attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_structure is None:  # made by hand: only the mask's kinds are known
            from attnops.masks.structure import MaskStructure

            known = MaskStructure(
                rest=self.mask_kinds, by_batch=True, by_head=True, static=False, may_have_fully_masked_tokens=True
            )
            object.__setattr__(self, "mask_structure", known if self.mask_kinds else MaskStructure())

    def replace(self, **changes: Any) -> Self:
        """See `Request.replace`. With another mask or other lengths the structure is not known, unless it is given."""
        if {"mask", "mask_kinds", "query_length", "key_length"} & set(changes):
            changes = {"mask_structure": None} | changes
        return super().replace(**changes)

    def __str__(self) -> str:
        shape = (
            f"B{self.batch} T{self.query_length} S{self.key_length} H{self.heads} K{self.kv_heads} "
            f"D{self.head_dim} Dv{self.value_head_dim}"
        )
        dtype = self.dtypes[0] if len(set(self.dtypes)) == 1 else "/".join(self.dtypes)
        source = f" over {self.source}" if self.source else ""
        return f"{shape} {dtype} {super().__str__()}{source}"


def is_symbolic(size: object) -> bool:
    """Whether a dimension is symbolic, of `jax.export.symbolic_shape`."""
    return not isinstance(size, int) and hasattr(size, "dimension_as_value")


def dtype_name(array: Aval) -> str:
    """The name of an array's dtype, such as ``"bfloat16"``."""
    return str(jnp.dtype(array.dtype).name)
