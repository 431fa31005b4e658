"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) with a clipped gradient, a warm-up and a cosine decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .model import Params


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """The hyperparameters of AdamW. Hashable: it is static under `jit`."""

    steps: int  # updates in the whole training; at the last one the rate is a tenth of its peak
    rate: float = 3e-3  # the learning rate at its peak
    warmup: int = 30  # steps to the peak
    decay: float = 0.1  # of the weights, towards 0; a norm's scale is stored minus 1
    clip: float = 1.0  # the largest norm of the gradient; larger gradients are scaled to it
    momentum: float = 0.9  # β₁
    memory: float = 0.95  # β₂
    epsilon: float = 1e-8  # added to the root of the squares


class State(NamedTuple):
    """The state of AdamW."""

    step: jax.Array  # int32, updates made
    means: Params  # moving averages of the gradients
    squares: Params  # moving averages of the gradients' squares


def start(params: Params) -> State:
    """The state before the first update."""
    # Two separate trees of zeros: a donated step may overwrite both.
    return State(jnp.int32(0), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))


def update(optimizer: AdamW, params: Params, gradients: Params, state: State) -> tuple[Params, State]:
    """The weights and the state after one update."""
    o, step = optimizer, state.step + 1
    norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, o.clip / norm), gradients)
    means = jax.tree.map(lambda m, g: o.momentum * m + (1 - o.momentum) * g, state.means, gradients)
    squares = jax.tree.map(lambda s, g: o.memory * s + (1 - o.memory) * g * g, state.squares, gradients)
    rate = learning_rate(o, step)

    def move(weights: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        mean, square = mean / (1 - o.momentum**step), square / (1 - o.memory**step)
        return weights - rate * (mean / (jnp.sqrt(square) + o.epsilon) + o.decay * weights)

    return jax.tree.map(move, params, means, squares), State(step, means, squares)


def learning_rate(optimizer: AdamW, step: jax.Array) -> jax.Array:
    """The learning rate at a step, counted from 1: linear to the peak, then a cosine down to a tenth of it."""
    o = optimizer
    done = jnp.clip((step - o.warmup) / max(1, o.steps - o.warmup), 0, 1)
    return o.rate * jnp.minimum(step / o.warmup, 0.55 + 0.45 * jnp.cos(jnp.pi * done))
