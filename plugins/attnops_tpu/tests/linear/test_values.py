"""The suite of attnops-linear on the kernels, in Pallas's interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attnops
from attnops import OperationMetadata
from attnops_linear import LinearAttention, LinearRequest, StateCache
from attnops_linear.testing import PROBLEMS, Problem, documents, problem, spoiled, subject, with_state
from attnops_testing.reference import CHECKS
from attnops_testing.runner import Status
from attnops_tpu.linear.operation import TPULinearAttention

MORE = {
    "two pairs of key heads": problem(70, K=4, H=8),
    "more value heads than a grid step has": problem(70, K=1, H=18, B=1),
    "head dims of 130 and 256": problem(70, D=130, Dv=256, B=1),
    "few tokens of documents": problem(3, mask=lambda B, T: attnops.masks.Segments(np.array([0, 1, 1]))),
    "few tokens of documents and padding": problem(
        4,
        mask=lambda B, T: (
            attnops.masks.Segments(np.array([0, 0, 1, 1]))
            & attnops.masks.KeyPadding(np.array([[True, False, True, True], [False, True, True, False]]))
        ),
    ),
    "few tokens, sums": problem(3, beta=False, decay="constant"),
    "few tokens by channel": problem(
        3,
        H=6,
        decay="channel",
        decays=(0.0, -1e4, -150.0, -np.inf),
        mask=lambda B, T: (
            attnops.masks.Segments(np.array([0, 0, 1]))
            & attnops.masks.KeyPadding(np.array([[True, False, True], [True, True, True]]))
        ),
    ),
    # Decays by channel: the heads of a pair and of a key head, resets, exponents up to the largest that is mild.
    **{
        f"{name} by channel": problem(decay="channel", **options)
        for name, options in {
            "few pairs": {"H": 3, "K": 1, "decays": (0.0, -20.0)},
            "decays of -0.9": {"decays": (-0.9,)},
            "more value heads than a grid step has": {"K": 2, "H": 36, "B": 1, "D": 8, "Dv": 8},
            "head dims of 130 and 256": {"T": 70, "D": 130, "Dv": 256, "B": 1},
            "T = 130": {"T": 130, "K": 4},
            "without a state, sums": {"beta": False, "state": False, "decays": (-1e4, 0.0)},
            "one channel of -1e4 in some tokens": {"decays": (*[0.0] * 30, -1e4)},
            "one document a token": {"T": 20, "mask": lambda B, T: attnops.masks.Segments(np.arange(T))},
        }.items()
    },
    **{
        f"a document that is not finite by {name}, by channel": spoiled(name, decay="channel")
        for name in ("query", "key", "value", "decay", "beta", "initial_state")
    },
    "documents and padding by head": problem(
        mask=lambda B, T: (
            attnops.masks.Segments(np.arange(T) // 20)
            & attnops.masks.KeyPadding(np.random.default_rng(6).random((B, T)) < 0.8)
        )
    ),
    **{f"T = {T} by head": problem(T) for T in (1, 4, 5, 63, 65)},
}


def right(draw: Problem, name: str, check: str = "jit", dtype: str = "float32", gradients: bool = True) -> None:
    made = subject(TPULinearAttention, platform="tpu", interpret=True, gradients=gradients)
    outcome = made.check(with_state(draw), check, dtype, name)
    assert outcome.status is Status.RIGHT, outcome.detail


@pytest.mark.slow
def test_large_queries_by_channel() -> None:
    """Times the exponentials of a mild chunk they would be infinite."""
    draw = problem(B=1, decay="channel", decays=(-1.0,))

    def large(rng: np.random.Generator) -> tuple[tuple[jax.Array, ...], dict[str, object]]:
        (query, key, value), options = draw(rng)
        return (1e36 * query, key, 1e-3 * value), options

    right(large, "large queries", gradients=False)


def test_padding() -> None:
    padding = problem(mask=lambda B, T: attnops.masks.KeyPadding(np.arange(T)[None] % 7 > 0))
    right(padding, "padding by head", gradients=False)


@pytest.mark.slow
def test_documents_and_padding() -> None:
    right(MORE["documents and padding by head"], "documents and padding by head", gradients=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PROBLEMS, *MORE])
@pytest.mark.tier(every=4)
def test_problems(name: str) -> None:
    right((PROBLEMS | MORE)[name], name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "decay by head, delta rule", "decay by constant, sums", "T = 2", "decay by channel, delta rule",
        "decays of -20 and -150 by channel",
    ],
)  # fmt: skip
def test_bfloat16(name: str) -> None:
    right(PROBLEMS[name], name, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decays_that_are_mild_in_bfloat16(dtype: str) -> None:
    """Without gradients, which are native and less exact."""
    right(problem(decay="channel", decays=(-4.9,)), "decays of -4.9 by channel", dtype=dtype, gradients=False)


@pytest.mark.slow
@pytest.mark.parametrize("check", [check for check in CHECKS if check != "jit"])
@pytest.mark.parametrize("name", ["documents", "T = 2", "documents by channel"])
def test_other_checks(name: str, check: str) -> None:
    right(PROBLEMS[name], name, check)


def test_what_the_kernel_refuses_runs_natively() -> None:
    operation = TPULinearAttention(OperationMetadata(platform="tpu", interpret=True))
    request = LinearRequest(
        batch=1, length=9, key_heads=1, value_heads=1, head_dim=300, value_head_dim=8, decay="head", platform="tpu"
    )
    assert [(x.argument, x.value) for x in operation.reasons(request)] == [("head_dim", 300)]
    served = request.replace(head_dim=256)
    assert not operation.reasons(served)
    assert not operation.reasons(served.replace(decay="channel"))
    assert [*operation.details(served.replace(decay="channel"))][
        1
    ] == "derivatives are those of the native forward, in plain JAX"
    assert [*operation.details(served)][1].startswith("gradients by a kernel")
    few = [*operation.details(served.replace(length=4))]
    assert few[1] == "derivatives are those of the native forward, in plain JAX"


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_each_precision_is_as_exact_as_it_says(decay: str) -> None:
    (query, key, value), options = problem(130, decay=decay)(np.random.default_rng(0))
    arrays = {"query": query, "key": key, "value": value, **options}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    exact = np.asarray(LinearAttention()(**arrays).attention_outputs)  # type: ignore[arg-type]
    errors = []
    for precision in ("highest", "high", "default"):
        operation = TPULinearAttention(OperationMetadata(platform="tpu", interpret=True, precision=precision))  # type: ignore[arg-type]
        found = np.asarray(operation(**arrays).attention_outputs)  # type: ignore[arg-type]
        errors.append(np.abs(found - exact).max() / np.abs(exact).max())
    assert errors[0] < 2e-6 < errors[1] < 1e-4 < errors[2] < 3e-2


@pytest.mark.slow
@pytest.mark.parametrize("T", [4, 70])
def test_sharded_types_and_mixed_dtypes(T: int) -> None:
    (query, key, value), options = problem(T)(np.random.default_rng(0))
    arrays = {"query": query, "key": key, "value": value, **options}
    arrays = {name: jnp.asarray(x, jnp.bfloat16 if name == "query" else jnp.float32) for name, x in arrays.items()}
    operation = TPULinearAttention(OperationMetadata(platform="tpu", interpret=True))

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        return tuple(operation(**arrays, mask=documents(2, T), return_state=True))  # type: ignore[arg-type]

    arrays["key"] = arrays["key"].at[0, T // 2, 0].set(jnp.nan)
    expected = LinearAttention()(**arrays, mask=documents(2, T), return_state=True)  # type: ignore[arg-type]
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        specs = {name: P("dp", "tp") if name == "initial_state" else P("dp", None, "tp") for name in arrays}
        placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
        outputs, state = jax.jit(run)(placed)
    np.testing.assert_allclose(outputs.astype(jnp.float32), expected[0].astype(jnp.float32), atol=1e-2)
    np.testing.assert_allclose(state, expected.state, atol=3e-6)  # type: ignore[arg-type]


@pytest.mark.slow
def test_steps_are_one_call() -> None:
    (query, key, value), options = problem(75, state=False)(np.random.default_rng(0))
    arrays = [jnp.asarray(x, jnp.float32) for x in (query, key, value, options["decay"], options["beta"])]
    operation = TPULinearAttention(OperationMetadata(platform="tpu", interpret=True))
    q, k, v, decay, beta = arrays
    expected = operation(q, k, v, decay=decay, beta=beta, return_state=True)
    cache, done, outputs = StateCache.create(batch=2, heads=4, head_dim=16, value_head_dim=24), 0, []
    for T in (66, 1, 1, 4, 3):
        q, k, v, decay, beta = (x[:, done : done + T] for x in arrays)
        out, cache = operation.step(q, k, v, cache, decay=decay, beta=beta)
        outputs.append(out.attention_outputs)
        done += T
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), expected.attention_outputs, atol=2e-6)
    np.testing.assert_allclose(cache.state, expected.state, atol=2e-6)
    np.testing.assert_array_equal(cache.lengths, [75, 75])


@pytest.mark.slow
def test_slices_of_a_vmap_may_share_documents_one_of_which_is_nan() -> None:
    T = 6
    (query, key, value), options = problem(T, B=3)(np.random.default_rng(0))
    q, k, v, beta = (jnp.asarray(x, jnp.float32)[:, None] for x in (query, key, value, options["beta"]))
    v = v.at[1, 0, 1].set(jnp.nan)
    decay = -jnp.ones((1, T, v.shape[3]))
    mask = attnops.masks.Segments(np.arange(T) // 2) & attnops.masks.KeyPadding(np.arange(T)[None] != 4)

    def run(operation: LinearAttention, v: jax.Array, beta: jax.Array) -> jax.Array:
        return operation(q[0], k[0], v, decay=decay, beta=beta, mask=mask).attention_outputs

    found, expected = (
        jax.jit(jax.vmap(lambda *x, operation=operation: run(operation, *x)))(v, beta)
        for operation in (TPULinearAttention(OperationMetadata(platform="tpu", interpret=True)), LinearAttention())
    )
    assert 0 < np.isnan(expected).sum() <= expected[1, :, :2].size
    np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("state", [False, True])
def test_what_slices_of_a_vmap_share_is_each_slices(T: int, state: bool) -> None:
    (query, key, value), options = problem(T, B=3)(np.random.default_rng(0))
    q, k, v, beta = (jnp.asarray(x, jnp.float32)[:, None] for x in (query, key, value, options["beta"]))
    first = jnp.asarray(options["initial_state"], jnp.float32)[:, None]
    decay = jnp.linspace(-0.5, 0, v.shape[3])

    def run(operation: LinearAttention, q: jax.Array, v: jax.Array, beta: jax.Array, first: jax.Array) -> jax.Array:
        more = {"initial_state": first} if state else {}
        return operation(q, k[0], v, decay=decay, beta=beta, **more).attention_outputs

    found, expected = (
        jax.vmap(lambda *x, operation=operation: run(operation, *x))(q, v, beta, first)
        for operation in (TPULinearAttention(OperationMetadata(platform="tpu", interpret=True)), LinearAttention())
    )
    np.testing.assert_allclose(found, expected, atol=3e-6)
