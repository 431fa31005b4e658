"""Training with one attention: the loss at every step, and the time of a step."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from . import adamw
from .attention import Attention
from .model import Config, Params, init, loss
from .packing import PackedRows


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The hyperparameters of a training run. Hashable: it is static under `jit`."""

    steps: int = 300
    batch: int = 8  # rows per step
    length: int = 256  # tokens per row
    seed: int = 0  # of the first weights and of the rows' order
    model: Config = field(default_factory=Config)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The results of a training run."""

    losses: npt.NDArray[np.float32]  # [steps] nats per byte, each before its update
    params: Params  # after the last update
    first_seconds: float  # of the first step, including tracing and compiling if the program is new
    step_seconds: float  # median of the other steps; NaN if there are none


def train(
    plan: TrainingPlan, rows: PackedRows, attention: Attention, *, on_step: Callable[[float], Any] = lambda loss: None
) -> Run:
    """Train from the plan's first weights, and call ``on_step`` with each loss.

    ``attention`` is hashable; its exceptions are not caught.
    """
    params = init(plan.model, plan.seed)
    state = adamw.start(params)
    rows = rows.shuffled(plan.seed)
    losses = np.full(plan.steps, np.nan, np.float32)
    seconds = []
    for i in range(plan.steps):
        begun = time.perf_counter()
        params, state, value = _step(plan, attention, params, state, rows.batch(i, plan.batch))
        losses[i] = value  # waits for the step
        seconds.append(time.perf_counter() - begun)
        on_step(float(losses[i]))
    return Run(
        losses=losses,
        params=params,
        first_seconds=seconds[0],
        step_seconds=statistics.median(seconds[1:]) if plan.steps > 1 else math.nan,
    )


@functools.partial(jax.jit, static_argnames=("plan", "attention"), donate_argnames=("params", "state"))
def _step(
    plan: TrainingPlan, attention: Attention, params: Params, state: adamw.State, batch: PackedRows
) -> tuple[Params, adamw.State, jax.Array]:
    """The weights and the state after an update, and the loss before it."""
    value, gradients = jax.value_and_grad(loss)(params, plan.model, batch, attention)
    return *adamw.update(adamw.AdamW(steps=plan.steps), params, gradients, state), value
