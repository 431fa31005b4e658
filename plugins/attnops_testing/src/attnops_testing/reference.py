"""Checks of operations that are not softmax attention (linear attention, rms_norm, …) against a reference that their
author writes.

The reference is the plain computation in `jax.numpy`, in the dtype of its arguments. In float64 it is the exact result,
gradients included; in the input's dtype it determines the error that the tolerance rule allows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.operation import BaseOperation
from attnops.dispatch.registry import OperationRegistry
from attnops_testing.runner import NotRunError, Outcome, attempt
from attnops_testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close, tolerance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.typing import ArrayLike

    from attnops.typing import PyTree
    from attnops_testing.oracle import Array

    # Outputs, and the gradients (a sequence or None).
    _Results: TypeAlias = tuple[Sequence[jax.Array], PyTree]

# A function of a `numpy.random.Generator` that draws one call: its arguments and its options. Shapes do not depend on
# the draw; floating-point arrays are cast to the dtype that is checked, and gradients are taken with respect to them.
ReferenceProblem = Callable[[np.random.Generator], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceSubject:
    """An operation and the reference that it is compared with.

    Attributes:
        operation: its name, ``distribution:name``, or its class.
        reference: a function of the same arguments and options in `jax.numpy`, which computes in their dtype and
            returns the same arrays as the operation, in the same order.
        platform: the platform whose forward is checked, such as "cuda"; None for this machine's.
        interpret: whether kernels run in their language's interpreter.
        metadata: other fields of the operation's metadata.
        gradients: whether the operation has a backward pass.
    """

    operation: str | type[BaseOperation]
    reference: Callable[..., object]
    platform: str | None = None
    interpret: bool = False
    metadata: OperationMetadata = dataclasses.field(default_factory=OperationMetadata)
    gradients: bool = True

    def make(self) -> BaseOperation:
        """The operation, which refuses what it can't serve."""
        metadata = self.metadata.replace(
            platform=self.platform, interpret=self.interpret, on_unsupported="error",
            mode=self.metadata.mode or ("train" if self.gradients else "prefill"),
        )  # fmt: skip
        if isinstance(self.operation, str):
            return OperationRegistry.create(self.operation, metadata)
        return self.operation(metadata)

    def check(self, problem: ReferenceProblem, check: str, dtype: str = "float32", name: str = "") -> Outcome:
        """Run one of `CHECKS` on one problem in one dtype."""
        return attempt(
            " ".join(filter(None, (name, dtype, check))), lambda: CHECKS[check](self, _Call.draw(problem, dtype, 0))
        )


@dataclasses.dataclass(frozen=True)
class _Call:
    """One drawn call of a problem, with floating-point arrays separate from its other arguments."""

    problem: ReferenceProblem
    dtype: str
    names: tuple[str, ...]
    arrays: tuple[Array, ...]
    others: tuple[object, ...]
    is_array: tuple[bool, ...]
    tree: jax.tree_util.PyTreeDef

    @classmethod
    def draw(cls, problem: ReferenceProblem, dtype: str, seed: int) -> _Call:
        arguments, options = problem(np.random.default_rng(seed))
        leaves, tree = jax.tree.flatten_with_path((tuple(arguments), dict(options)))
        is_array = tuple(hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) for _, x in leaves)
        pairs = list(zip(leaves, is_array, strict=True))
        arrays = tuple(np.asarray(x).astype(jnp.dtype(dtype)) for (_, x), floats in pairs if floats)
        names = tuple(jax.tree_util.keystr(path[1:]) for (path, _), floats in pairs if floats)
        return cls(problem, dtype, names, arrays, tuple(x for (_, x), floats in pairs if not floats), is_array, tree)

    def again(self, seed: int) -> _Call:
        return self.draw(self.problem, self.dtype, seed)

    def run(self, function: Callable[..., object], arrays: Iterable[ArrayLike]) -> list[jax.Array]:
        """The arrays that a function returns, in order, if the call's arrays have these values."""
        floats, others = iter(arrays), iter(self.others)
        leaves = [next(floats) if is_array else next(others) for is_array in self.is_array]
        arguments, options = jax.tree.unflatten(self.tree, leaves)
        return jax.tree.leaves(function(*arguments, **options))


def _values(
    call: _Call, function: Callable[..., object], arrays: Iterable[ArrayLike], cotangents: Sequence[ArrayLike] | None
) -> _Results:
    """Outputs, and the gradients of the arrays; None in place of gradients if there are no cotangents."""
    if cotangents is None:
        return call.run(function, arrays), None
    outputs, pull_back = jax.vjp(lambda *x: call.run(function, x), *arrays)
    assert len(outputs) == len(cotangents), (
        f"there are {len(outputs)} outputs, but the reference gives {len(cotangents)}"
    )
    rounded = [jnp.asarray(c).astype(out.dtype) for c, out in zip(cotangents, outputs, strict=True)]
    return outputs, pull_back(rounded)


def _truth(subject: ReferenceSubject, call: _Call) -> tuple[list[Array] | None, _Results, _Results]:
    """The cotangents; outputs and gradients of the reference in float64, and in the call's dtype."""
    shapes = jax.eval_shape(lambda *x: call.run(subject.reference, x), *call.arrays)
    rng = np.random.default_rng(17)
    cotangents = [rng.normal(size=x.shape) for x in shapes] if subject.gradients else None
    # The operation gets rounded cotangents, and so must the reference.
    if cotangents is not None:
        cotangents = [np.asarray(c.astype(x.dtype), np.float64) for c, x in zip(cotangents, shapes, strict=True)]
    narrow = _values(call, subject.reference, call.arrays, cotangents)
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in call.arrays]
        exact = _values(call, subject.reference, wide, cotangents)
        for x in exact[0]:
            if x.dtype != np.float64:
                raise ValueError(
                    f"the reference gave {x.dtype} for float64 arguments, but must compute in the dtype of its "
                    f"arguments: remove its casts"
                )
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), exact)
    return cotangents, exact, narrow


def _compare(call: _Call, result: _Results, exact: _Results, narrow: _Results) -> None:
    """Assert that outputs and gradients agree by the tolerance rule, and have the right dtypes."""
    for factor, *arrays in ((OUTPUT_FACTOR, result[0], exact[0], narrow[0]),
                            (GRADIENT_FACTOR, result[1], exact[1], narrow[1])):  # fmt: skip
        actual, in_float64, in_dtype = arrays
        if actual is None:
            continue
        count = len(in_float64)
        assert len(actual) == count, f"there are {len(actual)} outputs, but the reference gives {count}"
        for i, (x, truth, rough) in enumerate(zip(actual, in_float64, in_dtype, strict=True)):
            name = f"output {i}" if factor == OUTPUT_FACTOR else f"gradient of {call.names[i]}"
            assert x.dtype == rough.dtype, f"{name} has dtype {x.dtype}, but must have the reference's, {rough.dtype}"
            assert_close(name, x, truth, tolerance(truth, np.asarray(rough, np.float64), truth, rough.dtype, factor))


def _jit(subject: ReferenceSubject, call: _Call) -> None:
    """Values and gradients under `jax.jit`."""
    cotangents, exact, narrow = _truth(subject, call)
    operation = subject.make()
    result = jax.jit(lambda *x: _values(call, operation, x, cotangents))(*map(jnp.asarray, call.arrays))
    _compare(call, result, exact, narrow)


def _eager(subject: ReferenceSubject, call: _Call) -> None:
    """Values and gradients outside `jax.jit`."""
    cotangents, exact, narrow = _truth(subject, call)
    _compare(call, _values(call, subject.make(), map(jnp.asarray, call.arrays), cotangents), exact, narrow)


def _vmap(subject: ReferenceSubject, call: _Call) -> None:
    """Each slice under `jax.vmap` is right, gradients included."""
    calls = [call, call.again(1)]
    truths = [_truth(subject, x) for x in calls]
    operation = subject.make()
    stacked = [jnp.stack(pair) for pair in zip(*(x.arrays for x in calls), strict=True)]
    result = jax.jit(jax.vmap(lambda *x: _values(call, operation, x, truths[0][0])))(*stacked)
    for i, (cotangents, exact, narrow) in enumerate(truths):
        del cotangents  # cotangents of equal shapes are equal
        _compare(call, jax.tree.map(lambda x, i=i: x[i], result), exact, narrow)


def _deterministic(subject: ReferenceSubject, call: _Call) -> None:
    """Outputs and gradients are the same to the bit when the program runs again."""
    cotangents, *_ = _truth(subject, call)
    operation = subject.make()
    program = jax.jit(lambda *x: _values(call, operation, x, cotangents))
    first, again = (jax.tree.leaves(program(*map(jnp.asarray, call.arrays))) for _ in range(2))
    for i, (a, b) in enumerate(zip(first, again, strict=True)):
        differ = int((np.asarray(a).view(np.uint8) != np.asarray(b).view(np.uint8)).sum())
        assert not differ, f"result {i}: {differ} bytes differ when run again"


def _control(subject: ReferenceSubject, call: _Call) -> None:
    """The problem can fail: if any one array is drawn anew, the reference's result changes by more than the rule
    allows.

    Otherwise an operation could ignore this array, and the problem would not show it.
    """
    _, exact, narrow = _truth(subject, call)
    other = call.again(1)
    if not call.arrays:
        raise NotRunError("the problem has no floating-point array")
    for i, name in enumerate(call.names):
        mixed = [*call.arrays[:i], other.arrays[i], *call.arrays[i + 1 :]]
        changed = call.run(subject.reference, mixed)
        try:
            _compare(call, (changed, None), exact, narrow)
        except AssertionError:
            continue
        raise AssertionError(f"{name} changes no output of this problem, which can't show whether it is honoured")


CHECKS: Final[dict[str, Callable[[ReferenceSubject, _Call], None]]] = {
    "jit": _jit,
    "eager": _eager,
    "vmap": _vmap,
    "deterministic": _deterministic,
    "negative control": _control,
}


def check_against(
    operation: str | type[BaseOperation],
    reference: Callable[..., object],
    problems: Mapping[str, ReferenceProblem],
    *,
    platform: str | None = None,
    interpret: bool = False,
    metadata: OperationMetadata | None = None,
    dtypes: Iterable[str] = ("float32",),
    gradients: bool = True,
    checks: Iterable[str] = ("jit", "eager", "vmap", "deterministic", "negative control"),
) -> list[Outcome]:
    """Check an operation that is not softmax attention against a reference.

    ::

        def rms_norm(x, weight, eps=1e-6):
            return x * (jnp.mean(x * x, -1, keepdims=True) + eps) ** -0.5 * weight

        problems = {"plain": lambda rng: ((rng.normal(size=(2, 8, 16)), rng.normal(size=16)), {})}
        outcomes = check_against("rms_norm", rms_norm, problems)

    Values and gradients agree with the reference in float64 by the tolerance rule: at most twice (gradients: three
    times) the error of the reference in the input's dtype, plus 2 ulp. This is checked under `jax.jit`, eagerly and
    under `jax.vmap`. Dtypes must be the reference's, results must be bitwise the same when run again, and each problem
    must fail if an array is ignored.

    Args:
        operation: its name, ``distribution:name``, or its class.
        reference: a function of the same arguments and options in `jax.numpy`, which computes in their dtype and
            returns the same arrays as the operation, in the same order.
        problems: by name, functions of a `numpy.random.Generator` that draw the arguments and options of a call.
        platform: the platform whose forward is checked, such as "cuda"; None for this machine's.
        interpret: whether kernels run in their language's interpreter.
        metadata: further fields of the operation's metadata.
        dtypes: floating-point arrays are cast to each of these in turn.
        gradients: whether it has a backward pass.
        checks: names of `CHECKS`.

    Returns:
        An outcome for each problem, dtype and check; ``status`` is right, refused, wrong or not run.
    """
    subject = ReferenceSubject(
        operation=operation, reference=reference, platform=platform, interpret=interpret, gradients=gradients,
        metadata=OperationMetadata() if metadata is None else metadata,
    )  # fmt: skip
    return [
        subject.check(problem, check, dtype, name)
        for name, problem in problems.items()
        for dtype in dtypes
        for check in checks
    ]
