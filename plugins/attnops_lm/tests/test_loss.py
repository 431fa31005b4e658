"""Losses against NumPy in float64, and their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lm_model import tokens

from attnops_lm.loss import LossConfig, cross_entropy
from attnops_lm.model import SequenceClassifier
from attnops_lm.testing import small

B, T = 3, 12


def reference(logits: Any, targets: dict[tuple[int, ...], int], smoothing: float = 0.0, z: float = 0.0) -> Any:
    """Loss, its z part and the accuracy over some positions, one at a time."""
    losses, zs, correct = [], [], []
    for at, label in targets.items():
        row = np.asarray(logits, np.float64)[at]
        total = row.max() + np.log(np.exp(row - row.max()).sum())
        target = np.full(row.size, smoothing / row.size)
        target[label] += 1 - smoothing
        losses.append(-(target * (row - total)).sum())
        zs.append(z * total**2)
        correct.append(row.argmax() == label)
    return np.mean(losses) + np.mean(zs), np.mean(zs), np.mean(correct)


def check(metrics: Any, logits: Any, targets: dict[tuple[int, ...], int], **options: float) -> None:
    loss, z_loss, accuracy = reference(logits, targets, **options)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(metrics.z_loss, z_loss, rtol=1e-5)
    np.testing.assert_allclose(metrics.accuracy, accuracy, rtol=1e-6)
    assert metrics.weight_sum == len(targets)


@pytest.mark.slow
def test_each_token_is_predicted_by_the_one_before() -> None:
    model, ids = small(), tokens((B, T))
    output, metrics = model.compute_loss(ids)
    every = {(b, t - 1): int(ids[b, t]) for b in range(B) for t in range(1, T)}
    check(metrics, output.logits, every)
    labels = np.array(ids)
    labels[0, :7] = labels[2, 3] = -100
    _, metrics = model.compute_loss(ids, labels, loss_kwargs={"label_smoothing": 0.1, "z_loss": 1e-2})
    some = {(b, t): x for (b, t), x in every.items() if labels[b, t + 1] != -100}
    check(metrics, output.logits, some, smoothing=0.1, z=1e-2)
    _, total = model.compute_loss(ids, labels, loss_config=LossConfig(reduction="sum"))
    np.testing.assert_allclose(total.loss, reference(output.logits, some)[0] * len(some), rtol=1e-5)
    moved = np.concatenate([labels[:, 1:], np.full((B, 1), -100)], axis=1)
    _, aligned = model.compute_loss(ids, moved, loss_kwargs={"shift_labels": False})
    check(aligned, output.logits, some)


@pytest.mark.slow
def test_padding_and_borders_of_documents_count_nothing() -> None:
    model, ids = small(), tokens((B, T))
    real = np.ones((B, T), bool)
    real[0, :4], real[1, 9:] = False, False
    output, metrics = model.compute_loss(ids, attention_mask=real)
    pairs = [(b, t) for b in range(B) for t in range(T - 1)]
    check(metrics, output.logits, {(b, t): int(ids[b, t + 1]) for b, t in pairs if real[b, t] and real[b, t + 1]})
    segments = np.broadcast_to(np.repeat([0, 1, 2], [5, 1, 6]), (B, T))
    output, metrics = model.compute_loss(ids, segment_ids=segments)
    check(
        metrics, output.logits,
        {(b, t): int(ids[b, t + 1]) for b, t in pairs if segments[b, t] == segments[b, t + 1]},
    )  # fmt: skip


@pytest.mark.slow
def test_classes_of_rows() -> None:
    model, ids = SequenceClassifier(small().config, 5), tokens((B, T))
    mask = np.arange(T) < np.array([[12], [3], [7]])
    output, metrics = model.compute_loss(ids, jnp.array([4, -100, 2]), attention_mask=mask)
    check(metrics, output.logits, {(0,): 4, (2,): 2})
    with pytest.raises(ValueError, match=r"labels=int32 \(3, 12\) must be integers \(3,\)"):
        model.compute_loss(ids, ids)


def test_no_label_at_all_is_zero_with_zero_gradients() -> None:
    logits = jnp.ones((2, 3))
    labels = jnp.full(2, -100)
    value, gradient = jax.value_and_grad(lambda x: cross_entropy(x, labels, LossConfig()).loss)(logits)
    assert value == 0
    assert not gradient.any()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
@pytest.mark.tier(every=2)
def test_gradients_through_flash_are_the_slopes(family: str) -> None:
    model, ids = small(family), tokens((2, T))
    mask = jnp.asarray(np.arange(T) >= np.array([[0], [3]]))
    graphdef, state = nnx.split(model)

    @jax.jit
    def loss(state: Any) -> jax.Array:
        return nnx.merge(graphdef, state).compute_loss(ids, attention_mask=mask)[1].loss

    gradients = jax.jit(jax.grad(loss))(state)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), state)
    slope = sum(float(jnp.vdot(a, b)) for a, b in zip(*map(jax.tree.leaves, (gradients, direction)), strict=True))
    step = 2e-4
    moved = [jax.tree.map(lambda x, d, s=s: x + s * d, state, direction) for s in (step, -step)]
    measured = float(loss(moved[0]) - loss(moved[1])) / (2 * step)
    assert abs(slope - measured) < 0.02 * abs(measured) + 0.02


@pytest.mark.slow
def test_what_is_not_served_is_refused() -> None:
    model, ids = small(), tokens((1, 4))
    with pytest.raises(ValueError, match="output_attentions=True is not supported"):
        model.compute_loss(ids, output_attentions=True)
    with pytest.raises(ValueError, match="output_hidden_states=True is not supported"):
        model.compute_loss(ids, output_hidden_states=True)
    with pytest.raises(ValueError, match="cache_metadata must be None"):
        model.compute_loss(ids, cache_metadata=model.create_cache_metadata(1, 4))
    with pytest.raises(ValueError, match="loss_kwargs has 'smoothing'"):
        model.compute_loss(ids, loss_kwargs={"smoothing": 0.1})
    with pytest.raises(ValueError, match="labels=None uses input_ids"):
        model.compute_loss(inputs_embeds=jnp.zeros((1, 4, 32)))
    for labels in (ids[:, :3], ids[0], ids.astype(jnp.float32)):
        with pytest.raises(ValueError, match=r"labels=.* must be integers (\(1, 4\), one for each|\[B, T\])"):
            model.compute_loss(ids, labels)
    with pytest.raises(ValueError, match="must be at least 0 and below 1"):
        LossConfig(label_smoothing=1.0)
    with pytest.raises(ValueError, match="must be mean or sum"):
        LossConfig(reduction="none")
