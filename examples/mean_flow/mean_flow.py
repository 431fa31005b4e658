"""MeanFlow's training step (Geng et al. 2025, arXiv:2505.13447): a `jax.jvp` through attention, inside a `jax.grad`.

A model ``u(z, r, t)`` learns the mean velocity of a flow between times r and t, so that one step draws a sample. Its
target contains its own derivative along the flow, which flash attention computes in O(T) memory. A sample here is a set
of points on a circle around 0 of a random radius: each point must agree with the others, by attention.

Run ``python -m examples.mean_flow.mean_flow`` (``--operation vanilla``, ``--steps N``).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import attnops

T, WIDTH, HEADS, LAYERS = 64, 64, 4, 2  # points of a sample; the model
BATCH, RATE = 32, 2e-3

Params = dict[str, Any]


def samples(key: jax.Array) -> jax.Array:
    """[BATCH, T, 2]: points on circles."""
    angle, radius = jax.random.split(key)
    angles = jax.random.uniform(angle, (BATCH, T, 1), maxval=2 * jnp.pi)
    radii = jax.random.uniform(radius, (BATCH, 1, 1), minval=0.3, maxval=1.0)
    return radii * jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=2)


def init(key: jax.Array) -> Params:
    """The model's parameters."""

    def dense(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) * shape[0] ** -0.5

    def layer(key: jax.Array) -> Params:
        qkv, out, up, down = jax.random.split(key, 4)
        sizes = {"qkv": (qkv, WIDTH, 3 * WIDTH), "out": (out, WIDTH, WIDTH)}
        sizes |= {"up": (up, WIDTH, 4 * WIDTH), "down": (down, 4 * WIDTH, WIDTH)}
        return {name: dense(key, *shape) for name, (key, *shape) in sizes.items()}

    first, last, *layers = jax.random.split(key, 2 + LAYERS)
    ends = {"embed": dense(first, 2 + 16, WIDTH), "velocity": dense(last, WIDTH, 2) * 0.1}
    return ends | {"layers": [layer(key) for key in layers]}


def velocity(attention: Any, params: Params, z: jax.Array, r: jax.Array, t: jax.Array) -> jax.Array:
    """The mean velocity [B, T, 2] of points ``z`` [B, T, 2] between times ``r`` and ``t``, [B] each."""

    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)

    waves = jnp.stack([t - r, t], axis=1)[:, :, None] * 2.0 ** jnp.arange(4)
    times = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=2).reshape(len(z), 1, 16)
    x = jnp.concatenate([z, jnp.broadcast_to(times, (*z.shape[:2], 16))], axis=2) @ params["embed"]
    for layer in params["layers"]:
        q, k, v = jnp.split((norm(x) @ layer["qkv"]).reshape(*x.shape[:2], 3 * HEADS, WIDTH // HEADS), 3, axis=2)
        x = x + attention(q, k, v).attention_outputs.reshape(x.shape) @ layer["out"]
        x = x + jax.nn.silu(norm(x) @ layer["up"]) @ layer["down"]
    return norm(x) @ params["velocity"]


def loss(attention: Any, params: Params, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """MeanFlow's loss of one batch, and the mean squared error that it is made of."""
    of_data, of_noise, of_times = jax.random.split(key, 3)
    data, noise = samples(of_data), jax.random.normal(of_noise, (BATCH, T, 2))
    r, t = jnp.sort(jax.random.uniform(of_times, (2, BATCH)), axis=0)
    r = jnp.where(jnp.arange(BATCH) % 2 == 0, r, t)  # r = t, the velocity itself, for half of the samples
    of_points = (slice(None), None, None)
    z, v = (1 - t[of_points]) * data + t[of_points] * noise, noise - data
    model = functools.partial(velocity, attention, params)
    # The derivative along the flow: dz/dt = v, dr/dt = 0, dt/dt = 1.
    u, dudt = jax.jvp(model, (z, r, t), (v, jnp.zeros_like(r), jnp.ones_like(t)))
    target = jax.lax.stop_gradient(v - (t - r)[of_points] * dudt)
    error = ((u - target) ** 2).mean(axis=(1, 2))
    return (
        error / jax.lax.stop_gradient(error + 1e-2)
    ).mean(), error.mean()  # large errors weigh less, as in the paper


def trainer(operation: str) -> Callable[[Params, Params, Params, int], tuple[Params, Params, Params, jax.Array]]:
    """A compiled step of Adam (Kingma and Ba 2014, arXiv:1412.6980): its arguments and first results are the parameters
    and the averages of gradients and of their squares.
    """
    attention = attnops.OperationRegistry.create(operation)
    of_params = jax.value_and_grad(functools.partial(loss, attention), has_aux=True)

    @jax.jit
    def step(params: Params, means: Params, squares: Params, i: int) -> tuple[Params, Params, Params, jax.Array]:
        (_, error), gradients = of_params(params, jax.random.fold_in(jax.random.key(1), i))
        means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, gradients)
        squares = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, squares, gradients)
        rate = RATE * jnp.sqrt(1 - 0.95 ** (i + 1.0)) / (1 - 0.9 ** (i + 1.0))
        params = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), params, means, squares)
        return params, means, squares, error

    return step


def start() -> tuple[Params, Params, Params]:
    """The first arguments of a trainer's step."""
    params = init(jax.random.key(0))
    return params, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operation", default="flash")
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    step, state = trainer(given.operation), start()
    for i in range(given.steps):
        *state, error = step(*state, i)
        if i % 100 == 0 or i == given.steps - 1:
            print(f"step {i}: error {error:.4f}")


if __name__ == "__main__":
    main()
