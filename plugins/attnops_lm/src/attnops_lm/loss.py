"""Losses of a language model and of a classifier, from logits."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

IGNORED = -100


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """How a loss is computed.

    Attributes:
        ignore_index: labels with this value are ignored.
        label_smoothing: the share of the target that is spread evenly over all classes, at least 0 and below 1.
        z_loss: the weight with which the squared logarithm of the softmax's sum is added (Chowdhery et al. 2022,
            arXiv:2204.02311, section 5).
        reduction: "mean" over the labels that are not ignored, or their "sum".
        shift_labels: whether ``labels[t]`` is the token at t, predicted at t − 1; else it is the token predicted at t.
    """

    ignore_index: int = IGNORED
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "mean"
    shift_labels: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 1")
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction={self.reduction!r} must be mean or sum")


class LossMetrics(NamedTuple):
    """The results of `compute_loss`; float32 scalars."""

    loss: jax.Array  # to be minimised, z_loss included
    z_loss: jax.Array  # the z-loss's term of ``loss``
    accuracy: jax.Array  # the share of labels that have the greatest logit
    weight_sum: jax.Array  # the number of labels that are not ignored


def config_of(config: LossConfig | None, kwargs: dict[str, Any] | None) -> LossConfig:
    """The config with these fields replaced.

    Raises:
        ValueError: `LossConfig` has no such field.
    """
    config = LossConfig() if config is None else config
    names = [field.name for field in dataclasses.fields(config)]
    if unknown := sorted(set(kwargs or {}) - set(names)):
        raise ValueError(f"loss_kwargs has {unknown[0]!r}, which is not a field of LossConfig; use one of {names}")
    return dataclasses.replace(config, **(kwargs or {}))


def cross_entropy(logits: jax.Array, labels: jax.Array, config: LossConfig) -> LossMetrics:
    """The cross entropy of labels.

    Args:
        logits: [..., C].
        labels: integers [...]; those equal to ``config.ignore_index`` are ignored.
        config: ignored labels, smoothing, z-loss and reduction.

    Returns:
        The metrics; zeros if all labels are ignored.

    Raises:
        ValueError: labels are not integers [...].
    """
    if labels.shape != logits.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"labels={labels.dtype} {labels.shape} must be integers {logits.shape[:-1]}, one for each of the logits"
        )
    logits = logits.astype(jnp.float32)
    counts = (labels != config.ignore_index).astype(jnp.float32)
    index = jnp.where(counts > 0, labels, 0)
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
    smoothing = config.label_smoothing
    losses = total - (1 - smoothing) * chosen - smoothing * logits.mean(axis=-1)
    number = counts.sum()
    divisor = jnp.maximum(number, 1) if config.reduction == "mean" else 1.0
    z_loss = config.z_loss * (jnp.square(total) * counts).sum() / divisor
    correct = (jnp.argmax(logits, axis=-1) == index) * counts
    return LossMetrics(
        (losses * counts).sum() / divisor + z_loss, z_loss, correct.sum() / jnp.maximum(number, 1), number
    )


def next_tokens(
    labels: jax.Array,
    attention_mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    config: LossConfig | None = None,
) -> jax.Array:
    """The label of each position of a causal language model.

    Args:
        labels: integers [B, T]: the tokens themselves, or with ``shift_labels=False`` the token after each.
        attention_mask: [B, T], 0 for padding: it neither predicts nor is predicted.
        segment_ids: integers [B, T]: the last token of a document predicts nothing.
        config: whether labels are shifted, and which are ignored; None: the default.

    Returns:
        Integers [B, T]; ``config.ignore_index`` where nothing is predicted.

    Raises:
        ValueError: labels are not [B, T].
    """
    if labels.ndim != 2:
        raise ValueError(f"labels={labels.dtype} {labels.shape} must be integers [B, T], a token each")
    config = LossConfig() if config is None else config
    ignored = config.ignore_index

    def moved(x: jax.Array, last: Any) -> jax.Array:
        return jnp.concatenate([x[:, 1:], jnp.full_like(x[:, :1], last)], axis=1) if config.shift_labels else x

    targets = moved(labels, ignored)
    if attention_mask is not None:
        real = attention_mask.astype(bool)
        targets = jnp.where(real & moved(real, False), targets, ignored)
    if segment_ids is not None:
        targets = jnp.where(segment_ids == moved(segment_ids, -1), targets, ignored)
    return targets
