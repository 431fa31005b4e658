"""The cases of the scoreboard: a call each, with what the oracle computes for it, and for other conventions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from attnops_testing import oracle
from attnops_testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, tolerance

Array = oracle.Array
# By name of a result: its exact value, and the largest error that is allowed.
Expected = dict[str, tuple[Array, float]]
_DIFFERENTIABLE: Final = ("query", "key", "value", "bias", "sinks")


@dataclasses.dataclass(frozen=True)
class Size:
    """The plain problem that a library serves.

    Attributes:
        length: T and S.
        head_dim: D.
        dtype: the dtype of query, key and value.
        kv_heads: K; there are 4 heads.
    """

    length: int = 24
    head_dim: int = 16
    dtype: str = "float32"
    kv_heads: int = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call.

    Attributes:
        name: what it probes.
        options: the options of the adapter's function, None for an array of `arrays`.
        arrays: the arrays by name: query [B, T, H, D], key [B, S, K, D], value [B, S, K, Dv], options, cotangents.
        truth: computes what the contract says, and by name what other conventions say; nothing for a call that must be
            refused.
        seen: the rows [B, T, H] that see a key; others are not compared, only described.
        dtype: the dtype of query, key, value and sinks.
        bias_dtype: the bias's, where it differs.
        kind: "attention", or what else is done with the call.
        gradients: whether gradients are compared.
        nan: where NaN is a convention that a library may have, what it is called.
    """

    name: str
    options: dict[str, Any]
    arrays: dict[str, Array]
    truth: Callable[[], tuple[Expected, dict[str, Expected]]]
    seen: Array
    dtype: str
    bias_dtype: str | None = None
    kind: str = "attention"
    gradients: bool = True
    nan: str = ""


def cases(size: Size) -> Iterator[Case]:
    """All cases, in the order of the table."""
    n, D = size.length, size.head_dim
    position = np.arange(n)
    distance = position[None, :] - position[:, None]
    causal = distance <= 0
    rng = np.random.default_rng(7)

    def case(name: str, **more: Any) -> Case:
        return _case(name, size, **more)

    def bias(*shape: int) -> Array:
        return rng.normal(size=shape).astype(np.float32)

    for dtype in ("float32", "bfloat16", "float16"):
        yield case(f"dtype {dtype}", dtype=dtype)
    yield case("GQA", K=2)
    yield case("MQA", K=1)
    yield case("T < S", T=n, S=2 * n)
    yield case("T > S", T=2 * n, S=n)
    yield case("T = 1", T=1)
    yield case("odd lengths", T=n + 5, S=n + 3)
    yield case("value head_dim ≠ head_dim", Dv=D // 2)
    yield case("head_dim 80", D=80)
    yield case("no queries (T = 0)", T=0)
    yield case("no keys (S = 0)", S=0)
    yield case("scale", options={"scale": 0.4}, oracle={"softmax_scale": 0.4})
    yield case("negative scale", options={"scale": -0.4}, oracle={"softmax_scale": -0.4})
    yield case("causal", mask=causal, options={"causal": True})
    for T, S in ((n, 2 * n), (2 * n, n), (1, n)):
        ends = np.arange(S)[None, :] <= np.arange(T)[:, None] + S - T
        starts = np.arange(S)[None, :] <= np.arange(T)[:, None]
        name = "causal, T = 1" if T == 1 else f"causal, T {'<' if T < S else '>'} S"
        yield case(name, T=T, S=S, mask=ends, options={"causal": True}, others={"aligned top left": starts})
    some = rng.random((2, 4, n, n)) < 0.7
    some[..., 0] = True
    rows = some.copy()
    rows[:, :, 2::5] = False
    yield case("mask [B, H, T, S]", array_mask=some)
    yield case("mask [1, 1, T, S]", array_mask=some[:1, :1])
    yield case("mask of keys [B, 1, 1, S]", array_mask=some[:, :1, :1])
    yield case("mask and causal", array_mask=some[:, :1], mask=causal & some[:, :1], options={"causal": True})
    yield case("rows that see no key", array_mask=rows[:, :1])
    yield case("rows that see no key, GQA", array_mask=rows[:, :1], K=2)
    yield case("bias [B, H, T, S]", bias=bias(2, 4, n, n))
    yield case("bias [1, H, T, S]", bias=bias(1, 4, n, n))
    yield case("bias [1, 1, 1, S]", bias=bias(1, 1, 1, n))
    yield case("bias and causal", bias=bias(1, 4, n, n), mask=causal, options={"causal": True})
    yield case("bias and mask", bias=bias(1, 4, n, n), array_mask=some[:, :1])
    yield case("float32 bias of bfloat16", bias=bias(1, 4, n, n), dtype="bfloat16", bias_dtype="float32")
    low = float(np.finfo(np.float32).min)
    yield case("bias of −inf", bias=np.where(some[:, :1], bias(1, 1, n, n), -np.inf))
    yield case("bias of finfo.min", bias=np.where(some[:, :1], bias(1, 1, n, n), low))
    nan = "rows of −inf are NaN, and so are gradients that sum over rows"
    yield case("rows of −inf bias", bias=np.where(rows[:, :1], bias(1, 1, n, n), -np.inf), nan=nan)
    yield case("window to the left", mask=causal & (distance >= -5), options={"causal": True, "window": (5, 0)})
    yield case("window to both sides", mask=(distance <= 3) & (distance >= -5), options={"window": (5, 3)})
    yield case("soft cap", options={"soft_cap": 1.5}, oracle={"logits_soft_cap": 1.5})
    yield case("soft cap and bias", bias=bias(1, 4, n, n), options={"soft_cap": 1.5}, oracle={"logits_soft_cap": 1.5})
    yield case("sinks", sinks=rng.normal(size=4).astype(np.float32), mask=causal, options={"causal": True})
    ids = np.stack([np.repeat([1, 2, 3], [n // 4, n // 4, n - n // 2]), np.repeat([1, 2], [5, n - 5])]).astype(np.int32)
    together = (ids[:, :, None] == ids[:, None, :])[:, None]
    yield case("documents", segments=ids, mask=together)
    yield case("documents and causal", segments=ids, mask=together & causal, options={"causal": True})
    lengths = np.array([5, n], np.int32)
    tokens = (position < lengths[:, None])[:, None, None]
    yield case("lengths of keys", lengths=lengths, mask=tokens)
    nan = "NaN in keys and values after a length reaches the output"
    yield case("lengths, NaN in the padding", lengths=lengths, mask=tokens, hidden=np.nan, nan=nan)
    yield case("logsumexp", options={"lse": True})
    yield case("scores of 1e4", dtype="float32", winner=1e4)
    yield case("scores of 1e4, bfloat16", dtype="bfloat16", winner=1e4)
    yield case("scores of 1e4, float16", dtype="float16", winner=1e4)
    nan = "q · k overflows float16 before the scale: NaN"
    yield case("q · k above 65,504, float16", dtype="float16", winner=9e4 / D**0.5, nan=nan)
    yield case("dropout", T=n, S=D, Dv=D, options={"dropout": 0.3}, kind="dropout")
    yield case("second derivatives", kind="second derivatives")
    yield case("second derivatives, causal", kind="second derivatives", mask=causal, options={"causal": True})
    yield case("vmap", B=4, kind="vmap")
    yield case("strided arrays", kind="strided")
    yield case("refuses H = 4, K = 3", K=3, kind="refusal")
    yield case("refuses keys and values of two lengths", kind="refusal", S_value=n - 8)
    yield case("refuses a mask of another length", kind="refusal", array_mask=np.ones((2, 1, n, n + 8), bool))


def _case(
    name: str, size: Size, *, B: int = 2, T: int | None = None, S: int | None = None, K: int | None = None,
    D: int | None = None, Dv: int | None = None, dtype: str | None = None, bias_dtype: str | None = None,
    mask: Array | None = None, array_mask: Array | None = None, others: dict[str, Array] | None = None,
    options: dict[str, Any] | None = None, oracle: dict[str, Any] | None = None, kind: str = "attention",
    hidden: float | None = None, winner: float | None = None, S_value: int | None = None, nan: str = "",
    **arrays: Array,
) -> Case:  # fmt: skip
    """A case; ``mask`` is what the options mean, and ``array_mask`` is given as an array."""
    T = size.length if T is None else T
    S = size.length if S is None else S
    D, dtype, H = D or size.head_dim, dtype or size.dtype, 4
    Dv, K = Dv or D, K or min(H, size.kv_heads)
    rng = np.random.default_rng(len(name))
    cast = jnp.dtype(dtype)
    shapes = {
        "query": (B, T, H, D), "key": (B, S, K, D), "value": (B, S if S_value is None else S_value, K, Dv),
        "d_out": (B, T, H, Dv), "d_lse": (B, H, T),
    }  # fmt: skip
    drawn: dict[str, Array] = {
        x: rng.uniform(-(3**0.5), 3**0.5, shape).astype(cast).astype(np.float32) for x, shape in shapes.items()
    }
    drawn |= {x: a if x in ("segments", "lengths") else np.maximum(a, -65504) if dtype == "float16" else a
              for x, a in arrays.items()}  # fmt: skip
    for x in ("bias", "sinks"):
        if x in drawn:
            drawn[x] = drawn[x].astype(jnp.dtype(bias_dtype or dtype)).astype(np.float32)
            if x == "bias" and dtype != "float32":
                drawn[x] = np.where(np.isfinite(drawn[x]), drawn[x], -np.inf)
    if winner is not None:  # key S // 2 has the score `winner`, others at most 0.8 of it
        drawn["query"] = np.zeros_like(drawn["query"])
        drawn["query"][..., 0] = 256
        drawn["key"][..., 0] = (0.8 * rng.random((B, S, K)) * winner * D**0.5 / 256).astype(cast)
        drawn["key"][:, S // 2, :, 0] = np.asarray(winner * D**0.5 / 256).astype(cast)
    given: dict[str, Any] = dict(options or {})
    if array_mask is not None:
        drawn["mask"] = array_mask
        mask = array_mask if mask is None else mask
    given |= {x: None for x in ("mask", "bias", "sinks", "segments", "lengths") if x in drawn}
    if kind == "dropout":
        drawn["value"] = np.broadcast_to(np.eye(S, Dv, dtype=np.float32)[None, :, None], drawn["value"].shape).copy()
    if kind == "second derivatives":
        drawn |= {f"t_{x}": rng.normal(size=shapes[x]).astype(np.float32) for x in ("query", "key", "value")}
    known = {x: drawn[x] for x in ("bias", "sinks") if x in drawn} | (oracle or {})
    visible = np.broadcast_to(True if mask is None or kind == "refusal" else mask, (B, H, T, S))
    finite = visible & (np.broadcast_to(drawn.get("bias", np.zeros(())), visible.shape) > -np.inf)
    seen = np.swapaxes(np.any(finite, axis=-1), 1, 2)
    drawn["d_out"] *= seen[..., None]
    drawn["d_lse"] *= seen.swapaxes(1, 2)
    exact = dict(drawn)

    def truth() -> tuple[Expected, dict[str, Expected]]:
        if kind == "refusal":
            return {}, {}
        with np.errstate(over="ignore", invalid="ignore"):  # float16's largest number is 65,504
            found, *more = [
                _expected(exact, cast, known | {"mask": m}, "lse" in given, kind)
                for m in (visible, *(others or {}).values())
            ]
        conventions = dict(zip(others or {}, more, strict=True))
        if "gradient of bias" in found:
            zero = np.zeros(drawn["bias"].shape), 0.0
            conventions["no gradient flows to the bias"] = found | {"gradient of bias": zero}
        if "lse" in given:
            cut = exact | {"d_lse": np.zeros_like(exact["d_lse"])}
            conventions["no gradient flows through the logsumexp"] = _expected(cut, cast, known, True, kind)
        if "bias" in known and "logits_soft_cap" in known:
            conventions["the bias is added before the cap"] = _capped_after(exact, known)
        return found, conventions

    if hidden is not None:
        for x in ("key", "value"):
            drawn[x] = np.where((np.arange(S) >= drawn["lengths"][:, None])[..., None, None], hidden, drawn[x])
    return Case(
        name=name, options=given, arrays=drawn, truth=functools.cache(truth), seen=seen, dtype=dtype,
        bias_dtype=bias_dtype, kind=kind, gradients=kind in ("attention", "dropout", "second derivatives", "strided"),
        nan=nan,
    )  # fmt: skip


def _expected(arrays: dict[str, Array], dtype: Any, options: dict[str, Any], wants_lse: bool, kind: str) -> Expected:
    """The oracle's results, by the names of a worker's, with the tolerance of the conformance suite."""
    q, k, v = (arrays[name].astype(dtype) for name in _DIFFERENTIABLE[:3])
    inputs = {name: arrays[name].shape for name in _DIFFERENTIABLE if name in arrays}
    if not q.size or not k.size:
        shapes = {"out": arrays["d_out"].shape} | {f"gradient of {name}": shape for name, shape in inputs.items()}
        return {name: (np.zeros(shape), 0.0) for name, shape in shapes.items()}
    found: Expected = {}
    exact, narrow = (oracle.attention(q, k, v, dtype=d, **options) for d in (np.float64, dtype))

    def add(name: str, value: Array, other: Array, magnitude: Array, factor: float) -> None:
        if np.isfinite(other[np.isfinite(value)]).all():
            found[name] = value, tolerance(value, other, magnitude, dtype, factor)
        else:  # the dtype overflows in plain computations: the key with the largest score has all of the weight
            found[name] = value, 16 * float(jnp.finfo(dtype).eps) * float(magnitude.max())

    add("out", exact.out, narrow.out, exact.out_magnitude, OUTPUT_FACTOR)
    finite = np.where(np.isfinite(exact.logsumexp), exact.logsumexp, 0)
    if wants_lse:
        add("lse", exact.logsumexp, narrow.logsumexp, finite, OUTPUT_FACTOR)
    cotangents: dict[str, Any] = {"d_out": arrays["d_out"], "d_logsumexp": arrays["d_lse"] if wants_lse else None}
    wide, same = (oracle.attention_gradients(q, k, v, dtype=d, **cotangents, **options) for d in (np.float64, dtype))
    for name, value in wide.values.items():
        add(f"gradient of {name}", value, same.values[name], wide.magnitudes[name], GRADIENT_FACTOR)
    if kind == "second derivatives":
        tangents = {name: arrays[f"t_{name}"] for name in _DIFFERENTIABLE[:3]}
        first, second = (
            oracle.attention_tangents(q, k, v, tangents=tangents, d_out=arrays["d_out"], dtype=d, **options).gradients
            for d in (np.float64, dtype)
        )
        for name, value in first.items():
            allowed = 10 * np.abs(second[name] - value).max() + 1e-5 * np.abs(value).max()
            found[f"second derivative of {name}"] = value, float(allowed)
    return found


def _capped_after(arrays: dict[str, Array], options: dict[str, Any]) -> Expected:
    """The output where the bias is added before the cap."""
    q, k, v = (arrays[name].astype(np.float64) for name in _DIFFERENTIABLE[:3])
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5 + options["bias"]
    weights = np.exp(options["logits_soft_cap"] * np.tanh(scores / options["logits_soft_cap"]))
    out = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
    return {"out": (out, 1e-5 * float(np.abs(v).max()))}
