"""The suite of attnops-linear on the kernels, in Triton's interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnops
from attnops import OperationMetadata
from attnops_linear import LinearAttention, LinearRequest, StateCache
from attnops_linear.testing import PROBLEMS, Problem, documents, padding, problem, subject, with_state
from attnops_testing.reference import CHECKS
from attnops_testing.runner import Status
from attnops_triton.linear.operation import TritonLinearAttention

# What the kernel of chunks refuses.
BY_CHANNEL = {
    name for name in PROBLEMS
    if "channel" in name or name in ("documents and padding", *(f"T = {T}" for T in (5, 63, 65)))
}  # fmt: skip
STRONG = (0.0, -1e4, -150.0, -np.inf)
MORE = {
    "all corners": problem(
        70, B=1, K=1, H=2, D=20, decays=STRONG, betas=(0.0, 1.0, 2.0),
        mask=lambda B, T: documents(B, T) & padding(B, T),
    ),
    "more columns than a program has": problem(33, B=1, K=1, H=1, Dv=80),
    "head dims of 130 and 256": problem(40, D=130, Dv=256, B=1, K=1, H=1),
    "few tokens of documents and padding": problem(
        4,
        mask=lambda B, T: (
            attnops.masks.Segments(np.array([0, 0, 1, 1]))
            & attnops.masks.KeyPadding(np.array([[True, False, True, True], [False, True, True, False]]))
        ),
    ),
    "few tokens, sums": problem(3, beta=False, decay="constant"),
    "few tokens by channel": problem(3, decay="channel", decays=STRONG),
    **{f"T = {T} by head": problem(T, B=1) for T in (1, 4, 5, 31, 32, 33, 65)},
}  # fmt: skip


def right(draw: Problem, name: str, check: str = "jit", dtype: str = "float32", gradients: bool = True) -> None:
    made = subject(TritonLinearAttention, platform="cuda", interpret=True, gradients=gradients)
    outcome = made.check(with_state(draw), check, dtype, name)
    assert outcome.status is Status.RIGHT, outcome.detail


def test_what_the_kernels_refuse_runs_natively() -> None:
    operation = TritonLinearAttention(OperationMetadata(platform="cuda", interpret=True))
    request = LinearRequest(
        batch=1, length=9, key_heads=1, value_heads=1, head_dim=300, value_head_dim=8, decay="channel",
        platform="cuda", interpret=True,
    )  # fmt: skip
    assert [(x.argument, x.value) for x in operation.reasons(request)] == [("decay", "channel"), ("head_dim", 300)]
    for served in (request.replace(decay="head", head_dim=256), request.replace(length=4, head_dim=256)):
        assert not operation.reasons(served)


def test_few_tokens() -> None:
    right(MORE["few tokens of documents and padding"], "few tokens", gradients=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in BY_CHANNEL])
@pytest.mark.tier(every=4)
def test_problems(name: str) -> None:
    right(PROBLEMS[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
@pytest.mark.tier(every=2)
def test_more_problems(name: str) -> None:
    right(MORE[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all corners", "more columns than a program has", "few tokens by channel"])
def test_bfloat16(name: str) -> None:
    right(MORE[name], name, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("check", [check for check in CHECKS if check != "jit"])
@pytest.mark.parametrize("T", [3, 35])
@pytest.mark.tier(every=2)
def test_other_checks(T: int, check: str) -> None:
    right(problem(T, B=1, K=1, H=2, mask=documents), f"T = {T}", check)


@pytest.mark.slow
@pytest.mark.parametrize("T", [20, 3])
@pytest.mark.tier(every=2)
def test_padding_has_the_output_0_where_a_state_is_infinite(T: int) -> None:
    (query, key, value), options = problem(T, B=1, K=1, H=1)(np.random.default_rng(0))
    arrays = {"query": query, "key": key, "value": value, **options}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    arrays["initial_state"] = arrays["initial_state"].at[0, 0, 0].set(jnp.inf)
    is_token = np.arange(T)[None] % 2 == 0
    operation = TritonLinearAttention(OperationMetadata(platform="cuda", interpret=True))
    found = jax.jit(lambda x: operation(**x, mask=attnops.masks.KeyPadding(is_token)).attention_outputs)(arrays)
    assert not np.asarray(found)[~is_token].any()


@pytest.mark.slow
def test_mixed_dtypes() -> None:
    (query, key, value), options = problem(20, B=1, K=1, H=1)(np.random.default_rng(0))
    arrays = {"key": key, "value": value, **options}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()} | {"query": query.astype(jnp.bfloat16)}
    operation = TritonLinearAttention(OperationMetadata(platform="cuda", interpret=True))
    found, expected = (x(**arrays, return_state=True) for x in (operation, LinearAttention()))
    assert found.attention_outputs.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.state, expected.state, atol=3e-6)


@pytest.mark.slow
def test_each_precision_is_as_exact_as_it_says() -> None:
    (query, key, value), options = problem(70, B=1, K=1, H=2)(np.random.default_rng(0))
    arrays = {"query": query, "key": key, "value": value, "beta": options["beta"], "decay": options["decay"]}
    arrays = {name: jnp.asarray(x, jnp.bfloat16) for name, x in arrays.items()}
    exact = np.asarray(LinearAttention()(**arrays, return_state=True).state)  # type: ignore[arg-type]
    errors = []
    for precision in ("highest", "high", "default"):
        operation = TritonLinearAttention(OperationMetadata(platform="cuda", interpret=True, precision=precision))  # type: ignore[arg-type]
        found = np.asarray(operation(**arrays, return_state=True).state)  # type: ignore[arg-type]
        errors.append(np.abs(found - exact).max() / np.abs(exact).max())
    assert errors[0] < 2e-6 < errors[1] < 1e-4 < errors[2] < 3e-2


@pytest.mark.slow
def test_steps_are_one_call_and_leave_the_given_state_alone() -> None:
    (query, key, value), options = problem(45, B=1, K=1, H=2, state=False)(np.random.default_rng(0))
    arrays = [jnp.asarray(x, jnp.float32) for x in (query, key, value, options["decay"], options["beta"])]
    operation = TritonLinearAttention(OperationMetadata(platform="cuda", interpret=True))
    q, k, v, decay, beta = arrays
    expected = LinearAttention()(q, k, v, decay=decay, beta=beta, return_state=True)
    cache = StateCache.create(batch=1, heads=2, head_dim=16, value_head_dim=24)
    empty, done, outputs = cache, 0, []
    for T in (36, 1, 4, 1, 3):
        q, k, v, decay, beta = (x[:, done : done + T] for x in arrays)
        out, cache = operation.step(q, k, v, cache, decay=decay, beta=beta)
        outputs.append(out.attention_outputs)
        done += T
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), expected.attention_outputs, atol=2e-6)
    np.testing.assert_allclose(cache.state, expected.state, atol=2e-6)  # type: ignore[arg-type]
    assert not np.asarray(empty.state).any()


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["decay", "decay and more"])
@pytest.mark.parametrize("T", [2, 20])
def test_what_slices_of_a_vmap_share_is_each_slices(T: int, shared: str) -> None:
    (query, key, value), options = problem(T, B=2)(np.random.default_rng(0))
    q, k, v, beta = (jnp.asarray(x, jnp.float32)[:, None] for x in (query, key, value, options["beta"]))
    decay = jnp.linspace(-0.5, 0, 2 * v.shape[3]).reshape(2, -1)

    def run(operation: LinearAttention, q: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array) -> jax.Array:
        key = k[0] if shared == "decay" else jnp.roll(k[0], 1)
        return operation(q, key, v, decay=decay, beta=beta).attention_outputs

    axes = (0, 0, 0, None) if shared == "decay" else (0, None, None, 0)
    given = [x if axis == 0 else x[0] for x, axis in zip((q, v, beta, decay), axes, strict=True)]
    found, expected = (
        jax.vmap(lambda *x, operation=operation: run(operation, *x), in_axes=axes)(*given)
        for operation in (TritonLinearAttention(OperationMetadata(platform="cuda", interpret=True)), LinearAttention())
    )
    np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.slow
def test_a_traced_decay_above_any_float32_changes_no_later_document() -> None:
    (query, key, value), options = problem(20, beta=False)(np.random.default_rng(0))
    query, key, value, decay = (jnp.asarray(x, jnp.float32) for x in (query, key, value, options["decay"]))
    mask = attnops.masks.Segments(np.arange(20) // 10)
    operation = TritonLinearAttention(OperationMetadata(platform="cuda", interpret=True))
    expected = LinearAttention()(query, key, value, decay=decay, mask=mask).attention_outputs
    found = jax.jit(lambda x: operation(query, key, value, decay=x, mask=mask).attention_outputs)(
        decay.at[:, 4].set(3e20)
    )
    assert not np.isfinite(found[:, 4:10]).any()
    np.testing.assert_allclose(found[:, 10:], expected[:, 10:], atol=3e-6)
