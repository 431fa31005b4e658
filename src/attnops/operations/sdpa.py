"""sdpa: jax.nn.dot_product_attention, with its cuDNN kernel on CUDA; all its limits are declared."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp

from attnops.dispatch.forwards import check_named, forward_for
from attnops.dispatch.limits import SYMBOLIC, Limits
from attnops.dispatch.rank import Rank, RankBetween
from attnops.dispatch.request import AttentionRequest, Request
from attnops.errors import Reason
from attnops.kernels.unseen import zero_masked_tokens
from attnops.masks.base import Mask
from attnops.masks.structure import MaskStructure
from attnops.operations.vanilla import VanillaAttention
from attnops.output import OperationOutput

__all__ = ["ScaledDotProductAttention"]

# jax.nn requires one dtype and one head_dim. It has no soft cap, sinks, dropout or weights; its logsumexp is rounded
# to the input's dtype and has no gradient, so the forwards below lack these options.
_JAX_NN = Limits(same_dtype=True, equal_head_dims=True, linear_memory=False, symbolic=SYMBOLIC)
# Below every score, and above jax.nn's value of a masked score.
_VERY_LOW: Final = -1e30
# jax.nn uses float16 products accumulated in float32, which XLA compiles only for GPUs; on a CPU inputs are widened.
_NO_FLOAT16 = dataclasses.replace(_JAX_NN, dtypes=frozenset({"float32", "bfloat16"}))


class ProductOptions(TypedDict, total=False):
    """The contract's options that `jax.nn.dot_product_attention` has, as in `attnops.ScoreOptions`."""

    mask: Mask
    bias: jax.Array
    softmax_scale: float


class ScaledDotProductAttention(VanillaAttention):
    """`jax.nn.dot_product_attention` under the attention contract.

    Differences from the contract are corrected: causal masks with T ≠ S are aligned at the end, and a fully masked row
    gives 0, not the mean of the values. Unsupported options are refused, and vanilla's native forward runs instead.

    Memory is O(B · H · T · S), except on CUDA without an array mask or bias, where cuDNN's flash kernel needs O(T).
    cuDNN's backward is not deterministic unless XLA runs with ``--xla_gpu_deterministic_ops``.
    """

    limits: ClassVar[Mapping[str, Limits]] = {
        **VanillaAttention.limits,
        "cpu": _JAX_NN,
        "gpu": _JAX_NN,
        "tpu": _NO_FLOAT16,
        "tt": _NO_FLOAT16,
        "cuda": Limits(
            dtypes=frozenset({"bfloat16", "float16"}),
            same_dtype=True,
            equal_head_dims=True,
            head_dim_multiple=8,
            interpretable=False,
            linear_memory=False,  # with an array mask or a bias
        ),
    }

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        return "sdpa"

    @classmethod
    def rank(cls, request: Request) -> Rank | RankBetween | None:
        name = f"forward_{forward_for(cls, request.platform)}"
        if getattr(cls, name) is not getattr(ScaledDotProductAttention, name):
            return super().rank(request)  # a subclass's kernel
        return Rank.VENDOR_KERNEL if request.platform == "cuda" else Rank.PRODUCT

    def forward_gpu(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[ProductOptions]
    ) -> OperationOutput:
        """See `OperationImpl.__call__`; in XLA."""
        return self._attend("xla", query, key, value, options)

    forward_tpu = forward_tt = forward_gpu  # type: ignore[assignment]

    def forward_cpu(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[ProductOptions]
    ) -> OperationOutput:
        """See `OperationImpl.__call__`; in XLA and float32: jax.nn's 16-bit products don't compile for every shape."""
        q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
        out = self._attend("xla", q, k, v, options).attention_outputs
        return OperationOutput(out.astype(query.dtype))

    def forward_cuda(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[ProductOptions]
    ) -> OperationOutput:
        """See `OperationImpl.__call__`; in cuDNN."""
        return self._attend("cudnn", query, key, value, options)

    def is_plain(self, forward: str) -> bool:
        """See `OperationImpl.is_plain`: False for cuDNN."""
        return forward != "cuda" and getattr(type(self), f"forward_{forward}") is getattr(
            ScaledDotProductAttention, f"forward_{forward}"
        )

    def unsupported(self, request: Request) -> Iterator[Reason]:
        """The limits of cuDNN's kernel, from ``jax._src.cudnn.fused_attention_stablehlo``."""
        if request.platform != "cuda" or not isinstance(request, AttentionRequest):
            return
        capability = _capability()
        if capability < 8:
            yield Reason("GPU", f"sm_{10 * capability:.0f}", "must be at least sm_80 for cuDNN's attention")
        largest = 256 if capability >= 9 else 128
        if request.head_dim > largest:
            yield Reason("head_dim", request.head_dim, f"must be at most {largest} for cuDNN on this GPU")
        if request.bias_kind and request.needs_grad:
            yield Reason("bias", "set", "cuDNN's gradient of a bias is not relied on",
                         "call with mode='prefill' where no gradient is needed")  # fmt: skip
        if request.bias_kind and request.bias_dtype != request.dtypes[0]:
            yield Reason("bias.dtype", request.bias_dtype, f"must be the query's, {request.dtypes[0]}", "cast it")
        structure, lengths = request.mask_structure, (request.query_length, request.key_length)
        dense = request.bias_kind or not (structure.is_full or _is_plain_causal(structure, *lengths))
        odd = request.query_length % 2 or request.key_length % 2
        if dense and odd and request.needs_grad:
            yield Reason("T/S", "/".join(map(str, lengths)), "must be even for cuDNN's backward with a mask or a bias",
                         "pad to even")  # fmt: skip

    def _attend(
        self,
        implementation: Literal["xla", "cudnn"],
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        options: ProductOptions,
    ) -> OperationOutput:
        check_named(ScaledDotProductAttention.forward_gpu, options)
        (B, T, H, _), S = query.shape, key.shape[1]
        mask, bias = options.get("mask"), options.get("bias")
        structure = MaskStructure() if mask is None else mask.structure(T, S)
        mask = None if structure.is_full else mask
        is_causal = _is_plain_causal(structure, T, S)
        allowed = None if mask is None or is_causal else mask.dense(B, H, T, S)
        if mask is not None and allowed is not None and mask.has_fully_masked_tokens(T, S):
            query, key, value = zero_masked_tokens(query, key, value, allowed)
        if bias is not None:
            # XLA's scores are float32; cuDNN needs the query's dtype, and T and S in full.
            is_xla = implementation == "xla"
            bias = bias.astype(jnp.float32) if is_xla else jnp.broadcast_to(bias, (*bias.shape[:2], T, S))
        if allowed is not None and implementation == "cudnn":
            allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], T, S))
        sees_any = None
        if allowed is not None or bias is not None:
            bias, sees_any = _without_empty_rows(allowed, bias, causal=mask if is_causal else None, shape=(B, H, T, S))
        with _precision(query, self.metadata.precision):
            out = jax.nn.dot_product_attention(
                query, key, value, bias, allowed, scale=options.get("softmax_scale"), is_causal=is_causal,
                implementation=implementation,
            )  # fmt: skip
        if sees_any is not None:
            out = jnp.where(sees_any.swapaxes(1, 2), out, 0)
        return OperationOutput(out)


def _without_empty_rows(
    allowed: jax.Array | None, bias: jax.Array | None, causal: Mask | None, shape: tuple[int, int, int, int]
) -> tuple[jax.Array | None, jax.Array]:
    """``bias`` with rows raised that are −inf or very low at all allowed keys; and which rows see a key, [B, H, T, 1].

    jax.nn returns the mean of the values for a fully masked row, and NaN for a row whose bias is −inf everywhere. Its
    masked scores are −0.7 · finfo.max, so lower rows of the bias are raised above that. Softmax is invariant to the
    constant, as long as the bias stays so low that the products are still rounded away.
    """
    if bias is None:
        assert allowed is not None
        return None, allowed.any(axis=-1, keepdims=True)
    seen = bias
    for mask in (allowed, None if causal is None else causal.dense(*shape)):
        seen = seen if mask is None else jnp.where(mask, seen, -jnp.inf)
    m = jax.lax.stop_gradient(seen.max(axis=-1, keepdims=True))
    sees_any = m != -jnp.inf  # NaN too
    if float(jnp.finfo(bias.dtype).min) < _VERY_LOW:  # float16 reaches no lower than −65504
        bias = jnp.where(m < _VERY_LOW, (bias - m) + _VERY_LOW, bias)
    return jnp.where(sees_any, bias, 0), sees_any


def _precision(query: jax.Array, precision: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which products of float32 inputs are in full float32, or the metadata's precision."""
    if query.dtype != jnp.float32:
        return contextlib.nullcontext()
    return jax.default_matmul_precision("highest" if precision is None else precision.name.lower())


def _is_plain_causal(structure: MaskStructure, T: int, S: int) -> bool:
    """Whether jax.nn's ``is_causal``, which aligns at the first query and key, computes it."""
    return structure.is_causal and T == S


def _capability() -> float:
    try:
        return float(jax.local_devices(backend="cuda")[0].compute_capability)
    except (RuntimeError, AttributeError):
        return 8.0  # no GPU here, as when exporting: every generation that cuDNN serves has its limits
