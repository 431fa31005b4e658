"""FlashAttention: the operation, from its options to the call of `attend`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnops.biases import Bias
from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.limits import Limits
from attnops.dispatch.operation import ATTENTION
from attnops.dispatch.output import OperationOutput
from attnops.dispatch.request import AttentionRequest, Request, is_symbolic
from attnops.dropout import dropout_seed, dropout_step
from attnops.kernels.parts import Whole, check_parts, two_parts
from attnops.kernels.reverse import REVERSE_ONLY, reverse_mode_only
from attnops.kernels.varying import equally_varying
from attnops.masks.base import Mask
from attnops.masks.tiles import Coverage, block_map
from attnops.operations.flash.attend import attend, attend_share
from attnops.operations.flash.plan import Plan
from attnops.operations.flash.scores import Arrays, Numbers, Options
from attnops.operations.flash.tile_bias import tile_bias
from attnops.operations.flash.tile_sizes import choose_lanes, choose_tiles, table_row
from attnops.operations.flash.visits import visits
from attnops.operations.vanilla import VanillaAttention
from attnops.programs.functions import holds_function, is_staged

# Scores of a call, from which on holding them all (4 GB in float32) is not to be thought of.
_LARGE: Final = 1 << 30


class FlashAttention(OperationImpl):
    """Attention tile by tile with an online softmax: O(T + S) memory, forward and backward.

    The native forward runs anywhere that XLA does and is laid out for CPUs. Tiles that the mask leaves empty are
    neither visited forward nor backward, and full ones are not masked, for masks that are known when tracing and for
    traced ones. kv heads are not repeated. The tiles' sizes come from `attnops.operations.flash.tile_sizes`, unless the
    metadata's ``block_q`` and ``block_k`` say otherwise.

    Plugins subclass it for their platform, so that what they can't serve runs here. ``return_weights`` needs
    O(B · H · T · S) memory by its nature and is computed as `vanilla` does. A second derivative is refused.
    """

    computes: ClassVar[str | None] = ATTENTION
    limits: ClassVar[Mapping[str, Limits]] = {"native": Limits(bias_kinds=None, symbolic=frozenset({"batch"}))}

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        return "flash"

    @classmethod
    def preference(cls, request: Request) -> float | None:
        own = super().preference(request)
        if own != 0.0 or request.platform == "cpu":
            return 1.0  # a plugin's kernel in a subclass, or the platform that the native forward is laid out for
        # Elsewhere its loop is slower than one product of T × S, until that no longer fits.
        return 0.0 if isinstance(request, AttentionRequest) and _scores(request) > _LARGE else -1.5

    def forward_native(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: Mask | None = None,
        bias: jax.Array | Bias | None = None,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sinks: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_lse: bool = False,
        return_weights: bool = False,
        as_part: bool = False,
        whole: Whole | None = None,
    ) -> OperationOutput:
        """See `OperationImpl.__call__`, and `attnops.kernels.parts` for the last two options."""
        shape = query.shape[0], query.shape[2], query.shape[1]
        check_parts(as_part, whole, shape, sinks=sinks, weights=return_weights)
        if return_weights:
            return VanillaAttention(self.metadata).forward_native(
                query, key, value, mask=mask, bias=bias, softmax_scale=softmax_scale,
                logits_soft_cap=logits_soft_cap, sinks=sinks, dropout_key=dropout_key, return_lse=return_lse,
                return_weights=True,
            )  # fmt: skip
        (B, T, H, D), (S, K, Dv) = query.shape, value.shape[1:]
        dtype = jnp.dtype(jnp.bfloat16 if query.dtype == key.dtype == value.dtype == jnp.bfloat16 else jnp.float32)
        row = table_row(dtype == jnp.bfloat16, max(D, Dv))
        block_q, block_k = choose_tiles(T, S, H // K, self.metadata.block_q, self.metadata.block_k, row)
        coverage = _coverage(mask, (B, H, T, S), K, block_q, block_k)
        batch, heads = (1, 1) if bias is None or isinstance(bias, Bias) else bias.shape[:2]
        lanes = choose_lanes(
            B, K, (H // K) * block_q * block_k, by_batch=(batch != 1 or coverage.shape[0] != 1), by_head=heads > 1,
            alone=coverage.shape[1] > 1, row=row,
        )  # fmt: skip
        plan = Plan(
            B=B, T=T, S=S, H=H, K=K, D=D, Dv=Dv, bq=block_q, bk=block_k, lanes=lanes, maps=coverage.shape[:2],
            dtype=dtype, is_part=as_part or whole is not None,
            precision=lax.Precision.HIGHEST if self.metadata.precision is None else self.metadata.precision,
        )  # fmt: skip
        numbers = Numbers.make(D**-0.5 if softmax_scale is None else softmax_scale, logits_soft_cap, dtype)
        # Outside `jax.jit` numbers are data, so that other ones don't compile anew; inside they make better programs.
        is_data = not is_staged()
        if is_data:
            mask = None if mask is None else mask.as_data()
            bias = bias.as_data() if isinstance(bias, Bias) else bias
        tiles, leaves = (None, ()) if bias is None else tile_bias(plan, bias)
        options = Options(
            numbers=None if is_data else numbers,
            has_cap=logits_soft_cap is not None,
            bias=tiles,
            dropout_prob=0.0 if dropout_key is None else self.metadata.dropout_prob,
            dropout_step=dropout_step(dropout_key),
            hides_tokens=mask is not None and mask.hides_tokens(T, S),
        )
        arrays = Arrays(
            mask=mask,
            bias=leaves,
            sinks=None if sinks is None else sinks.astype(jnp.float32),
            seed=None if dropout_key is None else dropout_seed(dropout_key),
            numbers=numbers.as_data() if is_data else None,
        )
        flat = coverage.reshape(-1, *coverage.shape[2:])
        both = visits(flat, is_data), visits(flat.swapaxes(1, 2), is_data)
        given = equally_varying(reverse_mode_only((query, key, value, arrays, both, whole), REVERSE_ONLY))
        holds = holds_function(mask) or holds_function(bias)
        if whole is not None:
            out, rows = attend_share(plan, options, holds, *given)
        else:
            out, rows, rest = attend(plan, options, holds, *given[:-1])
            rows = two_parts(rows, rest) if as_part else rows
        return OperationOutput(out, None, rows if return_lse else None)


def _coverage(mask: Mask | None, shape: tuple[int, int, int, int], K: int, block_q: int, block_k: int) -> Any:
    """The coverage [B or 1, K or 1, tiles of q, tiles of kv] for all heads of a kv head together.

    A tile is visited if any of these heads needs it, and masked if any does not see all of it, or if it is ragged.
    """
    coverage = block_map(mask, shape, block_q, block_k).coverage
    xp = np if isinstance(coverage, np.ndarray) else jnp
    heads = coverage.shape[1]
    if heads > 1:
        grouped = coverage.reshape(coverage.shape[0], K, heads // K, *coverage.shape[2:])
        least, most = grouped.min(axis=2), grouped.max(axis=2)
        coverage = xp.where(least == most, most, xp.minimum(most, Coverage.PARTIAL))
    if shape[3] % block_k:
        is_last = np.arange(coverage.shape[3]) == coverage.shape[3] - 1
        coverage = xp.where(is_last, xp.minimum(coverage, Coverage.PARTIAL), coverage)
    return coverage.astype(np.int8)


def _scores(request: AttentionRequest) -> int:
    """How many scores a call has at least: of a symbolic dimension nothing is known."""
    sizes = (request.batch, request.heads, request.query_length, request.key_length)
    return math.prod(1 if is_symbolic(size) else size for size in sizes)
