"""Masks computed by a function."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Final, Self

import jax
import jax.numpy as jnp
import numpy as np

from attnops.masks.at import at
from attnops.masks.base import Mask
from attnops.masks.coverage import CoverageBounds, Grid
from attnops.programs.functions import INDEX, Bound, Opaque, as_data, bind_function, name_of
from attnops.programs.program import Program
from attnops.programs.tracing import CALLS, WITH_DERIVATIVES
from attnops.typing import Array, BoolArray, Function, Index, Leaf, PyTree

# The arguments of a mask's function that precede ``args``: b, h, q, kv.
_ARGUMENTS: Final = (INDEX,) * 4


class _Function(Mask):
    """A mask known only pair by pair: every tile is PARTIAL."""

    def at(self, q_positions: Array | None = None, kv_positions: Array | None = None) -> Mask:
        return at(self, q_positions, kv_positions)

    def with_offset(self, offset: Leaf) -> Self:
        return self

    def kinds(self) -> frozenset[str]:
        return frozenset({"MaskFn"})

    def coverage_bounds(self, grid: Grid) -> CoverageBounds:
        shape = np.broadcast_shapes(np.shape(grid.q_first), np.shape(grid.kv_first))
        return CoverageBounds(np.ones(shape, bool), np.zeros(shape, bool))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MaskFn(_Function):
    """A mask computed by a function. Its tiles are all PARTIAL.

    Combine it with structured masks, as in ``Causal() & MaskFn(fn)``: tiles that these leave empty are skipped.

    The function is traced on scalars at every call, and arrays that it closes over are read then: a later call, or
    another `jax.jit`, sees their values at that time. Functions with equal jaxprs share compiled programs. As an
    argument of `jax.jit` the function is static, and JAX treats bound methods of one object as equal whatever the
    object holds: give arrays that change as ``args``.

    Attributes:
        fn: ``fn(b, h, q, kv, *args)`` gives a boolean, elementwise in jnp over integer arrays that broadcast.
            q and kv are indices, or positions where `at` gives them. It is evaluated also for pairs that another
            mask hides; an index out of range is then clamped, as JAX indexes arrays.
        args: arrays that the function uses, numpy's or JAX's; they may be traced.
    """

    fn: Function
    args: tuple[PyTree, ...] = ()

    def bind(self, B: int, H: int, T: int, S: int) -> Mask:  # type: ignore[override]
        args = as_data(f"{self!r}'s args", self.args)
        bound = bind_function(self.fn, _ARGUMENTS, args, np.bool_, CALLS | WITH_DERIVATIVES)
        return MaskFn(bound, args) if isinstance(bound, Opaque) else MaskProgram(name_of(self.fn), *bound)

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        # numpy arrays can't be indexed with tracers.
        args = jax.tree.map(jnp.asarray, self.args)
        seen = jnp.asarray(self.fn(b, h, q, kv, *args))
        if seen.dtype != np.bool_:
            raise ValueError(f"{self!r} gave dtype {seen.dtype}, but must give booleans")
        return _broadcast_scalar(seen, q, kv)

    def __repr__(self) -> str:
        return f"MaskFn({name_of(self.fn)})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MaskProgram(_Function):
    """A bound `MaskFn`.

    Attributes:
        name: the function's name.
        program: its arguments are ``b, h, q, kv`` and the data.
        data: the function's arguments ``args``, and the arrays that it closes over.
    """

    name: str
    program: Program
    data: tuple[Leaf, ...]

    axes: ClassVar = None

    def as_data(self) -> Mask:
        """See `Mask.as_data`."""
        program, numbers = self.program.without_literals()
        return MaskProgram(self.name, program, (*self.data, *numbers))

    def allowed(self, b: Index, h: Index, q: Index, kv: Index) -> BoolArray:
        """See `Mask.allowed`."""
        indices = (jnp.asarray(x, jnp.int32) for x in (b, h, q, kv))
        return _broadcast_scalar(self.program.evaluate([*indices], self.data), q, kv)

    def __repr__(self) -> str:
        return f"MaskFn({self.name})"


def _broadcast_scalar(seen: jax.Array, q: Index, kv: Index) -> jax.Array:
    # A constant function gives a scalar.
    return jnp.broadcast_to(seen, np.broadcast_shapes(np.shape(q), np.shape(kv))) if seen.ndim == 0 else seen


def functions(mask: Mask) -> list[Bound | Opaque]:
    """The functions of a bound mask."""
    leaves = jax.tree.leaves(mask, is_leaf=lambda x: isinstance(x, _Function))
    programs: list[Any] = [Bound(x.program, x.data) for x in leaves if isinstance(x, MaskProgram)]
    return programs + [x.fn for x in leaves if isinstance(x, MaskFn)]
