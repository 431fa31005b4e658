"""Functions of scores split for kernels, which work on one tile of scores.

A mask or a bias is an elementwise function of ``(b, h, q, kv)``. Values that depend on the query alone, the key alone
or the head (segment ids, positions, slopes) are computed once per token, before the kernel: `Elementwise.values`. The
equations that combine queries and keys are evaluated on a tile, by `Elementwise.apply` or by a kernel's translation of
`Elementwise.equations`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from attnops.programs.functions import Bound, Opaque
from attnops.programs.program import (
    IDENTITIES,
    Atom,
    Equation,
    Program,
    bind,
    in_32_bits,
    narrow,
    narrowed,
    needed,
    run,
)
from attnops.programs.varying import equally_varying
from attnops.typing import Function, Index, Leaf

# The first arguments of a function, in this order, followed by its arrays.
ARGUMENTS: Final = ("scores", "b", "h", "q", "kv")
AXES: Final = ARGUMENTS[1:]

# On an index alone, these are cheaper to compute on a tile than a per-token value is to load.
_CHEAP: Final = {"add", "sub", "mul", "neg", "convert_element_type"} | IDENTITIES
# So are these on an index and values per sequence, which are scalars on a tile.
_OF_ROW: Final = _CHEAP.union(
    ["and", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "ne", "not", "or", "rem", "select_n", "sign"]
)


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """A function of ``(scores, b, h, q, kv)`` split in two; static, hashable, equal to functions that compute the same.

    Attributes:
        values: for each value that is computed before the kernel, the axes that it depends on: a subset of `AXES`
            without q or without kv.
        dtypes: the dtypes of the values.
        equations: evaluated on a tile, in order.
        result: the variable or literal of the result.
        primitives: names of the primitives that are evaluated for each score, or that can't be differentiated.
        axes: the subset of `ARGUMENTS` that the result depends on.
    """

    values: tuple[frozenset[str], ...]
    dtypes: tuple[Any, ...]
    equations: tuple[Equation, ...]
    result: Atom
    primitives: frozenset[str]
    axes: frozenset[str]
    _arguments: tuple[int | None, ...]
    _given: tuple[int, ...]
    _value_variables: tuple[int, ...]
    _leaves: tuple[int, ...]
    _before: tuple[Equation, ...]

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.equations, self._before, self.result, self._value_variables, self._leaves))

    def compute(self, leaves: Sequence[Leaf], shape: tuple[int, int, int, int]) -> list[jax.Array]:
        """The values, each [B or 1, H or 1, T or 1, S or 1], for scores of shape [B, H, T, S].

        Differentiable with respect to the leaves; O(T) and O(S) memory.
        """
        sizes = dict(zip(AXES, shape, strict=True))
        return [self._one_value(i, leaves, sizes) for i in range(len(self.values))]

    def _one_value(self, i: int, leaves: Sequence[Leaf], sizes: dict[str, int]) -> jax.Array:
        axes = [axis for axis in AXES if axis in self.values[i]]

        def scalar(*indices: Leaf) -> Leaf:
            at = dict(zip(axes, indices, strict=True))
            names = zip(AXES, self._arguments[1:], strict=True)
            known: dict[int, Leaf] = {variable: at.get(name, 0) for name, variable in names if variable is not None}
            known |= dict(zip(self._leaves, map(jnp.asarray, leaves), strict=True))
            wanted = [self._value_variables[i]]
            return run(needed(self._before, wanted), known, wanted, bind)[0]

        function = scalar
        for k in reversed(range(len(axes))):
            function = jax.vmap(function, in_axes=[0 if j == k else None for j in range(len(axes))])
        value = function(*(jnp.arange(sizes[axis], dtype=jnp.int32) for axis in axes))
        return jnp.asarray(value).reshape([sizes[axis] if axis in axes else 1 for axis in AXES])

    def in_32_bits(self) -> Elementwise:
        """The same, with 32-bit numbers on a tile; numbers computed before the kernel keep their width."""
        return dataclasses.replace(
            self, dtypes=tuple(map(narrow, self.dtypes)),
            equations=tuple(map(in_32_bits, self.equations)), result=narrowed(self.result),
        )  # fmt: skip

    # The arguments of a function of scores, and those that a kernel gives in place of its arrays.
    def apply(
        self,
        scores: jax.Array | None,
        b: Index,
        h: Index,
        q: Index,
        kv: Index,
        values: Sequence[Leaf] = (),
        given: Sequence[Leaf] = (),
        instead: Mapping[str, Function] = MappingProxyType({}),
    ) -> jax.Array:
        """The function on a tile.

        Args:
            scores: float32; None for a mask.
            b: index in the batch, a scalar.
            h: index of the head, a scalar.
            q: indices of queries, integers that broadcast to a tile.
            kv: indices of keys, integers that broadcast to a tile.
            values: the tile's elements of the results of `compute`, which broadcast to a tile.
            given: the tiles of a mask's arrays of T × S elements, ``dense`` of `attnops.kernels.of_mask`.
            instead: functions that replace primitives, by the primitive's name; their arguments are its inputs.
        """

        def of_tile(equation: Equation, inputs: list[Leaf]) -> Leaf:
            primitive = equation.primitive
            if primitive.name in IDENTITIES:
                return inputs if primitive.multiple_results else inputs[0]
            shape = np.broadcast_shapes(*map(jnp.shape, inputs))
            inputs = equally_varying([jnp.broadcast_to(x, shape) for x in inputs])
            if equation.rule is not None:
                return equation.rule.on_tiles(inputs, of_tile)
            other = instead.get(primitive.name)
            return primitive.bind(*inputs, **equation.params) if other is None else other(*inputs)

        arguments = zip(self._arguments, (scores, b, h, q, kv), strict=True)
        known = {variable: x for variable, x in arguments if variable is not None}
        known |= dict(zip(self._value_variables, values, strict=True))
        known |= dict(zip(self._given, given, strict=True))
        return run(self.equations, known, [self.result], of_tile)[0]


def primitives_of(function: Bound | Opaque, arguments: Sequence[str]) -> frozenset[str]:
    """The names of the primitives that a caller's traced function evaluates for each score.

    Args:
        function: a mask's or a bias's, from `attnops.masks.functions.functions` or `attnops.biases.function_of`.
        arguments: its first arguments, `AXES` or `ARGUMENTS`.
    """
    if isinstance(function, Opaque) and function.program is None:
        # It may still work on arrays of all scores; only kernels call it with scalars.
        return frozenset([f"a function that fails on scalars ({function.error})"])
    assert function.program is not None
    return split_program(function.program, arguments, None).primitives


def split_program(
    program: Program, names: Sequence[str], leaves: Sequence[Leaf] | None, n_given: int = 0, by_row: bool = False
) -> Elementwise:
    """A program of scalars split into values per token and equations per score.

    Args:
        program: its inputs are ``names``, leaves, and ``n_given`` scalars of arrays of T × S elements.
        names: the names of its first arguments, some of `ARGUMENTS` in their order.
        leaves: shape and dtype of each leaf and constant; None where only primitives are asked for.
        n_given: the number of scalars of arrays of T × S elements, the program's last inputs.
        by_row: whether integers per key that depend only on values per sequence are computed on a tile.
    """
    (result,) = program.results
    n = len(names)
    at = dict(zip(names, program.inputs[:n], strict=True))
    arguments = tuple(at.get(name) for name in ARGUMENTS)
    stop = len(program.inputs) - n_given
    leaf_variables, given_variables = (*program.inputs[n:stop], *program.constants), program.inputs[stop:]
    depends: dict[int, frozenset[str]] = {variable: frozenset([name]) for name, variable in at.items()}
    depends |= dict.fromkeys(leaf_variables, frozenset())
    depends |= dict.fromkeys(given_variables, frozenset(AXES))
    cheap = set(at.values())
    constants: set[int] = set()  # variables that depend on literals alone
    inner, before = [], []
    for equation in needed(program.equations, [result]):
        variables = [x for x in equation.inputs if isinstance(x, int)]
        axes = frozenset().union(*(depends[x] for x in variables))
        depends |= dict.fromkeys(equation.outputs, axes)
        if _mixes(axes):
            inner.append(equation)
            continue
        before.append(equation)
        if by_row and _is_of_row(equation, axes, [depends[x] for x in variables if x not in cheap]):
            cheap.update(equation.outputs)
        if constants.issuperset(variables) and equation.is_scalar:
            constants.update(equation.outputs)
            cheap.update(equation.outputs)
        if equation.primitive.name in _CHEAP and equation.is_scalar and cheap.issuperset(variables):
            cheap.update(equation.outputs)
    wanted = {x for x in (result, *(x for equation in inner for x in equation.inputs)) if isinstance(x, int)}
    on_tile = needed([equation for equation in before if set(equation.outputs) <= cheap], wanted & cheap)
    counted = [*on_tile, *inner, *(equation for equation in before if equation.is_closed)]
    wanted |= {x for equation in on_tile for x in equation.inputs if isinstance(x, int)}
    values = sorted(x for x in wanted if x not in cheap and not _mixes(depends[x]))
    dtypes: dict[int, Any] = dict.fromkeys(leaf_variables)
    if leaves is not None:
        dtypes |= dict(zip(leaf_variables, (leaf.dtype for leaf in leaves), strict=True))
    dtypes |= {x: dtype for equation in before for x, dtype in zip(equation.outputs, equation.dtypes, strict=True)}
    return Elementwise(
        values=tuple(depends[x] for x in values),
        dtypes=tuple(dtypes[x] for x in values),
        equations=(*on_tile, *inner),
        result=result,
        primitives=frozenset().union(*(equation.names for equation in counted)) - IDENTITIES,
        axes=depends[result] if isinstance(result, int) else frozenset(),
        _arguments=arguments,
        _given=given_variables,
        _value_variables=tuple(values),
        _leaves=leaf_variables,
        _before=tuple(before),
    )


def _is_of_row(equation: Equation, axes: frozenset[str], given: Sequence[frozenset[str]]) -> bool:
    """Whether an equation computes integers per key from cheap values and values per sequence, of axes ``given``."""
    is_integer = all(jnp.issubdtype(x, jnp.integer) or x == jnp.bool_ for x in equation.dtypes)
    is_cheap = equation.primitive.name in _OF_ROW and equation.is_scalar and is_integer
    return is_cheap and "kv" in axes <= {"b", "kv"} and all(x <= {"b"} for x in given)


def _mixes(axes: frozenset[str]) -> bool:
    return "scores" in axes or {"q", "kv"} <= axes
