"""`jax.vmap` of kernels: a mapped axis becomes part of the batch."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


class Foldable(abc.ABC):
    """A pytree of arrays that knows by itself how a mapped axis joins its batch, such as a list of tiles to visit."""

    @abc.abstractmethod
    def fold(self, batched: Any, n: int, B: int) -> Any:
        """The same for a batch of ``n · B``, slices first.

        Args:
            batched: of this class, saying of each array whether its first axis is the mapped one.
            n: slices.
            B: the batch of each.
        """


class HasBatch(Protocol):
    """A plan, a dataclass, that says how large the batch is."""

    @property
    def B(self) -> int: ...


Plan = TypeVar("Plan", bound=HasBatch)


def folds_batch(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel(plan, *arguments)``, mapped by `jax.vmap` as one call of a larger batch; ``plan`` is static.

    The arguments are pytrees of arrays whose first axis is the batch, or 1 where all batches share one, and of
    `Foldable` things. So are the results, none of which is shared.
    """

    def mapped(called: Callable[..., Any], plan: Plan, n: int, in_batched: Any, arguments: Any) -> Any:
        larger = dataclasses.replace(plan, B=n * plan.B)  # type: ignore[type-var]
        tree: Any
        leaves, tree = jax.tree.flatten(arguments, is_leaf=lambda x: isinstance(x, Foldable))
        batched = tree.flatten_up_to(tuple(in_batched))
        folded = [_fold(x, b, n, plan.B) for x, b in zip(leaves, batched, strict=True)]
        found = called(larger, *jax.tree.unflatten(tree, folded))
        return jax.tree.map(lambda x: x.reshape(n, plan.B, *x.shape[1:]), found)

    return _with_rule(kernel, mapped)


def one_by_one(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel(plan, *arguments)``, mapped as a loop, for results that batches share."""

    def mapped(called: Callable[..., Any], plan: Plan, n: int, in_batched: Any, arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        batched = jax.tree.leaves(in_batched)

        def body(some: list[Any]) -> Any:
            rest = iter(some)
            each = [next(rest) if b else x for x, b in zip(leaves, batched, strict=True)]
            return called(plan, *jax.tree.unflatten(tree, each))

        return jax.lax.map(body, [x for x, b in zip(leaves, batched, strict=True) if b])

    return _with_rule(kernel, mapped)


def _with_rule(kernel: Callable[..., Any], mapped: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` whose mapped calls are ``mapped(itself, plan, slices, which are mapped, arguments)``."""

    def called(plan: Any, *arguments: Any) -> Any:
        @custom_vmap
        def run(*arguments: Any) -> Any:
            return kernel(plan, *arguments)

        @run.def_vmap
        def _(axis_size: int, in_batched: Any, *arguments: Any) -> Any:
            found = mapped(called, plan, axis_size, in_batched, arguments)
            return found, jax.tree.map(lambda _: True, found)

        return run(*arguments)

    return called


def _fold(x: Any, batched: Any, n: int, B: int) -> Any:
    if isinstance(x, Foldable):
        return x.fold(batched, n, B)
    if not batched:
        # What one batch has, all have.
        return x if x.shape[0] == 1 else jnp.tile(x, (n, *[1] * (x.ndim - 1)))
    x = jnp.broadcast_to(x, (n, B, *x.shape[2:]))
    return x.reshape(n * B, *x.shape[2:])
