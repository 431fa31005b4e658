"""The suite of attnops-linear on the C++ kernel, and what only it has: chunks of 48 tokens, panels, tasks."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnops
from attnops import OperationMetadata, OperationRegistry
from attnops_cpu.library import Library, library
from attnops_cpu.linear.operation import CpuLinearAttention
from attnops_linear import LinearAttention, LinearRequest, StateCache
from attnops_linear.testing import PROBLEMS, Problem, documents, padding, problem, subject, with_state
from attnops_testing.reference import CHECKS
from attnops_testing.runner import Status

# What the kernel refuses, and what has too few tokens for it.
NATIVE = {
    name for name in PROBLEMS
    if "channel" in name or name in ("documents and padding", *(f"T = {T}" for T in (1, 2, 5, 63, 65)))
}  # fmt: skip
STRONG = (0.0, -1e4, -150.0, -np.inf)
MORE = {
    "all corners": problem(
        130, B=1, K=1, H=2, D=20, decays=STRONG, betas=(0.0, 1.0, 2.0),
        mask=lambda B, T: documents(B, T) & padding(B, T),
    ),
    "a task of several heads and panels": problem(100, B=1, K=2, H=6, D=33, Dv=70),
    "more panels than a task has": problem(50, B=1, K=1, H=3, D=200, Dv=300),
    "a head that threads share": problem(97, B=1, K=1, H=1, D=40, Dv=100, decay="constant"),
    "more keys than values": problem(49, D=130, Dv=3, B=1, K=1, H=2, beta=False),
    "documents and padding by head": problem(101, mask=lambda B, T: documents(B, T) & padding(B, T)),
    "sums of documents": problem(90, decay="none", beta=False, mask=documents, state=False),
    **{f"T = {T} by head": problem(T, B=1) for T in (5, 12, 13, 47, 48, 49, 96, 97, 145)},
}  # fmt: skip
CORNERS = ("all corners", "a task of several heads and panels", "more panels than a task has")


def right(draw: Problem, name: str, check: str = "jit", dtype: str = "float32", gradients: bool = False) -> None:
    made = subject(CpuLinearAttention, platform="cpu", gradients=gradients)
    outcome = made.check(with_state(draw), check, dtype, name)
    assert outcome.status is Status.RIGHT, outcome.detail


def arrays_of(draw: Problem, dtype: str = "float32") -> dict[str, Any]:
    (query, key, value), options = draw(np.random.default_rng(0))
    found = {"query": query, "key": key, "value": value} | options
    return {name: jnp.asarray(x, dtype) for name, x in found.items()}


def test_what_the_kernel_refuses_has_reasons_and_a_broken_library_too(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = OperationRegistry.create("linear_attention", OperationMetadata(platform="cpu"))
    assert type(operation) is CpuLinearAttention
    request = LinearRequest(
        batch=1, length=9, key_heads=1, value_heads=1, head_dim=1025, value_head_dim=8, decay="channel", platform="cpu"
    )
    assert [(x.argument, x.value) for x in operation.reasons(request)] == [("decay", "channel"), ("head_dim", 1025)]
    served = request.replace(decay="head", head_dim=1024)
    assert not operation.reasons(served)
    assert "kernel in C++" in next(iter(operation.details(served)))
    assert "plain JAX" in next(iter(operation.details(served.replace(length=4))))
    assert [x.argument for x in operation.reasons(served.replace(interpret=True))] == ["interpret"]
    problem = attnops.Reason("attnops-cpu's library", "missing", "must be there", "install a compiler")
    monkeypatch.setattr("attnops_cpu.linear.operation.library", lambda: Library("", (), problem))
    assert operation.reasons(served) == [problem]


@pytest.mark.parametrize("name", ["all corners"])
@pytest.mark.tier(quick=["all corners"], slow=[])
def test_a_problem(name: str) -> None:
    right(MORE[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in NATIVE])
@pytest.mark.tier(every=2)
def test_problems(name: str) -> None:
    right(PROBLEMS[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MORE if name != "all corners"])
@pytest.mark.tier(every=2)
def test_more_problems(name: str) -> None:
    right(MORE[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.tier(every=2)
def test_16_bits(name: str, dtype: str) -> None:
    right(MORE[name], name, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("check", [check for check in CHECKS if check != "jit"])
@pytest.mark.parametrize("T", [3, 55])
@pytest.mark.tier(every=2)
def test_other_checks(T: int, check: str) -> None:
    right(problem(T, B=1, K=1, H=2, mask=documents), f"T = {T}", check, gradients=True)


OTHERS = [name for name in library().available if name != library().isa]


@pytest.mark.slow
@pytest.mark.parametrize("isa", OTHERS)
def test_other_instruction_sets(isa: str) -> None:
    code = (
        "import sys, test_values as t\n"
        "assert t.library().isa == sys.argv[1]\n"
        "for name in t.CORNERS: t.right(t.MORE[name], name)"
    )
    env = os.environ | {"ATTNOPS_CPU_ISA": isa}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", code, isa], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_results_are_those_of_any_number_of_tasks() -> None:
    given = arrays_of(problem(100, B=2, K=2, H=4, Dv=70))
    both = CpuLinearAttention()(**given, return_state=True)
    for b in range(2):
        for h in range(4):
            one = {name: x[b : b + 1, :, h // 2 : h // 2 + 1] for name, x in given.items() if name in ("query", "key")}
            one |= {name: given[name][b : b + 1, :, h : h + 1] for name in ("value", "decay", "beta")}
            one["initial_state"] = given["initial_state"][b : b + 1, h : h + 1]
            alone = CpuLinearAttention()(**one, return_state=True)
            np.testing.assert_array_equal(alone.attention_outputs[0, :, 0], both.attention_outputs[b, :, h])
            np.testing.assert_array_equal(alone.state[0, 0], both.state[b, h])  # type: ignore[index]


@pytest.mark.slow
def test_mixed_dtypes() -> None:
    given = arrays_of(problem(20, B=1, K=1, H=1))
    given["query"] = given["query"].astype(jnp.bfloat16)
    found, expected = (x(**given, return_state=True) for x in (CpuLinearAttention(), LinearAttention()))
    assert found.attention_outputs.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.state, expected.state, atol=3e-6)


@pytest.mark.slow
def test_padding_has_the_output_0_where_a_state_is_infinite() -> None:
    given = arrays_of(problem(60, B=1, K=1, H=1))
    given["initial_state"] = given["initial_state"].at[0, 0, 0].set(jnp.inf)
    is_token = np.arange(60)[None] % 2 == 0
    found = CpuLinearAttention()(**given, mask=attnops.masks.KeyPadding(is_token)).attention_outputs
    assert not np.asarray(found)[~is_token].any()


@pytest.mark.slow
def test_an_error_does_not_grow_with_the_tokens() -> None:
    given = arrays_of(problem(65_536, B=1, K=1, H=1, state=False))
    found, expected = (x(**given).attention_outputs for x in (CpuLinearAttention(), LinearAttention()))
    np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.slow
def test_steps_leave_the_given_state_alone_and_a_donated_one_is_the_new_one() -> None:
    arrays = arrays_of(problem(115, B=1, K=1, H=2, state=False))
    expected = LinearAttention()(**arrays, return_state=True)
    operation = CpuLinearAttention()
    cache = StateCache.create(batch=1, heads=2, head_dim=16, value_head_dim=24)
    empty, done, outputs = cache, 0, []
    for T in (50, 1, 5, 59):
        x = {name: x[:, done : done + T] for name, x in arrays.items()}
        q, k, v = (x.pop(name) for name in ("query", "key", "value"))
        out, cache = operation.step(q, k, v, cache, **x)
        outputs.append(out.attention_outputs)
        done += T
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), expected.attention_outputs, atol=2e-6)
    np.testing.assert_allclose(cache.state, expected.state, atol=2e-6)  # type: ignore[arg-type]
    assert not np.asarray(empty.state).any()
    step = jax.jit(lambda state, x: operation(**x, initial_state=state, return_state=True).state, donate_argnums=0)
    compiled = step.lower(empty.state, arrays).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == empty.state.nbytes  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["decay", "decay and more"])
def test_what_slices_of_a_vmap_share_is_each_slices(shared: str) -> None:
    (query, key, value), options = problem(55, B=2)(np.random.default_rng(0))
    q, k, v, beta = (jnp.asarray(x, jnp.float32)[:, None] for x in (query, key, value, options["beta"]))
    decay = jnp.linspace(-0.5, 0, 2 * v.shape[3]).reshape(2, -1)

    def run(operation: LinearAttention, q: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array) -> jax.Array:
        key = k[0] if shared == "decay" else jnp.roll(k[0], 1)
        return operation(q, key, v, decay=decay, beta=beta).attention_outputs

    axes = (0, 0, 0, None) if shared == "decay" else (0, None, None, 0)
    given = [x if axis == 0 else x[0] for x, axis in zip((q, v, beta, decay), axes, strict=True)]
    found, expected = (
        jax.vmap(functools.partial(run, operation), in_axes=axes)(*given)
        for operation in (CpuLinearAttention(), LinearAttention())
    )
    np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["dp", "tp", "sp"])
def test_a_mesh_of_processors(axis: str) -> None:
    """Rows, heads, and tokens of one sequence, whose parts exchange their states."""
    given = arrays_of(problem(192, B=2, K=2, H=4))
    mesh = jax.make_mesh((2,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
    metadata = OperationMetadata(mesh=mesh)
    program = jax.jit(lambda x: CpuLinearAttention(metadata)(**x, return_state=True)).lower(given)
    assert "attnops_cpu_linear" in program.as_text()
    found = program.compile()(given)
    expected = LinearAttention()(**given, return_state=True)
    assert len(found.attention_outputs.sharding.device_set) == 2
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=3e-6), found, expected)


@pytest.mark.slow
def test_a_traced_decay_above_any_float32_changes_no_later_document() -> None:
    (query, key, value), options = problem(20, beta=False)(np.random.default_rng(0))
    query, key, value, decay = (jnp.asarray(x, jnp.float32) for x in (query, key, value, options["decay"]))
    mask = attnops.masks.Segments(np.arange(20) // 10)
    expected = LinearAttention()(query, key, value, decay=decay, mask=mask).attention_outputs
    found = jax.jit(lambda x: CpuLinearAttention()(query, key, value, decay=x, mask=mask).attention_outputs)(
        decay.at[:, 4].set(3e20)
    )
    assert not np.isfinite(found[:, 4:10]).any()
    np.testing.assert_allclose(found[:, 10:], expected[:, 10:], atol=3e-6)
