"""`jax.vmap` of kernels: a mapped axis becomes part of the batch."""

from __future__ import annotations

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from attnops.typing import BackendPlan, Function, Leaf, PyTree


class Foldable(abc.ABC):
    """A pytree of arrays with its own rule for adding a mapped axis to its batch, such as a tile schedule."""

    @abc.abstractmethod
    def fold(self, batched: PyTree, n: int, B: int) -> PyTree:
        """This object for a batch of ``n · B``, slices outermost.

        Args:
            batched: an object of this class with a bool for each array: whether its first axis is the mapped axis.
            n: size of the mapped axis.
            B: batch of each slice.
        """

    def most(self, batched: PyTree, n: int, B: int) -> int:
        """How many of ``n`` slices `fold` accepts at a time; at least 1. It has the arguments of `fold`."""
        return n


def folds_batch(kernel: Function) -> Function:
    """``kernel(plan, *arguments)``, which `jax.vmap` maps as one call of a larger batch, or as a loop of such calls if
    `Foldable.most` allows fewer slices. ``plan``, a dataclass with the batch ``B``, is static.

    The arguments are pytrees of `Foldable` objects and of arrays whose first axis is the batch, or 1 if all batches
    share one element. The results are pytrees whose first axis is always the batch.
    """

    def mapped(called: Function, plan: BackendPlan, n: int, in_batched: PyTree, arguments: PyTree) -> PyTree:
        tree: PyTree
        leaves, tree = jax.tree.flatten(arguments, is_leaf=lambda x: isinstance(x, Foldable))
        batched = tree.flatten_up_to(tuple(in_batched))
        foldable = [(x, b) for x, b in zip(leaves, batched, strict=True) if isinstance(x, Foldable)]
        most = min((x.most(b, n, plan.B) for x, b in foldable), default=n)
        if most < n:
            size = next(size for size in range(most, 0, -1) if n % size == 0)
            return _in_loop(functools.partial(mapped, called, plan, size, in_batched), n // size, in_batched, arguments)
        larger = dataclasses.replace(plan, B=n * plan.B)
        folded = [_fold(x, b, n, plan.B) for x, b in zip(leaves, batched, strict=True)]
        results = called(larger, *jax.tree.unflatten(tree, folded))
        return jax.tree.map(lambda x: x.reshape(n, plan.B, *x.shape[1:]), results)

    return _with_rule(kernel, mapped)


def one_by_one(kernel: Function) -> Function:
    """``kernel(plan, *arguments)``, which `jax.vmap` maps as a loop, for results that all batches share."""

    def mapped(called: Function, plan: BackendPlan, n: int, in_batched: PyTree, arguments: PyTree) -> PyTree:
        def one(arguments: PyTree) -> PyTree:
            leaves, tree = jax.tree.flatten(arguments)
            each = [x[0] if b else x for x, b in zip(leaves, jax.tree.leaves(in_batched), strict=True)]
            return jax.tree.map(lambda x: x[None], called(plan, *jax.tree.unflatten(tree, each)))

        return _in_loop(one, n, in_batched, arguments)

    return _with_rule(kernel, mapped)


def _with_rule(kernel: Function, mapped: Function) -> Function:
    """``kernel``, with the vmap rule ``mapped(kernel, plan, axis_size, in_batched, arguments)``."""

    def called(plan: BackendPlan, *arguments: PyTree) -> PyTree:
        @custom_vmap
        def run(*arguments: PyTree) -> PyTree:
            return kernel(plan, *arguments)

        @run.def_vmap
        def _(axis_size: int, in_batched: PyTree, *arguments: PyTree) -> PyTree:
            results = mapped(called, plan, axis_size, in_batched, arguments)
            return results, jax.tree.map(lambda _: True, results)

        return run(*arguments)

    return called


def _in_loop(function: Function, steps: int, in_batched: PyTree, arguments: PyTree) -> PyTree:
    """``function(arguments)`` in a loop, each time for an equal number of slices of the mapped axis, in order."""
    leaves, tree = jax.tree.flatten(arguments)
    batched = jax.tree.leaves(in_batched)

    def body(slices: list[PyTree]) -> PyTree:
        mapped = iter(slices)
        return function(
            jax.tree.unflatten(tree, [next(mapped) if b else x for x, b in zip(leaves, batched, strict=True)])
        )

    parts = [x.reshape(steps, -1, *x.shape[1:]) for x, b in zip(leaves, batched, strict=True) if b]
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(body, parts))


def _fold(x: Leaf, batched: PyTree, n: int, B: int) -> PyTree:
    if isinstance(x, Foldable):
        return x.fold(batched, n, B)
    if not batched:
        # All slices share it.
        return x if x.shape[0] == 1 else jnp.tile(x, (n, *[1] * (x.ndim - 1)))
    x = jnp.broadcast_to(x, (n, B, *x.shape[2:]))
    return x.reshape(n * B, *x.shape[2:])
