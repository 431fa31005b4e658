"""sdpa: jax.nn.dot_product_attention, on CUDA its cuDNN kernel; each of its limits declared."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

import jax
import jax.numpy as jnp

from attnops.dispatch.limits import SYMBOLIC, Limits
from attnops.dispatch.operation import forward_for
from attnops.dispatch.ranking import Rank
from attnops.dispatch.request import AttentionRequest, Request
from attnops.errors import Reason
from attnops.kernels.unseen import zero_masked_tokens
from attnops.masks.base import Mask
from attnops.masks.structure import MaskStructure
from attnops.operations.vanilla import VanillaAttention
from attnops.output import OperationOutput

__all__ = ["ScaledDotProductAttention"]

# jax.nn takes one dtype and one head_dim; soft cap, sinks, dropout, weights and logsumexp it has not, and its
# residual is rounded to the input's dtype and has no gradient: the forwards below don't name them.
_JAX_NN = Limits(same_dtype=True, equal_head_dims=True, linear_memory=False, symbolic=SYMBOLIC)
# As low as no score is, and above what jax.nn takes a masked score to be.
_VERY_LOW: Final = -1e30
# It asks XLA for float16 products accumulated in float32, which only GPUs compile; on a CPU we widen the inputs.
_NO_FLOAT16 = dataclasses.replace(_JAX_NN, dtypes=frozenset({"float32", "bfloat16"}))


class ScaledDotProductAttention(VanillaAttention):
    """`jax.nn.dot_product_attention` under the attention contract.

    Where it differs from the contract it is put right: causal masks with T ≠ S are aligned at the end, and a fully
    masked row gives 0, not the mean of the values. What it has not is refused, and vanilla's native forward serves it.

    Memory is O(B · H · T · S), but on CUDA without an array mask or bias, where cuDNN's flash kernel needs O(T).
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
    def rank(cls, request: Request) -> Rank | None:
        name = f"forward_{forward_for(cls, request.platform)}"
        if getattr(cls, name) is not getattr(ScaledDotProductAttention, name):
            return super().rank(request)  # a plugin's kernel, in a subclass
        return Rank.VENDOR_KERNEL if request.platform == "cuda" else Rank.PRODUCT

    def forward_gpu(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: Mask | None = None,
        bias: jax.Array | None = None,
        softmax_scale: float | None = None,
    ) -> OperationOutput:
        """See `OperationImpl.__call__`; in XLA."""
        return self._attend("xla", query, key, value, mask, bias, softmax_scale)

    forward_tpu = forward_tt = forward_gpu  # type: ignore[assignment]

    def forward_cpu(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: Mask | None = None,
        bias: jax.Array | None = None,
        softmax_scale: float | None = None,
    ) -> OperationOutput:
        """See `OperationImpl.__call__`; in XLA and float32: jax.nn's 16-bit products don't compile for every shape."""
        q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
        out = self._attend("xla", q, k, v, mask, bias, softmax_scale).attention_outputs
        return OperationOutput(out.astype(query.dtype))

    def forward_cuda(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: Mask | None = None,
        bias: jax.Array | None = None,
        softmax_scale: float | None = None,
    ) -> OperationOutput:
        """See `OperationImpl.__call__`; in cuDNN."""
        return self._attend("cudnn", query, key, value, mask, bias, softmax_scale)

    def is_plain(self, forward: str) -> bool:
        """See `OperationImpl.is_plain`: only what calls cuDNN is not."""
        return forward != "cuda" and getattr(type(self), f"forward_{forward}") is getattr(
            ScaledDotProductAttention, f"forward_{forward}"
        )

    def unsupported(self, request: Request) -> Iterator[Reason]:
        """The limits of cuDNN's kernel, from ``jax._src.cudnn.fused_attention_stablehlo``."""
        if request.platform != "cuda" or not isinstance(request, AttentionRequest):
            return
        largest = _largest_cudnn_head_dim()
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
            yield Reason(
                "T/S",
                "/".join(map(str, lengths)),
                "must be even for cuDNN's backward with a mask or a bias",
                "pad to even",
            )

    def _attend(
        self,
        implementation: Literal["xla", "cudnn"],
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: Mask | None,
        bias: jax.Array | None,
        softmax_scale: float | None,
    ) -> OperationOutput:
        (B, T, H, _), S = query.shape, key.shape[1]
        structure = MaskStructure() if mask is None else mask.structure(T, S)
        mask = None if structure.is_full else mask
        is_causal = _is_plain_causal(structure, T, S)
        allowed = None if mask is None or is_causal else mask.dense(B, H, T, S)
        if mask is not None and allowed is not None and mask.has_fully_masked_tokens(T, S):
            query, key, value = zero_masked_tokens(query, key, value, allowed)
        if bias is not None and implementation == "cudnn":
            bias = jnp.broadcast_to(bias, (*bias.shape[:2], T, S))
        if allowed is not None and implementation == "cudnn":
            allowed = jnp.broadcast_to(allowed, (*allowed.shape[:2], T, S))
        sees_any = None
        if allowed is not None or bias is not None:
            bias, sees_any = _without_empty_rows(allowed, bias, causal=mask if is_causal else None, shape=(B, H, T, S))
        with _precision(query, self.metadata.precision):
            out = jax.nn.dot_product_attention(
                query, key, value, bias, allowed, scale=softmax_scale, is_causal=is_causal,
                implementation=implementation,
            )  # fmt: skip
        if sees_any is not None:
            out = jnp.where(sees_any.swapaxes(1, 2), out, 0)
        return OperationOutput(out)


def _without_empty_rows(
    allowed: jax.Array | None, bias: jax.Array | None, causal: Mask | None, shape: tuple[int, int, int, int]
) -> tuple[jax.Array | None, jax.Array]:
    """``bias`` with no row that is −inf or very low wherever the mask allows, and which rows see any key, [B, H, T, 1].

    jax.nn gives the mean of the values for a fully masked row, and NaN for one whose bias is all −inf. Masked scores
    are −0.7 · finfo.max to it, above which a row must be raised; softmax does not see by how much, as long as it stays
    so low that the products beside it are rounded away as before.
    """
    if bias is None:
        assert allowed is not None
        return None, allowed.any(axis=-1, keepdims=True)
    seen = bias
    for mask in (allowed, None if causal is None else causal.dense(*shape)):
        seen = seen if mask is None else jnp.where(mask, seen, -jnp.inf)
    top = jax.lax.stop_gradient(seen.max(axis=-1, keepdims=True))
    sees_any = top != -jnp.inf  # NaN too
    if float(jnp.finfo(bias.dtype).min) < _VERY_LOW:  # float16 reaches no lower than −65504
        bias = jnp.where(top < _VERY_LOW, (bias - top) + _VERY_LOW, bias)
    return jnp.where(sees_any, bias, 0), sees_any


def _precision(query: jax.Array, precision: Any) -> contextlib.AbstractContextManager[Any]:
    """float32 inputs are multiplied in full float32, unless the metadata says otherwise."""
    if query.dtype != jnp.float32:
        return contextlib.nullcontext()
    return jax.default_matmul_precision("highest" if precision is None else precision.name.lower())


def _is_plain_causal(structure: MaskStructure, T: int, S: int) -> bool:
    """Whether it is what jax.nn's ``is_causal`` stands for, which aligns at the first query and key."""
    return structure.is_causal and T == S


def _largest_cudnn_head_dim() -> int:
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return 128  # no GPU here, as when exporting: what every generation can
    return 256 if float(device.compute_capability) >= 9.0 else 128
