"""CausalConv1d: the operation ``"causal_conv1d"``, the short convolution before linear attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from attnops import BaseOperation, Call
from attnops.exported import serialised_tuple
from attnops.partition import unsharded
from attnops_linear.binding import check_bool, floating
from attnops_linear.masks import Tokens, bind_mask
from attnops_linear.packed import step_conv
from attnops_linear.state import StateCache, check_cache, step_mask

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from attnops.masks import Mask
    from attnops_caches import Rows


@serialised_tuple
class ConvOutput(NamedTuple):
    """The result of a causal convolution.

    Attributes:
        outputs: [B, T, C], in the dtype of x; 0 for padding.
        state: the last W - 1 tokens of each row, [B, W - 1, C], zeros where its last segment has fewer; None unless
            asked for.
    """

    outputs: jax.Array
    state: jax.Array | None = None


class CausalConv1d(BaseOperation):
    """A depthwise causal convolution over tokens, which begins anew with each segment. See `__call__`."""

    computes: ClassVar[str | None] = "causal_conv1d"

    @classmethod
    def get_impl_name(cls) -> str:
        """``"causal_conv1d"``."""
        return "causal_conv1d"

    def __call__(  # type: ignore[override]
        self,
        x: ArrayLike,
        weight: ArrayLike,
        *,
        bias: ArrayLike | None = None,
        state: ArrayLike | None = None,
        mask: Mask | None = None,
        return_state: bool = False,
        mode: str | None = None,
    ) -> ConvOutput:
        """``y_t = bias + Σ_i weight[:, i] · x_{t − (W − 1) + i}``, over the tokens of t's segment; float32 sums.

        Args:
            x: [B, T, C] float32, bfloat16 or float16; T may be 0.
            weight: [C, W]; its last column is the token's own. PyTorch's is [C, 1, W]: leave out axis 1.
            bias: [C].
            state: the W - 1 tokens before x, [B, W - 1, C]. None: zeros.
            mask: `attnops.masks.Segments`, whose first segment follows the state; `attnops.masks.KeyPadding`: padding
                is passed over, and has the output 0; or both, joined by ``&``.
            return_state: whether the output has ``state``.
            mode: runtime mode; see `attnops.OperationMetadata`.

        Raises:
            ValueError: shapes, dtypes or values that fit no implementation.
            TypeError: an option that no forward of this operation names.
        """
        given = {name: y for name, y in (("bias", bias), ("state", state), ("mask", mask)) if y is not None}
        output: ConvOutput = self.run(self.prepare(x, weight, return_state=return_state, mode=mode, **given))
        return output

    def bind(self, x: Any, weight: Any, **options: Any) -> Call:  # type: ignore[override]
        """The checked call of these arguments, with its request."""
        call = super().bind(x, weight, **options)
        bound = dict(call.options)
        x, weight = unsharded(floating("x", x), 1), floating("weight", weight)
        check_bool("return_state", bound.get("return_state", False))
        shape, taps = x.shape, weight.shape
        if len(shape) != 3:
            raise ValueError(f"x has shape {shape}, but must have shape [B, T, C]")
        B, T, C = shape
        if len(taps) != 2 or taps[0] != C or not taps[1]:
            hint = "; leave out its axis 1: weight[:, 0]" if len(taps) == 3 and taps[:2] == (C, 1) else ""
            raise ValueError(f"weight has shape {taps}, but must have shape [C, W]=({C}, W){hint}")
        for name, rule, wanted in (("bias", "[C]", (C,)), ("state", "[B, W - 1, C]", (B, taps[1] - 1, C))):
            if name in bound:
                bound[name] = floating(name, bound[name])
                if bound[name].shape != wanted:
                    raise ValueError(f"{name} has shape {bound[name].shape}, but must have shape {rule}={wanted}")
        tokens = bind_mask(bound.pop("mask", None), B, T)[1]
        if tokens != Tokens():
            bound["mask"] = tokens
        return call._replace(args=(x, weight), options=bound)

    def forward_native(
        self,
        x: jax.Array,
        weight: jax.Array,
        *,
        bias: jax.Array | None = None,
        state: jax.Array | None = None,
        mask: Tokens | None = None,
        return_state: bool = False,
    ) -> ConvOutput:
        """See `__call__`; ``mask`` says which tokens are padding and which begin a segment."""
        is_token, starts = Tokens() if mask is None else mask
        (B, T, C), W = x.shape, weight.shape[1]
        before = jnp.zeros((B, W - 1, C), x.dtype) if state is None else state
        count = jnp.full(B, T, jnp.int32)
        order = None
        if is_token is not None:  # the tokens first, then the padding
            order = jnp.argsort(~is_token, axis=1, stable=True)
            count = is_token.sum(axis=1, dtype=jnp.int32)
            x = jnp.take_along_axis(jnp.where(is_token[:, :, None], x, 0), order[:, :, None], axis=1)
            starts = None if starts is None else jnp.take_along_axis(starts, order, axis=1)
        full = jnp.concatenate([before.astype(jnp.float32), x.astype(jnp.float32)], axis=1)
        # The number of each token's segment; the state belongs to the first.
        segment = jnp.zeros((B, T + W - 1), jnp.int32)
        if starts is not None:
            segment = segment.at[:, W - 1 :].set(jnp.cumsum(starts, axis=1, dtype=jnp.int32))
        own = segment[:, W - 1 :]
        outputs = jnp.zeros((B, T, C), jnp.float32) if bias is None else bias.astype(jnp.float32)
        for i in range(W):
            tap = full[:, i : i + T]
            if starts is not None and i < W - 1:
                tap = jnp.where((segment[:, i : i + T] == own)[:, :, None], tap, 0)
            outputs = outputs + weight[:, i].astype(jnp.float32) * tap
        if order is not None:
            places = jnp.argsort(order, axis=1)
            outputs = jnp.take_along_axis(outputs, places[:, :, None], axis=1)
            outputs = jnp.where(is_token[:, :, None], outputs, 0)  # type: ignore[index]
        last = None
        if return_state:
            index = count[:, None] + jnp.arange(W - 1)
            last = jnp.take_along_axis(full, index[:, :, None], axis=1)
            if starts is not None and W > 1:
                newest = jnp.take_along_axis(segment, count[:, None] + W - 2, axis=1)
                kept = jnp.take_along_axis(segment, index, axis=1) == newest
                last = jnp.where(kept[:, :, None], last, 0)
            last = last.astype(before.dtype)
        return ConvOutput(outputs.astype(x.dtype), last)

    def step(
        self,
        x: ArrayLike,
        weight: ArrayLike,
        cache: StateCache,
        *,
        query_lengths: ArrayLike | None = None,
        rows: Rows | None = None,
        **options: Any,
    ) -> tuple[ConvOutput, StateCache]:
        """The convolution of T more tokens of each row, and the cache with them.

        `LinearAttention.step` counts the tokens of the cache: ``lengths`` stays as it is.

        Args:
            x: [B, T, C].
            weight: [C, W].
            cache: one layer, created with ``conv=(C, W)``.
            query_lengths: the number of tokens of each row, integers [B] from 0 to T. None: T.
            rows: an `attnops_caches.Rows`: which tokens of x [1, N, C] are of which row of the cache.
            **options: ``bias``, ``mask`` and ``mode`` of `__call__`.

        Raises:
            ValueError: see `__call__`; or the cache has several layers, or no convolution; or ``rows`` are refused
                as `LinearAttention.step` says.
        """
        check_cache(cache)
        if cache.conv is None:
            raise ValueError("the cache has no convolution: create it with conv=(channels, width)")
        if given := {"state", "return_state"} & options.keys():
            raise ValueError(
                f"{sorted(given)[0]} is given, but step takes the state from the cache and returns it in it"
            )
        if rows is not None:
            outputs, cache = step_conv(self, x, weight, cache, rows, options | {"query_lengths": query_lengths})
            return ConvOutput(outputs), cache
        B, T = (*getattr(x, "shape", ()), 0, 0)[:2]
        mask, _ = step_mask(query_lengths, options.pop("mask", None), B, T)
        output = self(x, weight, state=cache.conv, return_state=True, mask=mask, **options)
        assert output.state is not None
        return output._replace(state=None), cache.with_conv(output.state)
