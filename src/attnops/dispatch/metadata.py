"""OperationMetadata: the configuration of an operation, constant from call to call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from attnops.dispatch.call import resolve_mode
from attnops.dispatch.platforms import canonicalize_platform
from attnops.errors import Reason
from attnops.models.configs import read, text_config
from attnops.sharding.axes import BATCH, HEAD, HEAD_DIM, KV_HEAD, KV_HEAD_DIM, KV_LENGTH, QUERY_LENGTH
from attnops.sharding.call import AttentionShardings
from attnops.sharding.mesh import current_mesh
from attnops.sharding.modes import canonicalize_mode, printed_mode
from attnops.sharding.rules import DEFAULT_RULES, AxisRules
from attnops.typing import Aval

if TYPE_CHECKING:
    from attnops.dispatch.operation import BaseOperation

Layout = Literal["BTHD", "BHTD", "THD"]
OnUnsupported = Literal["native", "error"]

# The fields that the dispatcher reads for every operation.
_DISPATCHED: Final = frozenset({"mode", "platform", "on_unsupported", "interpret"})
_INSTEAD: Final = {"runtime_dtype": "cast its arguments", "mesh": "place its arguments with jax.device_put"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationMetadata:
    """The configuration of an operation. Frozen and hashable, so that it can be a static argument of `jax.jit`.

    Attributes:
        runtime_dtype: query, key and value are cast to it, and the output has it. None: no cast. Not float64.
        softmax_scale: the scale of the scores if a call gives none. None: ``head_dim ** -0.5``.
        logits_soft_cap: the soft cap if a call gives none. None: no cap.
        dropout_prob: probability in [0, 1) that an attention weight is dropped. Applied whenever a call has a
            ``dropout_key``, which is required in train mode; in the other modes a call without one drops nothing.
        layout: ``"BTHD"`` for arrays of shape [batch, length, heads, head_dim], ``"BHTD"`` for heads first, ``"THD"``
            for documents one after the other, [total, heads, head_dim]: see ``cu_seqlens`` of `OperationImpl.__call__`.
        mode: runtime mode (a constant of `attnops.sharding`, or "train", "prefill", "decode", "insert").
            None: decode where the query's length is 1, else train; over a cache prefill, since train is refused there.
        platform: "cpu", "cuda", "rocm", "gpu", "tpu" or "tt". None: the mesh's, else the arrays', else JAX's default.
        mesh: the mesh that calls run on. None: the current mesh (`jax.set_mesh`), else the mesh in the arrays' types
            (`jax.sharding.AxisType.Explicit`), if any. It must have the axes of the current mesh, if there is one.
        axis_rules: the mesh axes that shard each dimension, see `attnops.sharding.AxisRules`.
        precision: the precision of matrix products. None: full float32 for float32 inputs on every platform
            (`jax.lax.Precision.HIGHEST`); `jax.lax.Precision.DEFAULT` allows TF32 or bfloat16 passes.
        on_unsupported: if the implementation can't serve a call, ``"native"`` runs its native forward and warns once
            for each distinct reason, ``"error"`` raises `attnops.UnsupportedError`.
        interpret: whether to run kernels in their language's interpreter on the host instead of compiling them.
        block_q: queries per tile. None: the implementation's table.
        block_k: keys per tile. None: the implementation's table.

    Raises:
        ValueError: a field is outside its range.
    """

    runtime_dtype: jax.typing.DTypeLike | None = None
    softmax_scale: float | None = None
    logits_soft_cap: float | None = None
    dropout_prob: float = 0.0
    layout: Layout = "BTHD"
    mode: str | None = None  # one of RUNTIME_MODE_TYPES after __post_init__
    platform: str | None = None
    mesh: Mesh | None = None
    axis_rules: AxisRules = DEFAULT_RULES
    precision: jax.lax.Precision | None = None  # or its name, "highest"; a jax.lax.Precision after __post_init__
    on_unsupported: OnUnsupported = "native"
    interpret: bool = False
    block_q: int | None = None
    block_k: int | None = None

    def __post_init__(self) -> None:
        def set_field(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if self.runtime_dtype is not None:
            set_field("runtime_dtype", _check_runtime_dtype(self.runtime_dtype))
        set_field("softmax_scale", check_scale(self.softmax_scale))
        set_field("logits_soft_cap", check_soft_cap(self.logits_soft_cap))
        set_field("dropout_prob", check_dropout_prob(self.dropout_prob))
        if self.layout not in ("BTHD", "BHTD", "THD"):
            raise ValueError(f"layout={self.layout!r} must be 'BTHD', 'BHTD' or 'THD'")
        if self.mode is not None:
            set_field("mode", canonicalize_mode(self.mode))
        if self.platform is not None:
            set_field("platform", canonicalize_platform(self.platform))
        if self.mesh is not None and not isinstance(self.mesh, (Mesh, AbstractMesh)):
            raise ValueError(f"mesh={self.mesh!r} must be a jax.sharding.Mesh; None for the current one")
        if not isinstance(self.axis_rules, AxisRules):
            raise ValueError(f"axis_rules={self.axis_rules!r} must be an attnops.sharding.AxisRules")
        if self.precision is not None:
            set_field("precision", _check_precision(self.precision))
        if self.on_unsupported not in ("native", "error"):
            raise ValueError(f"on_unsupported={self.on_unsupported!r} must be 'native' or 'error'")
        if not isinstance(self.interpret, bool):
            raise ValueError(f"interpret={self.interpret!r} must be True or False")
        for name in ("block_q", "block_k"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}={value!r} must be a positive int, or None for the implementation's table")

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.mode is not None:
            values["mode"] = printed_mode(self.mode)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @classmethod
    def from_config(cls, config: object, **overrides: Any) -> OperationMetadata:
        """The metadata from a model's config; fields that the config does not name have their defaults.

        Args:
            config: an object or a mapping, such as a Hugging Face ``PretrainedConfig``. A ``text_config`` in it takes
                precedence. Each field is read from the first of its `CONFIG_NAMES` that is present and not None; but
                ``logits_soft_cap`` is not read from a model's config (with a ``model_type`` or a ``vocab_size``), where
                it is the cap of the language-model head.
            **overrides: fields of the metadata that take precedence over the config.

        Raises:
            ValueError: a value of the config is outside its range.
            TypeError: an override is not a field.
        """
        values: dict[str, Any] = {}
        inner = text_config(config)
        for each in [config] if inner is config else [config, inner]:
            is_model = read(each, "model_type", "vocab_size") is not None
            for field, names in CONFIG_NAMES.items():
                for name in names:
                    value = None if is_model and name == "logits_soft_cap" else read(each, name)
                    if value is not None:
                        values[field] = _CONVERTED[name](value) if name in _CONVERTED else value
                        break
        return cls(**(values | overrides))

    def get_shardings(
        self, query: Aval, key: Aval, value: Aval | None = None, *, mode: str | None = None
    ) -> AttentionShardings:
        """The partition specs of a call, on the metadata's mesh or the current one, by the axis rules.

        Args:
            query: an array, or anything with a ``shape``: [B, T, H, D], or [B, H, T, D] in the layout "BHTD".
            key: an array, or anything with a ``shape``: [B, S, K, D], or [B, K, S, D].
            value: an array, or anything with a ``shape``: [B, S, K, Dv], or [B, K, S, Dv]; None for the key's.
            mode: runtime mode. None: the metadata's, else decode for one query, else train.

        Returns:
            Specs of query, key and value, without mesh axes that are absent or do not divide a dimension, and the specs
            derived from them: of biases, masks, sinks, segment ids, lengths, output and logsumexp.

        Raises:
            ValueError: a shape does not have four dimensions, the layout is "THD", or ``mode`` is not a runtime mode.
        """
        if self.layout == "THD":
            raise ValueError("layout='THD' has no batch: ask for shapes [1, total, heads, head_dim] in layout='BTHD'")
        value = key if value is None else value
        swapped = self.layout == "BHTD"
        for name, array in (("query", query), ("key", key), ("value", value)):
            if len(array.shape) != 4:
                raise ValueError(f"{name} has shape {tuple(array.shape)}, but must have 4 dimensions, {self.layout}")
        chosen = resolve_mode(self, query.shape[2 if swapped else 1], mode)
        mesh = self.mesh if self.mesh is not None else current_mesh()

        def spec(array: Aval, *axes: str) -> PartitionSpec:
            batch, length, heads, features = axes
            ordered = (batch, heads, length, features) if swapped else axes
            return self.axis_rules.spec(ordered, array.shape, mesh, chosen)

        return AttentionShardings(
            query=spec(query, BATCH, QUERY_LENGTH, HEAD, HEAD_DIM),
            key=spec(key, BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM),
            value=spec(value, BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM),
            layout=self.layout,
            mesh=mesh,
        )

    def unread(self, cls: type[BaseOperation]) -> Iterator[Reason]:
        """A reason for each field that is set, but read neither by the dispatcher nor by the class."""
        for field in dataclasses.fields(OperationMetadata):
            value = getattr(self, field.name)
            if field.name in _DISPATCHED or field.name in cls.reads or value is field.default:
                continue
            if field.default is None or value != field.default:
                instead = _INSTEAD.get(field.name, "leave it out")
                yield Reason(f"metadata.{field.name}", value, f"{cls.__name__} does not read it", instead)

    def replace(self, **changes: Any) -> OperationMetadata:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


# The names that model configs use for a field, in order of precedence.
CONFIG_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "runtime_dtype": ("runtime_dtype", "attn_dtype"),
    "softmax_scale": ("softmax_scale", "attention_multiplier", "query_pre_attn_scalar"),  # Granite; Gemma 2 and 3
    "logits_soft_cap": ("logits_soft_cap", "attn_logit_softcapping"),  # Gemma 2
    # Llama and most others; BERT; GPT-2.
    "dropout_prob": ("dropout_prob", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"),
    **{
        name: (name,)
        for name in ("layout", "mode", "platform", "mesh", "axis_rules", "precision", "on_unsupported", "interpret")
    },
    "block_q": ("block_q", "blocksize_q"),
    "block_k": ("block_k", "blocksize_k"),
}
# How a value is converted, by its name in the config. Some configs write "no cap" as 0.
_CONVERTED: Final[dict[str, Callable[[Any], object]]] = {
    "query_pre_attn_scalar": lambda value: value**-0.5,
    **dict.fromkeys(CONFIG_NAMES["logits_soft_cap"], lambda value: value or None),
}


def _check_runtime_dtype(value: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise ValueError(f"runtime_dtype={value!r} is not a dtype; use float32, bfloat16 or float16") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"runtime_dtype={dtype} must be a floating-point dtype; use float32, bfloat16 or float16")
    # It would silently become float32 where x64 is off.
    if dtype == jnp.float64:
        raise ValueError("runtime_dtype=float64, but must be float32, bfloat16 or float16")
    return dtype


def _check_precision(value: object) -> jax.lax.Precision:
    try:
        return value if isinstance(value, jax.lax.Precision) else jax.lax.Precision[str(value).upper()]
    except KeyError:
        names = [precision.name.lower() for precision in jax.lax.Precision]
        raise ValueError(f"precision={value!r} must be a jax.lax.Precision, or the name of one: {names}") from None


def _number(name: str, value: SupportsFloat, hint: str) -> float:
    # float() accepts these too: float(True) is 1.0.
    if isinstance(value, (bool, np.bool_, str, bytes)):
        raise ValueError(f"{name}={value!r} must be a number; {hint}")
    try:
        return float(value)
    except jax.errors.ConcretizationTypeError:
        raise ValueError(f"{name} is a traced array, but must be a number known when tracing; {hint}") from None
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} must be a number; {hint}") from None


# The largest float32, and the range of caps by which float32 scores can be divided and multiplied.
_LARGEST: Final = float(jnp.finfo(jnp.float32).max)
_CAPS: Final = (1e-30, 1e30)


def check_scale(value: SupportsFloat | None) -> float | None:
    """``softmax_scale`` as a float that float32 holds; see `OperationMetadata`."""
    if value is None:
        return None
    scale = _number("softmax_scale", value, "multiply the query by a learned temperature instead")
    if not abs(scale) <= _LARGEST:
        raise ValueError(
            f"softmax_scale={scale} must be finite in float32, ±{_LARGEST:.3g}; leave it out for head_dim ** -0.5"
        )
    return scale


def check_soft_cap(value: SupportsFloat | None) -> float | None:
    """``logits_soft_cap`` as a positive float that float32 can divide and multiply by; see `OperationMetadata`."""
    if value is None:
        return None
    cap = _number("logits_soft_cap", value, "leave it out for no cap")
    low, high = _CAPS
    if not low <= cap <= high:
        raise ValueError(f"logits_soft_cap={cap} must be positive, from {low:g} to {high:g}; leave it out for no cap")
    return cap


def check_dropout_prob(value: SupportsFloat) -> float:
    """``dropout_prob`` as a float in [0, 1); see `OperationMetadata`."""
    prob = _number("dropout_prob", value, "use 0.0 for no dropout")
    if not 0 <= prob < 1:
        raise ValueError(f"dropout_prob={prob} must lie in [0, 1); use 0.0 for no dropout")
    return prob
