"""Attention with one mistake each."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from attention_in_steps import Reference

from attnops.biases import Bias
from attnops.dropout import dropout_keep, dropout_rows, dropout_seed
from attnops.masks import And, Blocks, Causal, Full, MaskFn, Segments, SlidingWindow

TILE = 16


def edit_mask(mask, edit):
    """The mask with ``edit`` applied to its primitives."""
    if isinstance(mask, And):
        return And(edit_mask(mask.left, edit), edit_mask(mask.right, edit))
    return edit(mask)


# Each mutant states what ought to find it: a feature, or a behaviour.


class SoftCapDropped(Reference):
    found_by = "soft cap"

    def cap(self, scores, cap):
        return scores


class SoftCapDroppedInTheBackward(Reference):
    found_by = "soft cap"

    def cap(self, scores, cap):
        return scores + jax.lax.stop_gradient(super().cap(scores, cap) - scores)


class WindowOffByOne(Reference):
    """The window's size taken for what is seen to the left."""

    found_by = "SlidingWindow"

    def allowed(self, mask, B, H, T, S):
        def edit(mask):
            return SlidingWindow(mask.left - 1, mask.right, mask.offset) if isinstance(mask, SlidingWindow) else mask

        return super().allowed(edit_mask(mask, edit), B, H, T, S)


class CausalAlignedTopLeft(Reference):
    found_by = "T < S + Causal"

    def allowed(self, mask, B, H, T, S):
        return super().allowed(edit_mask(mask, lambda m: Causal(offset=0) if isinstance(m, Causal) else m), B, H, T, S)


class CausalOffsetIgnored(Reference):
    found_by = "Causal(offset)"
    allowed = CausalAlignedTopLeft.allowed


class SegmentsOfKeysIgnored(Reference):
    """The queries' ids are used for the keys too: right as long as a caller does not give both."""

    found_by = "fully masked tiles"

    def allowed(self, mask, B, H, T, S):
        return super().allowed(
            edit_mask(mask, lambda m: Segments(m.q_ids, m.q_ids) if isinstance(m, Segments) else m), B, H, T, S
        )


class DocumentsSeeEachOther(Reference):
    """What separates documents is not applied."""

    found_by = "total-token layout"

    def allowed(self, mask, B, H, T, S):
        return super().allowed(edit_mask(mask, lambda m: Full() if isinstance(m, Segments) else m), B, H, T, S)


class PaddingAfterDocumentsSeesItself(Reference):
    """Ids below 0 are one more document."""

    found_by = "total-token layout"

    def allowed(self, mask, B, H, T, S):
        def edit(mask):
            return (
                Segments(*(jnp.maximum(x, -1) for x in (mask.q_ids, mask.kv_ids)))
                if isinstance(mask, Segments)
                else mask
            )

        return super().allowed(edit_mask(mask, edit), B, H, T, S)


class BlocksOfTheFirstHeadForAll(Reference):
    """The blocks that were chosen for the first heads are used for all heads."""

    found_by = "Blocks"

    def allowed(self, mask, B, H, T, S):
        def edit(mask):
            return Blocks(mask.chosen[:, :1], mask.q_block, mask.kv_block) if isinstance(mask, Blocks) else mask

        return super().allowed(edit_mask(mask, edit), B, H, T, S)


class BlocksOneKeyShort(Reference):
    """A block has one key less than it should."""

    found_by = "traced Blocks"

    def allowed(self, mask, B, H, T, S):
        def edit(mask):
            if not isinstance(mask, Blocks):
                return mask
            return mask & MaskFn(lambda b, h, q, kv, n=mask.kv_block: kv % n != n - 1)

        return super().allowed(edit_mask(mask, edit), B, H, T, S)


class OneRowOfSegmentsForTheFirstBatch(Reference):
    """Ids [1, T] count for the first batch, and hide nothing in the others."""

    found_by = "masks of one row"

    def allowed(self, mask, B, H, T, S):
        allowed = super().allowed(mask, B, H, T, S)
        one_row = isinstance(mask, Segments) and mask.q_ids.shape[0] == 1
        return allowed | (jnp.arange(B)[:, None, None, None] > 0) if one_row else allowed


class MaskOfTheFirstBatch(Reference):
    found_by = "mask per batch"

    def allowed(self, mask, B, H, T, S):
        return super().allowed(mask, B, H, T, S)[:1]


class MaskOfTheFirstHead(Reference):
    found_by = "mask per head"

    def allowed(self, mask, B, H, T, S):
        return super().allowed(mask, B, H, T, S)[:, :1]


class SinksSharedAcrossHeads(Reference):
    found_by = "sinks"

    def sink(self, sinks):
        return jnp.broadcast_to(sinks[:1], sinks.shape)


class GradientOfSinksHasTheWrongSign(Reference):
    found_by = "sinks"

    def sink(self, sinks):
        return 2 * jax.lax.stop_gradient(sinks) - sinks


class MeanOfValuesOnMaskedRows(Reference):
    found_by = "fully masked rows"
    hidden_score = -1e9


class NaNOnMaskedRows(Reference):
    found_by = "fully masked rows"

    def softmax(self, scores, sink):
        total = jnp.logaddexp(jax.nn.logsumexp(scores, axis=-1, keepdims=True), sink)
        return jnp.exp(scores - total), total


class HiddenKeysCounted(Reference):
    """Masked keys weigh nothing in the sum of values, and something in the denominator."""

    found_by = "KeyPadding"

    def softmax(self, scores, sink):
        weights, logsumexp = super().softmax(jnp.where(scores == -jnp.inf, 0.0, scores), sink)
        return jnp.where(scores == -jnp.inf, 0.0, weights), logsumexp


class PaddingLeaks(Reference):
    found_by = "NaN behind KeyPadding"

    def hide(self, query, key, value, allowed):
        return query, key, value


class PaddingOfPositionsLeaks(Reference):
    """Positions are taken to hide no token."""

    found_by = "NaN behind Causal(offset)"
    hide = PaddingLeaks.hide


class PaddingOfWindowsLeaks(Reference):
    found_by = "NaN behind a window"
    hide = PaddingLeaks.hide


class ScaleTwice(Reference):
    found_by = "softmax_scale"

    def scale(self, scores, scale):
        return scores * scale * scale


class ScaleIgnored(Reference):
    found_by = "softmax_scale"

    def scale(self, scores, scale):
        return scores * 0.25  # right for the head_dim of most problems


class ScaleOfTheWrongSign(Reference):
    found_by = "negative scale"

    def scale(self, scores, scale):
        return scores * abs(scale)


class MaximumNotSubtracted(Reference):
    found_by = "large logits"

    def highest(self, scores):
        return jnp.zeros_like(scores[..., :1])


class MaximumOfTheFirstTile(Reference):
    """An online softmax that never fades what came before."""

    found_by = "rising bias"

    def highest(self, scores):
        return super().highest(scores[..., :TILE])


class LowestIsHidden(Reference):
    """A finite score for what is masked, and what is not above it counts as masked."""

    found_by = "bias near finfo.min"

    def softmax(self, scores, sink):
        return super().softmax(jnp.where(scores <= -1e30, -jnp.inf, scores), sink)


class InfinityOfABiasIgnored(Reference):
    found_by = "bias of -inf"

    def bias(self, scores, bias):
        return super().bias(scores, bias if isinstance(bias, Bias) else jnp.maximum(bias, -3))


class KeysInTheDtypeOfTheQuery(Reference):
    """float32 queries and bfloat16 keys are multiplied in bfloat16."""

    found_by = "mixed dtypes"

    def cast(self, query, key, value):
        dtype = min(query.dtype, key.dtype, key=lambda d: d.itemsize)
        return super().cast(query.astype(dtype), key, value)


class BiasGradientNotSummed(Reference):
    """A broadcast bias gets the gradient of its first copy."""

    found_by = "bias [1, H, T, S]"

    def bias(self, scores, bias):
        if isinstance(bias, Bias):
            return super().bias(scores, bias)
        return super().bias(scores, bias_of_first_copy(scores.shape, bias))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def bias_of_first_copy(shape, bias):
    return jnp.broadcast_to(bias, shape)


def _first_copy(shape, size, d_full):
    return (d_full[tuple(slice(n) for n in size)],)


bias_of_first_copy.defvjp(lambda shape, bias: (bias_of_first_copy(shape, bias), bias.shape), _first_copy)


class GroupsInterleaved(Reference):
    found_by = "GQA"

    def repeat(self, x, H):
        return jnp.tile(x, (1, 1, H // x.shape[2], 1))


class GradientOfOneHeadAGroup(Reference):
    """dk and dv are those of the first head of each group, not the sum."""

    found_by = "MQA"

    def repeat(self, x, H):
        first = jnp.arange(H)[:, None] % (H // x.shape[2]) == 0
        whole = super().repeat(x, H)
        return jnp.where(first, whole, jax.lax.stop_gradient(whole))


class DropoutDiffersByTile(Reference):
    """Keys are counted from the start of their tile."""

    found_by = "dropout"

    def keep(self, shape, key):
        b, h, i, j = jnp.ogrid[tuple(slice(n) for n in shape)]
        seed = dropout_seed(key)
        return dropout_keep(dropout_rows(seed, b, h, i), j % TILE, self.metadata.dropout_prob)


class DropoutNotRescaled(Reference):
    found_by = "dropout"

    def dropout(self, weights, key):
        return jnp.where(self.keep(weights.shape, key), weights, 0.0)


class LastPartialTileIgnored(Reference):
    found_by = "odd lengths"

    def softmax(self, scores, sink):
        S = scores.shape[-1]
        whole = jnp.arange(S) < max(S // TILE, 1) * TILE
        return super().softmax(jnp.where(whole, scores, -jnp.inf), sink)


class LogsumexpBase2(Reference):
    found_by = "logsumexp"

    def finish_logsumexp(self, logsumexp):
        return logsumexp / np.log(2)


class GradientOfLogsumexpDropped(Reference):
    found_by = "logsumexp"

    def finish_logsumexp(self, logsumexp):
        return jax.lax.stop_gradient(logsumexp)


class MaxLogitsOfSinksToo(Reference):
    """The running maximum of a kernel that begins with the sink."""

    found_by = "sinks + max logits"

    def max_logits(self, scores, sink):
        return jnp.maximum(super().max_logits(scores, sink), sink)


class MaxLogitsOfFullyMaskedRowsAreFinite(Reference):
    """The maximum that keeps exponents finite."""

    found_by = "fully masked tiles + max logits"

    def max_logits(self, scores, sink):
        return jnp.maximum(super().max_logits(scores, sink), jnp.finfo(scores.dtype).min)


class MaxLogitsInTheQuerysDtype(Reference):
    found_by = "bfloat16 + max logits"

    def max_logits(self, scores, sink):
        return super().max_logits(scores, sink).astype(jnp.bfloat16).astype(jnp.float32)


class MaxLogitsHaveAGradient(Reference):
    found_by = "max logits"

    def max_logits(self, scores, sink):
        return scores.max(-1, keepdims=True)


class GradientZero(Reference):
    found_by = "float32"

    def finish_output(self, out):
        return jax.lax.stop_gradient(out)


class GradientZeroOnPartialTiles(Reference):
    """Queries beyond the last whole tile get no gradient."""

    found_by = "odd lengths"

    def finish_output(self, out):
        T = out.shape[1]
        whole = jnp.arange(T)[:, None, None] < T // TILE * TILE
        return jnp.where(whole, out, jax.lax.stop_gradient(out))


class SoftmaxInBfloat16(Reference):
    """float32 inputs, and weights of 8 bits."""

    found_by = "float32"

    def combine(self, weights, v):
        return super().combine(weights.astype(jnp.bfloat16).astype(jnp.float32), v)


class NotDeterministic(Reference):
    """As atomic additions are: another order of summation each time. Too small an error for the tolerance."""

    found_by = "deterministic"

    def finish_output(self, out):
        noise = jax.pure_callback(_noise, jax.ShapeDtypeStruct((), np.float32), vmap_method="sequential")
        return out * jax.lax.stop_gradient(1 + noise)


_calls = itertools.count()


def _noise():
    return np.float32(next(_calls) % 2 * 2e-7)


MUTANTS = [cls for cls in Reference.__subclasses__() if "found_by" in vars(cls)]
