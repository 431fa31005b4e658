"""Masks and biases taken apart for kernels, which work on one tile of scores.

A mask or a bias is a function of ``(b, h, q, kv)``, elementwise. Whatever it looks up by query alone, by key alone or
by head (segment ids, positions, slopes) is computed before the kernel, once a token, as `Elementwise.values` says. What
is left mixes queries with keys, and is evaluated on a tile, by `Elementwise.apply` or by a kernel's own translation
of `Elementwise.steps`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.biases import Bias
from attnops.kernels.steps import (
    CALLS,
    IDENTITIES,
    WITH_DERIVATIVES,
    Constant,
    Literal,
    Step,
    bind,
    constant,
    inline,
    needed,
    run,
)
from attnops.kernels.varying import equally_varying
from attnops.masks.base import Mask
from attnops.masks.tokens import Dense

# What a function is called with, in this order, before its arrays.
ARGUMENTS: Final = ("scores", "b", "h", "q", "kv")
AXES: Final = ARGUMENTS[1:]

# Of an index alone, these cost less on the spot than a value a token that must be fetched.
_CHEAP: Final = {"add", "sub", "mul", "neg", "convert_element_type"} | IDENTITIES


@dataclasses.dataclass(frozen=True, eq=False)
class Elementwise:
    """A function of ``(scores, b, h, q, kv)`` in two parts; hashed by identity, and equal functions share one.

    Attributes:
        values: of each value that is computed beforehand, the axes that it depends on: a subset of `AXES` that has not
            both q and kv.
        steps: what is evaluated on a tile, in order.
        result: the variable, or literal, that is the result.
        primitives: the names of the primitives that are evaluated for each score, and of what can't be differentiated.
        axes: what the result depends on, of `ARGUMENTS`.
    """

    values: tuple[frozenset[str], ...]
    dtypes: tuple[Any, ...]
    steps: tuple[Step, ...]
    result: int | Literal
    primitives: frozenset[str]
    axes: frozenset[str]
    _arguments: tuple[int, ...]
    _given: tuple[int, ...]
    _value_variables: tuple[int, ...]
    _leaves: tuple[int, ...]
    _before: tuple[Step, ...]

    def compute(self, leaves: Sequence[Any], shape: tuple[int, int, int, int]) -> list[jax.Array]:
        """The values, each [B or 1, H or 1, T or 1, S or 1], for scores of shape [B, H, T, S].

        Differentiable with respect to the leaves; O(T) and O(S) memory.
        """
        sizes = dict(zip(AXES, shape, strict=True))
        return [self._one_value(i, leaves, sizes) for i in range(len(self.values))]

    def _one_value(self, i: int, leaves: Sequence[Any], sizes: dict[str, int]) -> jax.Array:
        axes = [axis for axis in AXES if axis in self.values[i]]

        def scalar(*indices: Any) -> Any:
            at = dict(zip(axes, indices, strict=True))
            known = {variable: at.get(name, 0) for name, variable in zip(AXES, self._arguments[1:], strict=True)}
            known |= dict(zip(self._leaves, map(jnp.asarray, leaves), strict=True))
            wanted = [self._value_variables[i]]
            return run(needed(self._before, wanted), known, wanted, bind)[0]

        function = scalar
        for k in reversed(range(len(axes))):
            function = jax.vmap(function, in_axes=[0 if j == k else None for j in range(len(axes))])
        found = function(*(jnp.arange(sizes[axis], dtype=jnp.int32) for axis in axes))
        return jnp.asarray(found).reshape([sizes[axis] if axis in axes else 1 for axis in AXES])

    def apply(
        self,
        scores: Any,
        b: Any,
        h: Any,
        q: Any,
        kv: Any,
        values: Sequence[Any] = (),
        given: Sequence[Any] = (),
        instead: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> Any:
        """The function on a tile.

        Args:
            scores: float32; None for a mask.
            b: a number.
            h: a number.
            q: integers that broadcast to a tile.
            kv: likewise.
            values: what of `compute` belongs to the tile, likewise.
            given: the tiles of the arrays of T × S elements, see `of_mask`.
            instead: by the name of a primitive, what a kernel language has in its place; given the inputs alone.
        """

        def of_tile(step: Step, inputs: list[Any]) -> Any:
            if step.primitive.name in IDENTITIES:
                return inputs if step.primitive.multiple_results else inputs[0]
            shape = np.broadcast_shapes(*map(jnp.shape, inputs))
            inputs = equally_varying([jnp.broadcast_to(x, shape) for x in inputs])
            if step.rule is not None:
                return step.rule.on_tiles(inputs, of_tile)
            other = instead.get(step.primitive.name)
            return step.primitive.bind(*inputs, **step.params) if other is None else other(*inputs)

        known = dict(zip(self._arguments, (scores, b, h, q, kv), strict=True))
        known |= dict(zip(self._value_variables, values, strict=True))
        known |= dict(zip(self._given, given, strict=True))
        return run(self.steps, known, [self.result], of_tile)[0]


def of_mask(mask: Mask) -> tuple[Elementwise, list[Any], list[Any]]:
    """A bound mask, the leaves that `Elementwise.compute` takes, and its arrays of T × S elements.

    Of those, [B or 1, H or 1, T, S] booleans, `Elementwise.apply` takes the tiles.
    """
    leaves, tree = jax.tree.flatten(mask, is_leaf=_is_tiled)
    tiled = [isinstance(leaf, Dense) for leaf in leaves]
    plain = [leaf for leaf, is_tiled in zip(leaves, tiled, strict=True) if not is_tiled]
    arrays = [leaf.array for leaf, is_tiled in zip(leaves, tiled, strict=True) if is_tiled]
    return _split_mask(tree, tuple(tiled), _avals(plain)), plain, arrays


def of_bias(bias: Bias) -> tuple[Elementwise, list[Any]]:
    """A bound bias, and the leaves that `Elementwise.compute` takes."""
    leaves, tree = jax.tree.flatten(bias)
    return _split_bias(tree, _avals(leaves)), leaves


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Given(Mask):
    """What stands in for a dense array: its value at one score."""

    seen: Any

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.seen

    def tiles(self, grid: Any) -> Any:
        raise NotImplementedError

    def __repr__(self) -> str:
        return "Dense"


def _is_tiled(leaf: Any) -> bool:
    return isinstance(leaf, Dense) and min(leaf.array.shape[2:]) > 1


@functools.lru_cache(maxsize=512)
def _split_mask(tree: Any, tiled: tuple[bool, ...], avals: tuple[Any, ...]) -> Elementwise:
    def function(b: Any, h: Any, q: Any, kv: Any, leaves: Any, given: Any) -> Any:
        leaves, given = iter(leaves), iter(given)
        parts = [_Given(next(given)) if is_tiled else next(leaves) for is_tiled in tiled]
        return jax.tree.unflatten(tree, parts).allowed(b, h, q, kv)

    return _split(lambda scores, *rest: function(*rest), avals, sum(tiled), CALLS | WITH_DERIVATIVES)


@functools.lru_cache(maxsize=512)
def _split_bias(tree: Any, avals: tuple[Any, ...]) -> Elementwise:
    return _split(
        lambda scores, b, h, q, kv, leaves, given: jax.tree.unflatten(tree, leaves).apply(scores, b, h, q, kv),
        avals,
        0,
        CALLS,
    )


def _avals(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _split(function: Callable[..., Any], avals: tuple[Any, ...], n_given: int, calls: frozenset[str]) -> Elementwise:
    index, score = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in avals]
    given = [jax.ShapeDtypeStruct((), jnp.bool_)] * n_given
    closed = jax.make_jaxpr(function)(score, index, index, index, index, leaves, given)
    numbers = itertools.count()
    inputs = [next(numbers) for _ in closed.jaxpr.invars]
    constants = {next(numbers): value for value in closed.consts}
    steps: list[Step] = []
    (result,) = inline(closed.jaxpr, [*constants], inputs, numbers, steps, calls)

    arguments, rest = inputs[: len(ARGUMENTS)], inputs[len(ARGUMENTS) :]
    leaf_variables, given_variables = rest[: len(leaves)], rest[len(leaves) :]
    depends: dict[int, frozenset[str]] = {v: frozenset([name]) for v, name in zip(arguments, ARGUMENTS, strict=True)}
    depends |= dict.fromkeys([*leaf_variables, *constants], frozenset())
    depends |= dict.fromkeys(given_variables, frozenset(AXES))
    cheap = set(arguments)
    known: set[int] = set()  # what depends on numbers alone
    inner, before = [], []
    for step in needed(steps, [result]):
        variables = [x for x in step.inputs if isinstance(x, int)]
        found = frozenset().union(*(depends[x] for x in variables))
        depends |= dict.fromkeys(step.outputs, found)
        if _mixes(found):
            inner.append(step)
            continue
        before.append(step)
        if known.issuperset(variables) and not any(step.shapes) and not isinstance(step.primitive, Constant):
            known.update(step.outputs)
            cheap.update(step.outputs)
        if step.primitive.name in _CHEAP and not any(step.shapes) and cheap.issuperset(variables):
            cheap.update(step.outputs)
    wanted = {x for x in (result, *(x for step in inner for x in step.inputs)) if isinstance(x, int)}
    on_the_spot = needed([step for step in before if set(step.outputs) <= cheap], wanted & cheap)
    counted = [*on_the_spot, *inner, *(step for step in before if step.is_closed)]
    values = sorted(x for x in wanted if x not in cheap and not _mixes(depends[x]))
    before = [constant(c, value) for c, value in constants.items()] + before
    dtypes = dict(zip(leaf_variables, (leaf.dtype for leaf in leaves), strict=True))
    dtypes |= {x: dtype for step in before for x, dtype in zip(step.outputs, step.dtypes, strict=True)}
    return Elementwise(
        values=tuple(depends[x] for x in values),
        dtypes=tuple(dtypes[x] for x in values),
        steps=(*on_the_spot, *inner),
        result=result,
        primitives=frozenset().union(*(step.names for step in counted)) - IDENTITIES,
        axes=depends[result] if isinstance(result, int) else frozenset(),
        _arguments=tuple(arguments),
        _given=tuple(given_variables),
        _value_variables=tuple(values),
        _leaves=tuple(leaf_variables),
        _before=tuple(before),
    )


def _mixes(axes: frozenset[str]) -> bool:
    return "scores" in axes or {"q", "kv"} <= axes
