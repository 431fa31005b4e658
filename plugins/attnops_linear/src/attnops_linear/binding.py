"""Checks of the arguments of linear attention."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnops_linear.masks import Tokens, bind_mask, is_known
from attnops_linear.request import LinearRequest

_FLOATS = ("float32", "bfloat16", "float16")


def bind_linear(query: Any, key: Any, value: Any, options: dict[str, Any]) -> tuple[tuple[Any, ...], LinearRequest]:
    """The arrays of a call and its request, without mode and platform; arrays and numbers of ``options`` replaced.

    Raises:
        ValueError: shapes, dtypes or values that fit no implementation.
    """
    query, key, value = (
        _array(name, x, shape)
        for name, x, shape in (
            ("query", query, "[B, T, K, D]"), ("key", key, "[B, T, K, D]"), ("value", value, "[B, T, Hv, Dv]"),
        )
    )  # fmt: skip
    B, T, K, D = query.shape
    if key.shape != query.shape:
        heads = "; repeated key heads are not needed, since Hv may be a multiple of K" if key.shape[2] != K else ""
        raise ValueError(f"key has shape {key.shape}, but must have the query's, [B, T, K, D]={query.shape}{heads}")
    H, Dv = value.shape[2:]
    if value.shape[:2] != (B, T):
        raise ValueError(
            f"value has shape {value.shape}, but must begin with the query's [B, T]={(B, T)}: a recurrence updates its "
            f"state with each query's own key and value"
        )
    if not K or H % K:
        raise ValueError(f"value has Hv={H} heads and query K={K}, but K must divide Hv: each state has one key head")
    dtypes = {str(x.dtype) for x in (query, key, value)}
    decay_kind = _bind_decay(options, B, T, H, D)
    if (beta := options.get("beta")) is not None:
        beta = options["beta"] = floating("beta", beta)
        if beta.shape != (B, T, H):
            raise ValueError(f"beta has shape {beta.shape}, but must have shape [B, T, Hv]={(B, T, H)}")
    options["scale"] = _scale(options.get("scale"), D)
    if (state := options.get("initial_state")) is not None:
        state = options["initial_state"] = floating("initial_state", state)
        if state.shape != (B, H, D, Dv):
            hint = "; swap its last two axes: keys come first" if state.shape == (B, H, Dv, D) else ""
            raise ValueError(
                f"initial_state has shape {state.shape}, but must have shape [B, Hv, D, Dv]={(B, H, D, Dv)}{hint}"
            )
    kinds, tokens = bind_mask(options.pop("mask", None), B, T)
    if tokens != Tokens():
        options["mask"] = tokens
    check_bool("return_state", options.get("return_state", False))
    if not options.get("return_state", True):
        del options["return_state"]
    request = LinearRequest(
        batch=B, length=T, key_heads=K, value_heads=H, head_dim=D, value_head_dim=Dv, dtypes=tuple(sorted(dtypes)),
        decay=decay_kind, beta=beta is not None, mask_kinds=kinds, initial_state=state is not None,
        return_state="return_state" in options, options=frozenset(options) - {"scale"},
    )  # fmt: skip
    return (query, key, value), request


def check_bool(name: str, value: object) -> None:
    """Raise a `ValueError` unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def _array(name: str, x: Any, shape: str) -> jax.Array:
    x = floating(name, x)
    if x.ndim != 4:
        raise ValueError(f"{name} has shape {x.shape}, but must have 4 dimensions, {shape}")
    if not x.shape[3]:
        raise ValueError(f"{name} has shape {x.shape}, but must have a head dim of at least 1")
    return x


def floating(name: str, x: Any) -> jax.Array:
    """``x`` as a JAX array; a `ValueError` unless it is an array of float32, bfloat16 or float16."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise ValueError(f"{name} is a {type(x).__name__}, but must be an array")
    if "torch" in type(x).__module__:
        raise ValueError(f"{name} is a PyTorch tensor, but must be a JAX array; give jax.numpy.from_dlpack({name})")
    if str(x.dtype) not in _FLOATS:
        raise ValueError(f"{name} has dtype {x.dtype}, but must be one of {', '.join(_FLOATS)}; cast it")
    return jnp.asarray(x)


def _bind_decay(options: dict[str, Any], B: int, T: int, H: int, D: int) -> str:
    """The kind of a call's decay, which replaces that of ``options``."""
    given = options.get("decay")
    if given is None:
        return "none"
    decay = floating("decay", given)
    kinds = {(H,): "constant", (B, T, H): "head", (B, T, H, D): "channel"}
    if decay.shape not in kinds:
        raise ValueError(
            f"decay has shape {decay.shape}, but must have shape [Hv]={(H,)}, [B, T, Hv]={(B, T, H)} or "
            f"[B, T, Hv, D]={(B, T, H, D)}"
        )
    if is_known(given):
        largest = float(np.fmax.reduce(np.asarray(given).astype(np.float32), axis=None, initial=-math.inf))
        if largest > 0:
            raise ValueError(
                f"decay has the value {largest:g}, but must be at most 0: it is the natural logarithm of what is kept "
                f"of the state; give jnp.log(decay) for factors in [0, 1], and -exp(a) · softplus(g) for Mamba-2's and "
                f"gated delta rule's parameters"
            )
    options["decay"] = decay.astype(jnp.float32)
    return kinds[decay.shape]


def _scale(scale: Any, D: int) -> float:
    if scale is None:
        return float(D**-0.5)
    if isinstance(scale, jax.core.Tracer):
        raise ValueError("scale is a traced array, but must be a number known when tracing; multiply the query instead")
    try:
        number = math.nan if isinstance(scale, bool | str) else float(scale)
    except (TypeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"scale={scale!r} must be a finite number; leave it out for head_dim ** -0.5")
    return number
