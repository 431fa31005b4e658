"""FlashAttention for GPUs: the operation, and what it can serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
from jax import lax

from attnops import AttentionRequest, Limits, OperationOutput, Reason, Request
from attnops.biases import Bias
from attnops.dropout import dropout_step
from attnops.kernels.parts import Whole, check_parts, two_parts
from attnops.masks import Mask
from attnops.operations.flash import FlashAttention
from attnops_triton.language.translate import PRIMITIVES
from attnops_triton.versions import missing

# Scores of the largest tile that may be stated.
LARGEST: Final = 128 * 128
# What is computed in 16 bits; all else in float32.
_HALVES: Final = ({"bfloat16"}, {"float16"})


class TritonFlashAttention(FlashAttention):
    """Attention tile by tile in Triton kernels: O(T + S) memory, forward and backward; EMPTY tiles cost nothing.

    Serves NVIDIA and AMD GPUs; elsewhere, and for what it refuses, the core's native forward runs.
    ``metadata.interpret`` runs the kernels in Triton's interpreter on the host, in float32 and float16. A second
    derivative is refused.
    """

    limits: ClassVar[Mapping[str, Limits]] = {
        "gpu": Limits(
            max_head_dim=576,
            bias_kinds=frozenset({"array", "ALiBi", "RelativePosition", "ScoreFn"}),
            bias_primitives=PRIMITIVES,
        )
    }

    @classmethod
    def preference(cls, request: Request) -> float | None:
        """Before cuDNN, whose preference is 2, where that would need an array of T × S elements; else after it.

        By bytes, as no GPU has timed the two: a mask of 16,384 × 16,384 is 512 MB in bfloat16, read again for every
        head that has one of its own, and no tile of it is left out. Plain and causal attention is cuDNN's own ground.
        """
        own = super().preference(request)
        if request.platform != "cuda" or not isinstance(request, AttentionRequest):
            return own
        is_plain = request.mask_kinds <= {"Causal"} and request.query_length == request.key_length
        return 3.0 if request.bias_kind or (request.mask_kinds and not is_plain) else 1.0

    def circumstances(self) -> Hashable:
        """See `attnops.BaseOperation.circumstances`: the GPU that kernels are compiled for."""
        from attnops_triton.targets import current

        return current()

    def unsupported(self, request: Request) -> Iterable[Reason]:
        """See `attnops.BaseOperation.unsupported`."""
        yield from missing(request.interpret)
        if not request.interpret:
            yield from _too_little(request)
        for name in ("block_q", "block_k"):
            block = getattr(self.metadata, name)
            if block is not None and (block < 16 or block & (block - 1)):
                yield Reason(name, block, "must be a power of two of at least 16", "leave it out for the table's")
        area = (self.metadata.block_q or 64) * (self.metadata.block_k or 64)
        if area > LARGEST:
            yield Reason("block_q · block_k", area, f"must be at most {LARGEST}, for what a program may hold",
                         "leave them out for the table's")  # fmt: skip
        if isinstance(request, AttentionRequest) and request.interpret and request.dtypes[0] == "bfloat16":
            yield Reason("query.dtype", "bfloat16", "Triton's interpreter computes it wrongly",
                         "interpret float32 or float16")  # fmt: skip

    def forward_gpu(
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
        as_part: bool = False,
        whole: Whole | None = None,
    ) -> OperationOutput:
        """See `attnops.OperationImpl.__call__`, and `attnops.kernels.parts` for the last two options."""
        # Triton is imported where it is used: the plugin is listed on machines that lack it.
        from attnops.kernels.reverse import REVERSE_ONLY, reverse_mode_only
        from attnops.kernels.scoring import describe
        from attnops.kernels.varying import equally_varying
        from attnops_triton.flash.attend import attend, attend_share
        from attnops_triton.flash.bits import is_translatable
        from attnops_triton.flash.plan import Plan
        from attnops_triton.flash.prepare import arrays, maps
        from attnops_triton.flash.tile_sizes import choose
        from attnops_triton.language.compat import device_arch
        from attnops_triton.targets import current

        (B, T, H, D), (S, K, Dv) = query.shape, value.shape[1:]
        check_parts(as_part, whole, (B, H, T), sinks=sinks)
        is_part, asked = as_part or whole is not None, query.dtype
        dtype = query.dtype if query.dtype == key.dtype == value.dtype else jnp.dtype(jnp.float32)
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        dropout_prob = 0.0 if dropout_key is None else self.metadata.dropout_prob
        if self.metadata.interpret:
            mask, bias = jax.tree.map(_wide, (mask, bias))
        # A mask that has no form in Triton comes as bits, for the tiles that it is PARTIAL on.
        packed = mask is not None and not is_translatable(mask)
        written = None if packed else mask
        scoring, bias = describe(
            (T, S), written, bias, logits_soft_cap, dropout_prob, sinks is not None, dropout_step(dropout_key)
        )  # fmt: skip
        if mask is not None:
            scoring = dataclasses.replace(scoring, hides_tokens=mask.hides_tokens(T, S))
        arch = "" if self.metadata.interpret else current() or device_arch()
        by_score = packed or scoring.dense > 0 or scoring.array
        tiles = choose(arch, dtype.name, max(D, Dv), self.metadata.block_q, self.metadata.block_k, by_score)
        plan = Plan(
            B=B, inner=B, T=T, S=S, H=H, K=K, D=D, Dv=Dv, forward=tiles[0], by_query=tiles[1], by_key=tiles[2],
            by_score=tiles[3], dtype=dtype.name, is_part=is_part,
            scale=D**-0.5 if softmax_scale is None else softmax_scale,
            tf32=self.metadata.precision == lax.Precision.DEFAULT, scoring=scoring, packed=packed, arch=arch,
            interpret=self.metadata.interpret,
        )  # fmt: skip
        given = arrays(plan, written, bias, sinks, dropout_key)
        everything = reverse_mode_only((query, key, value, given, maps(plan, mask), whole), REVERSE_ONLY)
        arguments = equally_varying(everything)
        if whole is not None:
            out, rows = attend_share(plan, *arguments)
        else:
            out, rows, rest = attend(plan, *arguments[:-1])
            rows = two_parts(rows, rest) if as_part else rows
        return OperationOutput(out if is_part else out.astype(asked), None, rows if return_lse else None)


def _too_little(request: Request) -> Iterable[Reason]:
    """What the GPU at hand lacks, where there is one."""
    from attnops_triton.flash.tile_sizes import known
    from attnops_triton.language.compat import device_arch
    from attnops_triton.targets import SHARED_MEMORY, current

    arch = current() or device_arch()
    if arch.startswith("sm_") and int(arch.removeprefix("sm_")) < 80:
        yield Reason("GPU", arch, "must be at least sm_80, whose products and memory the kernels are written for")
    elif arch.startswith("sm_") and isinstance(request, AttentionRequest) and set(request.dtypes) not in _HALVES:
        # Products in float32 take their operands from shared memory: tiles of query, key, value and output, 16 tokens.
        least, most = 4 * 16 * 2 * (request.head_dim + request.value_head_dim), SHARED_MEMORY[known(arch)]
        if least > most:
            yield Reason("head_dim", request.head_dim, f"the smallest tiles in float32 take {least} bytes of shared "
                         f"memory, and {arch} has {most}", "cast query, key and value to bfloat16")  # fmt: skip


def _wide(x: Any) -> Any:
    """Triton's interpreter has no bfloat16."""
    return x.astype(jnp.float32) if getattr(x, "dtype", None) == jnp.bfloat16 else x
