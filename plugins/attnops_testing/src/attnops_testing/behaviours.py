"""The suite's checks other than features: determinism, memory, transforms and refusals.

Each function checks a `Subject`, and raises an exception that `attnops_testing.runner.attempt` turns into an outcome.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attnops.biases import ALiBi, RelativePosition
from attnops.dispatch.attention import OperationImpl
from attnops.errors import NotDifferentiableError, Reason, UnsupportedError
from attnops.masks import Causal, Segments, SlidingWindow
from attnops.models.remat import get_gradient_checkpoint_policy
from attnops_testing import oracle
from attnops_testing.corners import CORNERS
from attnops_testing.problem import Problem
from attnops_testing.runner import NotRunError, Subject
from attnops_testing.tolerance import GRADIENT_FACTOR, assert_close, tolerance

if TYPE_CHECKING:
    from attnops.biases import Bias
    from attnops.masks import Mask
    from attnops.typing import Function, PyTree

Error = TypeVar("Error", bound=Exception)

# The largest allowed ratio of the memory at four times a length to the memory at that length.
GROWTH: Final = 4.5

# Features that behaviours are checked with; each is added if the operation serves it together with those before it.
_RICH: Final = ("GQA", "Causal", "bias [1, H, T, S]", "soft cap", "sinks", "max logits")


def _served(subject: Subject, seed: int = 0) -> tuple[Problem, OperationImpl]:
    names: list[str] = []
    for name in _RICH:
        if name in subject.served and not subject.reasons([*names, name]):
            names.append(name)
    problem = subject.problem(names, seed)
    operation = subject.make(problem.metadata)
    if reasons := problem.reasons(operation):
        listed = "; ".join(dict.fromkeys(map(str, reasons)))
        raise AssertionError(
            f"the operation refuses every plain problem that was tried, with the lengths, heads, head dims and dtypes "
            f"of attnops_testing.fit, such as {problem.request(operation)}: {listed}"
        )
    return problem, operation


def _jit(subject: Subject, function: Function) -> Function:
    return jax.jit(function, compiler_options=subject.compiler_options)


def _check(subject: Subject, problem: Problem, result: tuple[dict[str, jax.Array], dict[str, PyTree]]) -> None:
    outputs, gradients = result
    problem.check_outputs(outputs)
    if subject.gradients:
        problem.check_gradients(gradients)


def serves_something(subject: Subject) -> None:
    """The operation serves some problem: one that refuses everything would never be wrong."""
    problem, operation = _served(subject)
    problem.check(operation, subject.gradients, subject.compiler_options)


def deterministic(subject: Subject) -> None:
    """Outputs and gradients are the same to the bit when the program runs again."""
    problem, operation = _served(subject)
    program = _jit(subject, problem.program(operation, subject.gradients))
    first = program(*problem.arguments)
    for _ in range(3):
        again = program(*problem.arguments)
        for (path, a), b in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(again), strict=True):
            differ = int((np.asarray(a).view(np.uint8) != np.asarray(b).view(np.uint8)).sum())
            assert not differ, f"{jax.tree_util.keystr(path)}: {differ} bytes differ when run again"


def eager(subject: Subject) -> None:
    """Results are right outside `jax.jit` too."""
    problem, operation = _served(subject)
    _check(subject, problem, problem.program(operation, subject.gradients)(*problem.arguments))


def vmap(subject: Subject) -> None:
    """Under `jax.vmap` over a further axis each slice is right."""
    pair = [_served(subject, seed) for seed in (0, 1)]
    problem, operation = pair[0]
    program = _jit(subject, jax.vmap(lambda *x: problem.program(operation, subject.gradients)(*x)))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(p.arguments for p, _ in pair))
    result = program(*stacked)
    for i, (slice_, _) in enumerate(pair):
        _check(subject, slice_, jax.tree.map(lambda x, i=i: x[i], result))


def shard_map(subject: Subject) -> None:
    """Results are right in `jax.shard_map` over the batch, on two devices if there are two, else on one."""
    if subject.base.mesh is not None:
        raise NotRunError("a call inside this shard_map runs on its mesh, not on the metadata's")
    problem, operation = _served(subject)
    devices = jax.devices()
    mesh = Mesh(np.asarray(devices[: 2 if len(devices) > 1 else 1]), ("batch",))
    inputs, cotangents, _ = problem.arguments
    # Arrays without a batch are on every device, and their gradients are summed over devices.
    split = {name: P("batch") if name in ("query", "key", "value") else P() for name in inputs}

    def both(
        inputs: dict[str, jax.Array], cotangents: dict[str, jax.Array], check_vma: bool
    ) -> tuple[dict[str, jax.Array], dict[str, PyTree]]:
        def call(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return problem.call(operation, x)

        attend = jax.shard_map(call, mesh=mesh, in_specs=(split,), out_specs=P("batch"), check_vma=check_vma)
        if not subject.gradients:
            return attend(inputs), {}
        outputs, pull_back = jax.vjp(attend, inputs)
        return outputs, pull_back(cotangents)[0]

    def run(check_vma: bool) -> tuple[dict[str, jax.Array], dict[str, PyTree]]:
        return _jit(subject, functools.partial(both, check_vma=check_vma))(inputs, cotangents)

    try:
        result = run(True)
    except ValueError as error:
        # Pallas's interpreter mixes values that vary over devices with others; that is not the kernel's fault.
        if not subject.base.interpret or "varying manual axes" not in str(error):
            raise
        result = run(False)
    _check(subject, problem, result)


def checkpoint(subject: Subject) -> None:
    """Gradients under `jax.checkpoint` with the policy "save_attention" are right."""
    if not subject.gradients:
        raise NotRunError(f"mode {subject.mode} has no gradients")
    problem, operation = _served(subject)
    policy = get_gradient_checkpoint_policy("save_attention")

    def both(
        inputs: dict[str, jax.Array], cotangents: dict[str, jax.Array], mask: Mask | None
    ) -> tuple[dict[str, jax.Array], dict[str, PyTree]]:
        def layer(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return problem.call(operation, x, mask)

        outputs, pull_back = jax.vjp(jax.checkpoint(layer, policy=policy), inputs)
        return outputs, pull_back(cotangents)[0]

    _check(subject, problem, _jit(subject, both)(*problem.arguments))


# The custom calls by which jaxlib launches Triton kernels.
_LAUNCHERS: Final = frozenset({"triton_kernel_call", "triton_kernel_call_ffi"})


def export(subject: Subject) -> None:
    """A program exported by `jax.export`, as bytes and back, is right."""
    if subject.base.interpret:
        raise NotRunError("what is exported is the compiled kernel, not its interpreter")
    if not subject.limits.exportable:
        raise UnsupportedError("by declaration", [Reason("exportable", False, "is declared in its Limits")])
    problem, operation = _served(subject)
    program = jax.jit(problem.program(operation, subject.gradients))
    try:
        try:
            exported = jax.export.export(program)(*problem.arguments)
        except ValueError as error:
            # JAX serialises calls of jaxlib's launcher, whose format it does not promise to keep, if they are allowed.
            names = set(re.findall(r"custom_call @(\w+)", str(error)))
            if not names or not names <= _LAUNCHERS:
                raise
            allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
            exported = jax.export.export(program, disabled_checks=allowed)(*problem.arguments)
        if importlib.util.find_spec("flatbuffers"):  # what JAX needs to serialise
            exported = jax.export.deserialize(exported.serialize())
    except (NotImplementedError, ValueError) as error:
        if "callback" not in str(error):
            raise
        raise NotRunError(f"refused by JAX: {str(error).splitlines()[0]}") from None
    arguments, mesh = problem.arguments, subject.base.mesh
    if mesh is not None:
        # A program runs on as many devices as it was exported for.
        arguments = jax.device_put(arguments, NamedSharding(mesh, P()))
    _check(subject, problem, _jit(subject, exported.call)(*arguments))


def higher_derivatives(subject: Subject) -> None:
    """Forward mode and second derivatives are right, or refused with a message: the tangents of the outputs and of
    the gradients, and the gradients of a gradient.
    """
    if not subject.gradients:
        raise NotRunError(f"mode {subject.mode} has no gradients")
    problem, operation = _served(subject)
    rng = np.random.default_rng(3)
    tangents = {name: rng.normal(size=x.shape).astype(x.dtype) for name, x in problem.inputs.items()}

    def outputs(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return problem.call(operation, inputs)

    def all_of_them(inputs: PyTree, tangents: PyTree, cotangents: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        def gradients(inputs: PyTree) -> PyTree:
            return jax.vjp(outputs, inputs)[1](cotangents)[0]

        def along(inputs: PyTree) -> jax.Array:
            return jnp.stack([jnp.vdot(d, tangents[name]) for name, d in gradients(inputs).items()]).sum()

        forward = (jax.jvp(f, (inputs,), (tangents,))[1] for f in (outputs, gradients))
        return *forward, jax.grad(along)(inputs)

    try:
        found = _jit(subject, all_of_them)(problem.inputs, tangents, problem.arguments[1])
    except NotDifferentiableError as error:
        raise NotRunError(f"refused: {error}") from None
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise NotRunError(f"refused by JAX: {str(error).splitlines()[0]}") from None

    d_out, d_lse = problem.cotangents["attention_outputs"], problem.cotangents.get("logsumexp")
    given: dict[str, Any] = {"tangents": tangents, "d_out": d_out, "d_logsumexp": d_lse, **problem.oracle_options}
    q, k, v = problem.qkv
    exact, narrow = (oracle.attention_tangents(q, k, v, dtype=d, **given) for d in (np.float64, problem.dtype))

    def check(name: str, actual: jax.Array, exact: oracle.Array, narrow: oracle.Array) -> None:
        assert_close(name, actual, exact, tolerance(exact, narrow, exact, problem.dtype, GRADIENT_FACTOR))

    check("tangent of the output", found[0]["attention_outputs"], exact.out, narrow.out)
    if "logsumexp" in found[0]:
        check("tangent of the logsumexp", found[0]["logsumexp"], exact.logsumexp, narrow.logsumexp)
    assert not np.any(found[0].get("max_logits", 0)), "max_logits has a tangent, but must count as a constant"
    for what, values in (("tangent of the gradient", found[1]), ("second derivative", found[2])):
        for name, value in values.items():
            check(f"{what} of {name}", value, exact.gradients[name], narrow.gradients[name])


def unknown_option(subject: Subject) -> None:
    """A misspelt option is a `TypeError` that names it."""
    problem, operation = _served(subject)
    misspelt: dict[str, Any] = {"sofmax_scale": 0.5}
    error = _raised(TypeError, lambda: operation(problem.query, problem.key, problem.value, **misspelt))
    assert error is not None, "the unknown option sofmax_scale was ignored"
    assert "sofmax_scale" in str(error), f"the TypeError does not name the option sofmax_scale: {error}"


def float8(subject: Subject) -> None:
    """An 8-bit dtype, which the contract does not have, is refused with a reason that names it, unless it is
    declared.
    """
    dtype = jnp.dtype(jnp.float8_e4m3fn)
    if dtype.name in subject.limits.dtypes:
        raise NotRunError(f"the operation declares {dtype.name}")
    problem = subject.problem(())
    query, key, value = (jnp.asarray(x).astype(dtype) for x in (problem.query, problem.key, problem.value))
    error = _raised(UnsupportedError, lambda: subject.make(problem.metadata)(query, key, value))
    assert error is not None, f"{dtype.name} was not refused"
    assert any(dtype.name in str(reason) for reason in error.reasons), f"no reason names {dtype.name}: {error}"


def refusals_are_listed(subject: Subject) -> None:
    """With ``on_unsupported="error"`` a refusal states every reason."""
    problem = subject.problem(("weights", "sinks", "dropout", "head dims 576/512", "ScoreFn", "~mask"))
    operation = subject.make(problem.metadata)
    reasons = problem.reasons(operation)
    if not reasons:
        raise NotRunError("the operation does not refuse the request")
    error = _raised(
        UnsupportedError,
        lambda: jax.eval_shape(problem.program(operation, gradients=False), *problem.arguments),
    )
    assert error is not None, f"the call ran, although the operation states a reason against it: {reasons[0]}"
    missing = [str(reason) for reason in reasons if str(reason) not in str(error)]
    assert not missing, f"the refusal does not state {missing}"


def _raised(kind: type[Error], function: Callable[[], object]) -> Error | None:
    try:
        function()
    except kind as error:
        return error
    return None


BEHAVIOURS: Final[dict[str, Callable[[Subject], None]]] = {
    "serves something": serves_something,
    "deterministic": deterministic,
    "eager": eager,
    "vmap": vmap,
    "shard_map": shard_map,
    "checkpoint": checkpoint,
    "export": export,
    "second derivative": higher_derivatives,
    "unknown option": unknown_option,
    "float8": float8,
    "refusals are listed": refusals_are_listed,
    **CORNERS,
}

# The behaviours whose checks compile programs.
WITH_PROGRAM: Final = frozenset(BEHAVIOURS) - {"unknown option", "float8", "refusals are listed"}


def _segments(T: int) -> dict[str, Any]:
    return {"mask": Segments(jax.ShapeDtypeStruct((1, T), jnp.int32))}


# By name, a function from a length to the options of a call; arrays in the options are arguments of the program.
MEMORY: Final[dict[str, Callable[[int], dict[str, Any]]]] = {
    "no mask": lambda T: {},
    "Causal": lambda T: {"mask": Causal()},
    "SlidingWindow": lambda T: {"mask": SlidingWindow(127, 0)},
    "traced Segments": _segments,
    "ALiBi": lambda T: {"bias": ALiBi(jax.ShapeDtypeStruct((2,), jnp.float32))},
    "RelativePosition": lambda T: {"bias": RelativePosition(jax.ShapeDtypeStruct((32, 2), jnp.float32))},
}


def memory_growth(subject: Subject, case: str, length: int = 1024) -> None:
    """Four times the length needs at most `GROWTH` times the memory for temporaries, by the compiler's figures.

    Tiles are small compared with the length, since one large tile would hide temporaries of T × S elements.
    """
    if not subject.limits.linear_memory:
        raise NotRunError("not linear, by declaration")
    if subject.base.interpret:
        raise NotRunError("the interpreter's memory is not the kernel's")
    small, large = (_temporaries(subject, case, T) for T in (length, 4 * length))
    if small is None or large is None:
        raise NotRunError("this compiler reports no memory")
    growth = large / max(small, 1)
    assert growth <= GROWTH, (
        f"{small:,} bytes at length {length:,}, {large:,} at {4 * length:,}: {growth:.1f} times, "
        f"but at most {GROWTH} times, or Limits(linear_memory=False)"
    )


def _temporaries(subject: Subject, case: str, T: int) -> int | None:
    """Bytes of temporaries, forward and backward, at T queries and keys."""
    fit = subject.fit
    tile = None if fit.own_tiles else 4 * fit.block
    operation = subject.make(subject.base.replace(block_q=tile, block_k=tile))
    array = jax.ShapeDtypeStruct((1, T, 2, max(64, fit.D)), fit.dtype)
    options = MEMORY[case](T)

    def both(
        query: jax.Array, key: jax.Array, value: jax.Array, d_out: jax.Array, options: dict[str, PyTree]
    ) -> PyTree:
        def attend(inputs: tuple[jax.Array, jax.Array, jax.Array, Bias | None]) -> jax.Array:
            query, key, value, bias = inputs
            return operation(query, key, value, **options, bias=bias).attention_outputs

        bias = options.pop("bias", None)
        if not subject.gradients:
            return attend((query, key, value, bias))
        out, pull_back = jax.vjp(attend, (query, key, value, bias))
        return out, pull_back(d_out)

    program = _jit(subject, both)
    compiled = program.lower(array, array, array, array, options).compile()  # type: ignore[attr-defined]
    figures = compiled.memory_analysis()
    return None if figures is None else int(figures.temp_size_in_bytes)
