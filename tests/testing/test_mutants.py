"""The suite can fail: each mutant of a right implementation has one mistake, found by the feature that ought to.

`Reference` is attention in steps; a mutant overrides a step.
"""

import functools
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops.biases import Bias
from attnops.dispatch.attention import OperationImpl
from attnops.dispatch.limits import Limits
from attnops.dropout import dropout_keep, dropout_rows, dropout_seed
from attnops.kernels.unseen import zero_masked_tokens
from attnops.masks import And, Causal, Segments, SlidingWindow
from attnops.output import OperationOutput
from attnops.testing.behaviours import BEHAVIOURS, memory_growth
from attnops.testing.pairs import joined, rows_of_each
from attnops.testing.runner import Outcome, Status, Subject, attempt

TILE = 16


class Reference(OperationImpl):
    """Right, and plain; kv heads are repeated and everything is float32."""

    limits: ClassVar = {"native": Limits(bias_kinds=None, linear_memory=False)}

    @classmethod
    def get_impl_name(cls):
        return "reference"

    def forward_native(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        mask=None,
        bias=None,
        softmax_scale=None,
        logits_soft_cap=None,
        sinks=None,
        dropout_key=None,
        return_lse=False,
        return_weights=False,
    ):
        (B, T, H, D), S = query.shape, key.shape[1]
        allowed = None if mask is None else jnp.broadcast_to(self.allowed(mask, B, H, T, S), (B, H, T, S))
        dtype = query.dtype
        if mask is not None and mask.has_fully_masked_tokens(T, S):
            query, key, value = self.hide(query, key, value, allowed)
        q, k, v = self.cast(query, key, value)
        k, v = self.repeat(k, H), self.repeat(v, H)
        scores = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest")
        scores = self.scale(scores, D**-0.5 if softmax_scale is None else softmax_scale)
        if logits_soft_cap is not None:
            scores = self.cap(scores, logits_soft_cap)
        if bias is not None:
            scores = self.bias(scores, bias)
        if allowed is not None:
            scores = jnp.where(allowed, scores, self.hidden_score)
        sink = jnp.full((1, H, 1, 1), -jnp.inf)
        if sinks is not None:
            sink = self.sink(sinks.astype(jnp.float32)).reshape(1, H, 1, 1)
        weights, logsumexp = self.softmax(scores, sink)
        if dropout_key is not None:
            weights = self.dropout(weights, dropout_key)
        out = self.combine(weights, v)
        return OperationOutput(
            self.finish_output(out).astype(dtype),
            weights.astype(dtype) if return_weights else None,
            self.finish_logsumexp(logsumexp)[..., 0] if return_lse else None,
        )

    hidden_score = -jnp.inf

    def allowed(self, mask, B, H, T, S):
        return mask.dense(B, H, T, S)

    def hide(self, query, key, value, allowed):
        return zero_masked_tokens(query, key, value, allowed)

    def cast(self, query, key, value):
        return (x.astype(jnp.float32) for x in (query, key, value))

    def repeat(self, x, H):
        return jnp.repeat(x, H // x.shape[2], axis=2)

    def scale(self, scores, scale):
        return scores * scale

    def cap(self, scores, cap):
        return cap * jnp.tanh(scores / cap)

    def bias(self, scores, bias):
        if isinstance(bias, Bias):
            return bias.apply(scores, *jnp.ogrid[tuple(slice(n) for n in scores.shape)])
        return scores + bias.astype(jnp.float32)

    def sink(self, sinks):
        return sinks

    def softmax(self, scores, sink):
        """Weights, and logsumexp [B, H, T, 1]."""
        highest = jax.lax.stop_gradient(jnp.maximum(self.highest(scores), sink))
        highest = jnp.where(highest == -jnp.inf, 0.0, highest)
        numerator = jnp.exp(scores - highest)
        total = numerator.sum(-1, keepdims=True) + jnp.exp(sink - highest)
        empty = jnp.all(scores == -jnp.inf, -1, keepdims=True)
        total = jnp.where(empty, 1.0, total)
        return numerator / total, jnp.where(empty, -jnp.inf, highest + jnp.log(total))

    def highest(self, scores):
        return scores.max(-1, keepdims=True)

    def keep(self, shape, key):
        b, h, i, j = jnp.ogrid[tuple(slice(n) for n in shape)]
        return dropout_keep(dropout_rows(dropout_seed(key), b, h, i), j, self.metadata.dropout_prob)

    def dropout(self, weights, key):
        return jnp.where(self.keep(weights.shape, key), weights / (1 - self.metadata.dropout_prob), 0.0)

    def combine(self, weights, v):
        return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest")

    def finish_output(self, out):
        return out

    def finish_logsumexp(self, logsumexp):
        return logsumexp


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
        weights, logsumexp = super().softmax(jnp.where(scores == -jnp.inf, -3.0, scores), sink)
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


def check(cls: type[OperationImpl], name: str) -> Outcome:
    subject = Subject(operation=cls)
    if name in BEHAVIOURS:
        return attempt(name, functools.partial(BEHAVIOURS[name], subject))
    return subject.check(name.split(" + "))


IN_ROWS = [(mutant, row) for mutant in MUTANTS for row in rows_of_each() if mutant.found_by in row]


def test_most_mutants_are_of_a_feature_that_a_row_has():
    assert len(MUTANTS) >= 30
    assert len(IN_ROWS) >= 0.8 * len(MUTANTS)


@pytest.mark.parametrize(("mutant", "row"), IN_ROWS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_mutant_is_wrong_where_its_feature_is_one_of_several(mutant, row):
    outcome = Subject(operation=mutant).small(4 if "GQA" in row else 2).check(row)
    assert outcome.status is Status.WRONG, f"{mutant.__name__} is {outcome.status} in {joined(row)}"


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, marks=[pytest.mark.slow] if any(mutant is other for other, _ in IN_ROWS) else [])
        for mutant in MUTANTS
    ],
    ids=lambda cls: cls.__name__,
)
def test_a_mutant_is_wrong_in_its_feature_alone(mutant):
    outcome = check(mutant, mutant.found_by)
    assert outcome.status is Status.WRONG, f"{mutant.__name__} is {outcome.status} in {mutant.found_by!r}"


def test_memory_that_is_not_declared_is_wrong():
    class Undeclared(Reference):
        limits: ClassVar = {"native": Limits(bias_kinds=None)}

    for cls, status in ((Reference, Status.NOT_RUN), (Undeclared, Status.WRONG)):
        outcome = attempt("memory", functools.partial(memory_growth, Subject(operation=cls), "Causal"))
        assert outcome.status is status, outcome
    assert "Limits(linear_memory=False)" in outcome.detail


@pytest.mark.slow
@pytest.mark.parametrize("name", dict.fromkeys(mutant.found_by for mutant in MUTANTS))
def test_the_unmutated_is_right_in_each_feature_alone(name):
    outcome = check(Reference, name)
    assert outcome.status is Status.RIGHT, outcome.detail


@pytest.mark.parametrize("row", rows_of_each(), ids=joined)
def test_the_unmutated_is_right_in_every_row(row):
    assert {outcome.status for outcome in Subject(operation=Reference).check_row(row)} == {Status.RIGHT}
