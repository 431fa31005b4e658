"""`jax.vmap` of kernels: a mapped axis becomes part of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from attnops_triton.plan import Plan
from attnops_triton.visits import Visits


def folds_batch(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel(plan, *arguments)``, mapped as one call of a larger batch.

    The arguments are pytrees of arrays whose first axis is the batch, or 1 where all batches share one, and of
    `Visits`. So are the results, none of which is shared.
    """

    def called(plan: Plan, *arguments: Any) -> Any:
        @custom_vmap
        def run(*arguments: Any) -> Any:
            return kernel(plan, *arguments)

        @run.def_vmap
        def _(axis_size: int, in_batched: Any, *arguments: Any) -> Any:
            larger = dataclasses.replace(plan, B=axis_size * plan.B)
            tree: Any
            leaves, tree = jax.tree.flatten(arguments, is_leaf=_is_visits)
            batched = tree.flatten_up_to(tuple(in_batched))
            folded = [_fold(x, b, axis_size, plan.B) for x, b in zip(leaves, batched, strict=True)]
            found = called(larger, *jax.tree.unflatten(tree, folded))
            found = jax.tree.map(lambda x: x.reshape(axis_size, plan.B, *x.shape[1:]), found)
            return found, jax.tree.map(lambda _: True, found)

        return run(*arguments)

    return called


def one_by_one(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel(plan, *arguments)``, mapped as a loop, for results that batches share."""

    def called(plan: Plan, *arguments: Any) -> Any:
        @custom_vmap
        def run(*arguments: Any) -> Any:
            return kernel(plan, *arguments)

        @run.def_vmap
        def _(axis_size: int, in_batched: Any, *arguments: Any) -> Any:
            leaves, tree = jax.tree.flatten(arguments)
            batched = jax.tree.leaves(in_batched)
            mapped = [x for x, b in zip(leaves, batched, strict=True) if b]

            def body(some: list[Any]) -> Any:
                rest = iter(some)
                each = [next(rest) if b else x for x, b in zip(leaves, batched, strict=True)]
                return called(plan, *jax.tree.unflatten(tree, each))

            found = jax.lax.map(body, mapped)
            return found, jax.tree.map(lambda _: True, found)

        return run(*arguments)

    return called


def _is_visits(x: Any) -> bool:
    return isinstance(x, Visits)


def _fold(x: Any, batched: Any, n: int, B: int) -> Any:
    if _is_visits(x):
        return _fold_visits(x, batched, n, B)
    if not batched:
        # What one batch has, all have.
        return x if x.shape[0] == 1 else jnp.tile(x, (n, *[1] * (x.ndim - 1)))
    x = jnp.broadcast_to(x, (n, B, *x.shape[2:]))
    return x.reshape(n * B, *x.shape[2:])


def _fold_visits(visits: Visits, batched: Visits, n: int, B: int) -> Visits:
    if visits.constant is not None:
        return visits
    if visits.maps[0] == 1 and not batched.ranges and not batched.columns:
        return visits

    def fold(x: Any, is_batched: Any) -> Any:
        if x is None:
            return None
        x = x.reshape(*([n] if is_batched else []), visits.maps[0], -1)
        return jnp.broadcast_to(x if is_batched else x[None], (n, B, x.shape[-1])).reshape(-1)

    return dataclasses.replace(
        visits,
        ranges=fold(visits.ranges, batched.ranges),
        columns=fold(visits.columns, batched.columns),
        maps=(n * B, visits.maps[1]),
    )
