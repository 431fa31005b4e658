"""FlashAttention for TPUs: the operation, and what it can serve."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final

import jax
import jax.numpy as jnp
from jax import lax

from attnops import AttentionRequest, Limits, OperationOutput, Reason, Request
from attnops.biases import Bias
from attnops.dropout import dropout_step
from attnops.kernels.parts import Whole, check_parts, two_parts
from attnops.kernels.reverse import REVERSE_ONLY, reverse_mode_only
from attnops.kernels.varying import equally_varying
from attnops.masks import Mask
from attnops.operations.flash import FlashAttention
from attnops_tpu.flash.tile_sizes import LARGEST, MOST_TILES

# What kernels evaluate for each score of a `MaskFn` or a `ScoreFn`; each of them is compiled in the tests.
PRIMITIVES: Final = frozenset({
    "abs", "add", "and", "ceil", "clamp", "convert_element_type", "cos", "div", "eq", "erf", "exp", "exp2",
    "floor", "ge", "gt", "integer_pow", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne",
    "neg", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square",
    "stop_gradient", "sub", "tanh", "xor",
})  # fmt: skip


class TPUFlashAttention(FlashAttention):
    """Attention tile by tile in a Pallas kernel: O(T + S) memory, forward and backward; EMPTY tiles cost nothing.

    Serves TPUs; elsewhere, and for what it refuses, the core's native forward runs. ``metadata.interpret`` runs the
    kernel in Pallas's interpreter on the host. A second derivative is refused.
    """

    limits: ClassVar[Mapping[str, Limits]] = {
        "tpu": Limits(
            dtypes=frozenset({"float32", "bfloat16"}),
            max_head_dim=576,
            bias_kinds=frozenset({"array", "ALiBi", "RelativePosition", "ScoreFn"}),
            mask_primitives=PRIMITIVES,
            bias_primitives=PRIMITIVES,
        )
    }

    def unsupported(self, request: Request) -> Iterable[Reason]:
        """See `attnops.BaseOperation.unsupported`."""
        if not isinstance(request, AttentionRequest):
            return
        multiple, why = (8, "the sublanes") if request.interpret else (128, "the lanes")
        for name, length in (("block_q", request.query_length), ("block_k", request.key_length)):
            block = getattr(self.metadata, name)
            if block is not None and block % multiple:
                yield Reason(name, block, f"must be a multiple of {multiple}, {why} of a vector register",
                             "leave it out for the table's")  # fmt: skip
            elif length > MOST_TILES * (block or LARGEST):
                yield Reason(name, block, f"{length} tokens are more than {MOST_TILES} such tiles",
                             "leave it out for the table's, or shard the sequence")  # fmt: skip

    def forward_tpu(
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
        # Pallas is imported where it is used: the plugin is listed on machines that lack what it needs.
        from attnops.kernels.scoring import describe
        from attnops_tpu.flash.attend import attend, attend_share
        from attnops_tpu.flash.plan import Plan
        from attnops_tpu.flash.prepare import arrays, by_score, count_maps, maps, visited
        from attnops_tpu.flash.tile_sizes import Problem, choose
        from attnops_tpu.generations import generation

        asked, scale = query.dtype, query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        features = value.shape[3]
        dtype = jnp.bfloat16 if query.dtype == key.dtype == value.dtype == jnp.bfloat16 else jnp.float32
        query, key, value = (_whole_registers(x.astype(dtype)) for x in (query, key, value))
        (B, T, H, D), (S, K, Dv) = query.shape, value.shape[1:]
        check_parts(as_part, whole, (B, H, T), sinks=sinks)
        if whole is not None:
            whole = Whole(*whole[:2], *(None if x is None else _whole_registers(x) for x in whole[2:]))
        is_part = as_part or whole is not None
        dropout_prob = 0.0 if dropout_key is None else self.metadata.dropout_prob
        scoring, bias = describe(
            (T, S), mask, bias, logits_soft_cap, dropout_prob, sinks is not None, dropout_step(dropout_key)
        )  # fmt: skip
        array = bias if scoring.array and not isinstance(bias, Bias) else None
        problem = Problem(
            T=T, S=S, G=H // K, D=D, Dv=Dv, itemsize=query.dtype.itemsize,
            out_itemsize=4 if is_part else query.dtype.itemsize, changes_scores=scoring.changes_scores,
            maps=count_maps(mask, (B, H, T, S)),
            # Two buffers of each; the gradient of a bias takes a sum and two buffers in float32.
            bytes_a_score=2 * scoring.dense + (0 if array is None else 2 * array.dtype.itemsize + 12),
        )  # fmt: skip
        tiles = choose(self.metadata, problem, functools.partial(visited, mask, (B, H, T, S)))
        # Of float32's precisions the matrix unit has one pass in bfloat16, or all six; HIGH gets more than it asks for.
        one_pass = dtype == jnp.bfloat16 or self.metadata.precision == lax.Precision.DEFAULT
        precision = lax.Precision.DEFAULT if one_pass else lax.Precision.HIGHEST
        plan = Plan(
            B=B, inner=B, T=T, S=S, H=H, K=K, D=D, Dv=Dv, dtype=jnp.dtype(dtype), is_part=is_part,
            scoring=scoring, precision=precision, scale=scale, interpret=self.metadata.interpret,
            strided_rotation=generation().strided_rotation,
            **tiles._asdict(),
        )  # fmt: skip
        tiles_to_visit = maps(plan, mask)
        if array is not None:
            tiles_to_visit = tiles_to_visit._replace(by_score=by_score(plan, mask, array.shape))
        arguments = (query, key, value, arrays(plan, mask, bias, sinks, dropout_key), tiles_to_visit, whole)
        given = equally_varying(reverse_mode_only(arguments, REVERSE_ONLY))
        if whole is not None:
            out, rows = attend_share(plan, *given)
        else:
            out, rows, rest = attend(plan, *given[:-1])
            rows = two_parts(rows, rest) if as_part else rows
        out = out[..., :features]
        return OperationOutput(out if is_part else out.astype(asked), None, rows if return_lse else None)


def _whole_registers(x: jax.Array) -> jax.Array:
    """``x`` [..., d] with zeros up to a multiple of the 8 sublanes of a register, which change nothing."""
    return jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[3] % 8)])
