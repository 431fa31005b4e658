"""From the arguments of a call to its request; impossible arguments raise here, with argument, value and rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from attnops.biases import Bias, function_of
from attnops.dispatch.call import Call, resolve_mode
from attnops.dispatch.documents import NAMES, bias_by_document, documents, mask_by_document
from attnops.dispatch.metadata import OperationMetadata, check_scale, check_soft_cap
from attnops.dispatch.request import AttentionRequest, dtype_name
from attnops.dropout import ShiftedKey
from attnops.kernels.elementwise import ARGUMENTS, AXES, primitives_of
from attnops.masks.base import Dense, Mask
from attnops.masks.checks import check_boolean, check_broadcastable
from attnops.masks.functions import functions
from attnops.output import OPTIONAL_FIELDS
from attnops.partition.options import CONTRACT
from attnops.sharding.modes import MODE_TRAIN
from attnops.typing import Aval


class Dimensions(NamedTuple):
    """The dimensions of a call: batch, query length, query heads, head_dim, key length, kv heads, value head_dim."""

    B: int
    T: int
    H: int
    D: int
    S: int
    K: int
    Dv: int


def bind_attention(
    metadata: OperationMetadata,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    options: dict[str, Any],
    parts: tuple[int, int] = (1, 1),
) -> Call:
    """The call of an attention operation, its arguments checked and in the layout "BTHD".

    Args:
        metadata: the operation's metadata; its scale, soft cap and mode are the defaults of the call's.
        query: [B, T, H, D], or [B, H, T, D] in the layout "BHTD"; in the layout "THD" the arrays have no batch.
        key: [B, S, K, D], or [B, K, S, D] in the layout "BHTD".
        value: [B, S, K, Dv], or [B, K, S, Dv] in the layout "BHTD".
        options: the options by name; None means not set, and so does False for a flag.
        parts: the number of shards of query and of key. The arrays are one shard; the options are for all shards.

    Raises:
        ValueError: shapes that don't fit, a dtype that isn't floating-point, an option outside its range.
    """
    try:
        return _bind(metadata, query, key, value, dict(options), parts)
    except ValueError as error:
        if metadata.layout == "THD":
            raise
        other = "BTHD" if metadata.layout == "BHTD" else "BHTD"
        swapped = metadata.replace(layout=other)
        try:  # shapes alone
            jax.eval_shape(lambda q, k, v: _bind(swapped, q, k, v, dict(options), parts).args, query, key, value)
        except Exception:
            raise error from None
        what = "[B, heads, length, head_dim]" if other == "BHTD" else "[B, length, heads, head_dim]"
        raise ValueError(f"{error}. If the arrays are {what}: OperationMetadata(layout={other!r})") from None


def _bind(
    metadata: OperationMetadata, query: ArrayLike, key: ArrayLike, value: ArrayLike, options: dict[str, Any],
    parts: tuple[int, int],
) -> Call:  # fmt: skip
    query, key, value = (check_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    cu_seqlens = {name: options.pop(name, None) for name in NAMES}
    _refuse_cu_seqlens(metadata, cu_seqlens)
    if metadata.layout == "THD":
        query, key, value = (_one_row(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    if metadata.layout == "BHTD":
        query, key, value = (swap_heads(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    shard = _dimensions(query, key, value)
    dimensions = shard._replace(T=shard.T * parts[0], S=shard.S * parts[1])
    if metadata.runtime_dtype is not None:
        query, key, value = (x.astype(metadata.runtime_dtype) for x in (query, key, value))
    dtypes = dtype_name(query), dtype_name(key), dtype_name(value)
    if metadata.layout == "THD":
        _by_document(cu_seqlens, options, dimensions)
    request, given = bind_options(metadata, dimensions, dtypes, options)
    return Call(request, (query, key, value), given)


def refuse_total(metadata: OperationMetadata, source: object, options: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for a call over a source in the layout "THD", or with options of that layout."""
    if metadata.layout == "THD" or any(options.get(name) is not None for name in NAMES):
        raise ValueError(
            f"a call over a {type(source).__name__} has no layout 'THD' and no cu_seqlens; over a cache of "
            f"attnops-caches, give the tokens of several rows as query [1, total, H, D] with rows=Rows(...)"
        )


def _refuse_cu_seqlens(metadata: OperationMetadata, options: dict[str, Any]) -> None:
    """Raise a `ValueError` for an option of the layout "THD" in a call of another."""
    given = [name for name in NAMES if options.get(name) is not None]
    if given and metadata.layout != "THD":
        raise ValueError(
            f"{given[0]} is given, but metadata.layout={metadata.layout!r}: it is for OperationMetadata(layout='THD'), "
            f"arrays [total, heads, head_dim]; in one sequence, mask=Segments.from_cu_seqlens(cu_seqlens, length)"
        )


def _one_row(name: str, x: jax.Array) -> jax.Array:
    if x.ndim != 3:
        raise ValueError(f"{name} has shape {x.shape}, but must have rank 3 in layout='THD': [total, heads, head_dim]")
    return x[None]


def _by_document(cu_seqlens: dict[str, Any], options: dict[str, Any], dimensions: Dimensions) -> None:
    """Evaluate mask and bias in each document that ``cu_seqlens`` describe."""
    placed = documents(cu_seqlens, dimensions.T, dimensions.S)
    scores = (dimensions.B, dimensions.H, dimensions.T, dimensions.S)
    mask, bias = options.get("mask"), options.get("bias")
    if mask is not None and not isinstance(mask, Mask):
        mask = bind_mask(mask, scores)
    options["mask"] = mask_by_document(mask, placed)
    if isinstance(bias, Bias):
        options["bias"] = bias_by_document(bias, placed, scores)


def shapes_of(call: Call) -> tuple[Aval, Aval, Aval]:
    """Query, key and value of a call by shape and dtype; over a source, key and value as its request states."""
    request = call.request
    if not isinstance(request, AttentionRequest) or request.source is None:
        query, key, value = call.args
        return query, key, value
    rows = request.batch, request.key_length, request.kv_heads
    key, value = (
        jax.ShapeDtypeStruct((*rows, d), request.dtypes[1]) for d in (request.head_dim, request.value_head_dim)
    )
    return call.args[0], key, value


def bind_options(
    metadata: OperationMetadata, dimensions: Dimensions, dtypes: tuple[str, str, str], options: dict[str, Any]
) -> tuple[AttentionRequest, dict[str, Any]]:
    """The request of a call, and its options that are set, checked and bound as by `bind_attention`."""
    B, T, H, D, S, K, Dv = dimensions
    scores = (B, H, T, S)
    mode = resolve_mode(metadata, T, options.pop("mode", None))
    for name in OPTIONAL_FIELDS:
        flag = options.get(name)
        if flag is not None and not isinstance(flag, (bool, np.bool_)):
            raise ValueError(f"{name}={flag!r} must be True or False, known when tracing")
    given = {name: option for name, option in options.items() if option is not None and not _is_off(name, option)}
    for name, check, default in (
        ("softmax_scale", check_scale, metadata.softmax_scale),
        ("logits_soft_cap", check_soft_cap, metadata.logits_soft_cap),
    ):
        number = check(given.get(name, default))
        if number is not None:
            given[name] = number
    if "mask" in given:
        given["mask"] = bind_mask(given["mask"], scores)
    if "bias" in given:
        given["bias"] = bind_bias(given["bias"], scores)
    if "sinks" in given:
        given["sinks"] = _sinks(given["sinks"], H)
    dropout_prob = _dropout(metadata, mode, given)
    asked: dict[str, Any] = {name: name in given for name in OPTIONAL_FIELDS}

    request = AttentionRequest(
        options=frozenset(given),
        mode=mode,
        interpret=metadata.interpret,
        batch=B,
        query_length=T,
        key_length=S,
        heads=H,
        kv_heads=K,
        head_dim=D,
        value_head_dim=Dv,
        dtypes=dtypes,
        softmax_scale=given.get("softmax_scale"),
        logits_soft_cap=given.get("logits_soft_cap"),
        sinks="sinks" in given,
        dropout_prob=dropout_prob,
        **asked,
        **(_describe_mask(given["mask"], T, S) if "mask" in given else {}),
        **(_describe_bias(given["bias"]) if "bias" in given else {}),
    )
    return request, given


def _describe_mask(mask: Mask, T: int, S: int) -> dict[str, Any]:
    """The fields of a request that describe a bound mask."""
    described = mask.describe() | {"mask_structure": mask.structure(T, S)}
    if "MaskFn" in described["mask_kinds"]:
        described["mask_primitives"] = mask_primitives(mask)
    return described


def mask_primitives(mask: Mask) -> frozenset[str]:
    """The names of the primitives that the functions of a bound mask evaluate for each score."""
    return frozenset().union(*(primitives_of(function, AXES) for function in functions(mask)))


def _describe_bias(bias: jax.Array | Bias) -> dict[str, Any]:
    """The fields of a request that describe a bound bias."""
    if not isinstance(bias, Bias):
        return {"bias_kind": "array", "bias_shape": bias.shape, "bias_dtype": dtype_name(bias)}
    function = function_of(bias)
    primitives = {} if function is None else {"bias_primitives": primitives_of(function, ARGUMENTS)}
    return {"bias_kind": bias.kind(), **primitives}


def _is_off(name: str, option: object) -> bool:
    """Whether an option is a flag that is False. An array option that is False is refused, not ignored."""
    return name not in CONTRACT and isinstance(option, (bool, np.bool_)) and not option


def check_array(name: str, x: object) -> jax.Array:
    """``x`` as a JAX array; raises a `ValueError` unless it is a floating-point array."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise ValueError(f"{name} is a {type(x).__name__}, but must be an array of shape [B, length, heads, head_dim]")
    refuse_foreign_array(name, x)
    _check_floating(name, x, "cast it")
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(f"{name} is a ShapeDtypeStruct, which only `request` accepts; give an array")
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def swap_heads(name: str, x: jax.Array) -> jax.Array:
    if x.ndim != 4:
        raise ValueError(f"{name} has shape {x.shape}, but must have rank 4: [B, heads, length, head_dim]")
    return x.swapaxes(1, 2)


def _dimensions(query: jax.Array, key: jax.Array, value: jax.Array) -> Dimensions:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(
                f"{name} has shape {x.shape}, but must have rank 4: [B, length, heads, head_dim] (or heads before "
                f"length with metadata.layout='BHTD')"
            )
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}, but every dimension must be at least 1")
    B, T, H, D = query.shape
    for name, x in (("key", key), ("value", value)):
        if x.shape[0] != B:
            raise ValueError(f"{name} has batch {x.shape[0]}, but query has batch {B}: they must be equal")
    _, S, K, key_dim = key.shape
    if key_dim != D:
        raise ValueError(f"key has head_dim {key_dim}, but query has head_dim {D}: they must be equal")
    if value.shape[1:3] != (S, K):
        raise ValueError(
            f"value has length {value.shape[1]} and {value.shape[2]} heads, but key has length {S} and {K} heads: "
            f"they must be equal"
        )
    if H % K:
        raise ValueError(f"query has {H} heads and key has {K}: the kv heads must divide the heads")
    return Dimensions(B, T, H, D, S, K, value.shape[3])


def refuse_foreign_array(name: str, x: Aval) -> None:
    """Raise a `ValueError` for an array of another library, whose dtype is not numpy's."""
    if isinstance(x, jax.Array):
        return
    try:
        jnp.dtype(x.dtype)
    except TypeError:
        kind = f"{type(x).__module__}.{type(x).__name__}"
        raise ValueError(
            f"{name} is a {kind}, but must be an array of JAX or numpy; convert it with jnp.from_dlpack or np.asarray"
        ) from None


def _check_floating(name: str, x: Aval, hint: str) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} has dtype {x.dtype}, but must be floating-point; {hint}")
    # A float64 host array would otherwise silently become float32 where x64 is off.
    if x.dtype == np.float64:
        raise ValueError(f"{name} has dtype float64, but must be float32, bfloat16 or float16; cast it")


def bind_mask(mask: object, scores: tuple[int, int, int, int]) -> Mask:
    if isinstance(mask, Mask):
        return mask.bind(*scores)
    if isinstance(mask, type) and issubclass(mask, Mask):
        raise ValueError(f"mask is the class {mask.__name__}, but must be an instance: mask={mask.__name__}(...)")
    if not hasattr(mask, "dtype") or not hasattr(mask, "shape"):
        raise ValueError(f"mask is a {type(mask).__name__}, but must be a boolean array or an attnops.masks.Mask")
    refuse_foreign_array("mask", mask)
    hints = {
        2: "give a [B, S] padding mask as mask[:, None, None, :], a [T, S] mask as mask[None, None]",
        3: "give a [B, T, S] mask as mask[:, None]",
    }
    check_broadcastable("mask", tuple(mask.shape), scores, hints.get(len(mask.shape), "add axes of size 1"))
    check_boolean("mask", mask)
    return Dense(jnp.asarray(mask))


def bind_bias(bias: object, scores: tuple[int, int, int, int]) -> jax.Array | Bias:
    if isinstance(bias, Bias):
        return bias.bind(*scores)
    if not hasattr(bias, "dtype") or not hasattr(bias, "shape"):
        raise ValueError(f"bias is a {type(bias).__name__}, but must be an array that broadcasts to [B, H, T, S]")
    refuse_foreign_array("bias", bias)
    check_broadcastable("bias", tuple(bias.shape), scores, "add axes of size 1, such as bias[None]")
    _check_floating("bias", bias, "give a boolean mask as mask=...")
    return jnp.asarray(bias)


def _sinks(sinks: object, heads: int) -> jax.Array:
    """One sink per head, [H]: several sinks of a head are equivalent to one, their logsumexp."""
    shape = tuple(getattr(sinks, "shape", ()))
    if shape[:1] != (heads,) or len(shape) > 2 or shape[-1] == 0:
        raise ValueError(f"sinks has shape {shape}, but must have shape [H]=({heads},) or [H, n]: n logits per head")
    refuse_foreign_array("sinks", sinks)
    _check_floating("sinks", sinks, "cast it")
    array = jnp.asarray(sinks)
    if array.ndim == 1:
        return array
    # The derivatives would be NaN for a head whose sinks are all −inf.
    seen = (array != -jnp.inf).any(axis=1)
    total = jax.nn.logsumexp(jnp.where(seen[:, None], array.astype(jnp.float32), 0), axis=1)
    return jnp.where(seen, total, -jnp.inf)


def _dropout(metadata: OperationMetadata, mode: str, given: dict[str, Any]) -> float:
    """The probability of dropout of this call; removes ``dropout_key`` from ``given`` where it has no effect."""
    prob = metadata.dropout_prob
    if "dropout_key" not in given:
        if prob > 0 and mode == MODE_TRAIN:
            raise ValueError(
                f"dropout_prob={prob} needs dropout_key=jax.random.key(...) in train mode; to run without dropout "
                f"set dropout_prob=0.0, or mode='prefill'"
            )
        return 0.0
    key = given["dropout_key"]
    key = key.key if isinstance(key, ShiftedKey) else key
    is_key = hasattr(key, "dtype") and (
        (jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ())
        or (key.dtype == np.uint32 and len(key.shape) == 1)
    )
    if not is_key:
        raise ValueError(f"dropout_key={key!r} must be one PRNG key, such as jax.random.key(0)")
    if prob == 0:
        del given["dropout_key"]
    return prob
