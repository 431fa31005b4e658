"""The operation ``mosaic``: which calls tokamax's kernel for Hopper and Blackwell serves, and how it is called."""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Iterator, Mapping
from typing import ClassVar, Final

import jax
import jax.numpy as jnp
from jax.extend.backend import get_default_device

from attnops import AttentionRequest, Limits, OperationOutput, Rank, Reason, Request, UnsupportedError
from attnops.kernels import once_differentiable, varies
from attnops.masks import Mask
from attnops.operations.flash import FlashAttention

# Compute capabilities that the kernel is written for.
GENERATIONS: Final = (9, 10)
# T and S are padded to a multiple of this, which the kernel's tiles divide, forward and backward, on both generations.
TILE: Final = 256


class MosaicAttention(FlashAttention):
    """``tokamax.dot_product_attention(implementation="mosaic")`` on Hopper and Blackwell GPUs.

    It serves calls without a mask and plain causal ones (query i sees the keys j <= i), bfloat16, grouped heads,
    T ≠ S, any lengths, and a soft cap, forward and backward, in O(T + S) memory. The core's native `flash` serves all
    other calls, and all calls on other platforms. `auto` never picks ``mosaic``, since it has not been timed here.
    """

    api_version = 2
    limits: ClassVar[Mapping[str, Limits]] = {
        **FlashAttention.limits,
        "cuda": Limits(
            # float16 is refused: the kernel rounds gradients of scores to it, and the small ones become 0.
            dtypes=frozenset({"bfloat16"}),
            same_dtype=True,
            max_head_dim=128,
            head_dim_multiple=64,
            equal_head_dims=True,
            interpretable=False,
        ),
    }

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        """The name ``"mosaic"``."""
        return "mosaic"

    @classmethod
    def rank(cls, request: Request) -> Rank | None:
        """None: `auto` never picks it."""
        return None

    def environment_key(self) -> Hashable:
        """The compute capability that tokamax chooses its tiles for; compiled programs depend on it."""
        return capability()

    def unsupported(self, request: Request) -> Iterator[Reason]:
        """Reasons that limits can't declare. The dispatcher refuses options that `forward_cuda` does not name."""
        assert isinstance(request, AttentionRequest)
        if importlib.util.find_spec("tokamax") is None:
            yield Reason("tokamax", None, "must be installed", "pip install tokamax")
        version = capability()
        if version is None or int(version) not in GENERATIONS:
            rule = "must be Hopper (9.0) or Blackwell (10.0, 10.3): tokamax compiles only for the default device"
            yield Reason("compute capability of jax_default_device", version, rule, "use 'flash'")
        structure = request.mask_structure
        if not structure.is_full and not structure.is_causal:
            rule = "must be absent or plain causal, query i seeing the keys j <= i; others would need a T × S array"
            yield Reason("mask", request.mask, rule, "use 'flash'")
        if request.softmax_scale is not None and request.softmax_scale < 0:
            rule = "must not be negative: the kernel takes a row's largest score before it scales"
            yield Reason("softmax_scale", request.softmax_scale, rule, "negate the query")

    def forward_cuda(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: Mask | None = None,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
    ) -> OperationOutput:
        """Attention of query [B, T, H, D], key [B, S, K, D] and value [B, S, K, D]; the output is [B, T, H, D]."""
        if varies((query, key, value)):
            rule = "must not vary over mesh axes: the kernel does not state the types of its outputs"
            reason = Reason("query", "varying", rule, "jax.shard_map(..., check_vma=False)")
            raise UnsupportedError(f"mosaic can't serve jax.shard_map with check_vma=True: {reason}", [reason])
        T, S = query.shape[1], key.shape[1]
        is_causal = mask is not None and mask.split().band.limits != (None, None)
        seen = min(T, S) if is_causal else S  # no query sees the keys after these, which may hold NaN
        arrays = [_padded(x) for x in (query, key[:, :seen], value[:, :seen])]
        run = once_differentiable(attend, "tokamax's kernel has no second derivative")
        scale = query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        return OperationOutput(run(*arrays, seen, is_causal, scale, logits_soft_cap)[:, :T])


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, length: int, is_causal: bool, scale: float,
    soft_cap: float | None,
) -> jax.Array:  # fmt: skip
    """The kernel's output, [B, T, H, D].

    Args:
        query: [B, T, H, D].
        key: [B, S, K, D].
        value: [B, S, K, D].
        length: the number of real keys; those after them are padding.
        is_causal: whether query i sees only the keys j <= i.
        scale: the softmax scale.
        soft_cap: the soft cap of the scores; None for none.
    """
    import tokamax

    lengths = None if length == key.shape[1] else jnp.full(query.shape[0], length, jnp.int32)
    out: jax.Array = tokamax.dot_product_attention(
        query, key, value, scale=scale, is_causal=is_causal, key_value_seq_lengths=lengths, logits_soft_cap=soft_cap,
        implementation="mosaic",
    )  # fmt: skip
    return out


def capability() -> float | None:
    """The compute capability of the default device, which tokamax compiles for; None if it is not an NVIDIA GPU."""
    device = get_default_device()
    try:
        return float(getattr(device, "compute_capability", "none"))
    except ValueError:  # AMD's are names, such as gfx942
        return None


def _padded(x: jax.Array) -> jax.Array:
    """[B, T, H, D] padded with zeros to a T that is a multiple of `TILE`."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE), (0, 0), (0, 0)))
