"""Values and gradients beside the definition in float64, by attnops_testing's tolerance rule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata
from attnops.masks import KeyPadding, Segments
from attnops_linear import LinearAttention, reference
from attnops_linear.testing import PROBLEMS, problem, subject, with_state
from attnops_testing.reference import CHECKS
from attnops_testing.runner import Status

QUICK = (
    "decay by constant, sums", "decay by head, delta rule", "decays of zero, -1e4, -150 and -inf by channel",
    "documents and padding",
)  # fmt: skip


def right(name: str, check: str = "jit", dtype: str = "float32") -> None:
    outcome = subject(LinearAttention).check(with_state(PROBLEMS[name]), check, dtype, name)
    assert outcome.status is Status.RIGHT, outcome.detail


@pytest.mark.parametrize("name", QUICK)
def test_quick_problems(name: str) -> None:
    right(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in QUICK])
@pytest.mark.tier(every=3)
def test_other_problems(name: str) -> None:
    right(name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["decay by head, delta rule", "decay by channel, sums"])
def test_16_bits(name: str, dtype: str) -> None:
    right(name, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("check", [check for check in CHECKS if check != "jit"])
@pytest.mark.parametrize("name", ["documents and padding", "T = 1"])
def test_other_checks(name: str, check: str) -> None:
    right(name, check)


def test_without_tokens_the_state_is_the_initial_one() -> None:
    q, v = jnp.ones((2, 0, 1, 3)), jnp.ones((2, 0, 2, 4))
    state = jnp.arange(48.0).reshape(2, 2, 3, 4)
    found = LinearAttention()(q, q, v, initial_state=state, return_state=True)
    assert found.attention_outputs.shape == (2, 0, 2, 4)
    np.testing.assert_array_equal(found.state, state)


@pytest.mark.slow
def test_without_tokens_or_rows_there_are_masks_and_decays() -> None:
    q, v = jnp.ones((2, 0, 1, 3)), jnp.ones((2, 0, 2, 4))
    mask = Segments(np.zeros(0, int)) & KeyPadding(np.zeros((2, 0), bool))
    assert LinearAttention()(q, q, v, mask=mask).attention_outputs.shape == (2, 0, 2, 4)
    q, v = jnp.ones((0, 20, 1, 3)), jnp.ones((0, 20, 2, 4))
    found = LinearAttention()(q, q, v, decay=jnp.zeros((0, 20, 2, 3)), return_state=True)
    assert found.state.shape == (0, 2, 3, 4)  # type: ignore[union-attr]


def test_nan_in_padding_reaches_nothing() -> None:
    (query, key, value), options = PROBLEMS["padding"](np.random.default_rng(0))
    options = {name: jnp.asarray(x, jnp.float32) if name != "mask" else x for name, x in options.items()}
    arrays = {"query": query, "key": key, "value": value} | {n: x for n, x in options.items() if n != "mask"}
    kept = np.asarray(options["mask"].is_token)

    def loss(arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        output = LinearAttention()(**arrays, mask=options["mask"], return_state=True)  # type: ignore[arg-type]
        return (output.attention_outputs**2).sum() + (output.state**2).sum(), output.attention_outputs  # type: ignore[operator]

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    clean = run({name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()})
    dirty = {}
    for name, x in arrays.items():
        x = np.array(x, np.float32)
        if name != "initial_state":
            x[~kept] = np.nan
        dirty[name] = jnp.asarray(x)
    jax.tree.map(np.testing.assert_array_equal, run(dirty), clean)
    assert (np.asarray(clean[0][1])[~kept] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("T", [3, 6])
def test_the_decay_of_a_documents_first_token_has_no_effect(T: int) -> None:
    (query, key, value), options = problem(T)(np.random.default_rng(0))
    query, key, value, beta = (jnp.asarray(x, jnp.float32) for x in (query, key, value, options["beta"]))
    decay, mask = jnp.asarray(options["decay"], jnp.float32), Segments(np.arange(T) // 2)
    found, expected = (
        LinearAttention()(query, key, value, decay=x, beta=beta, mask=mask, return_state=True)
        for x in (decay.at[:, 2].set(jnp.nan), decay)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_finite_documents_make_no_nan() -> None:
    (query, key, value), options = problem(6)(np.random.default_rng(0))
    query, key, value, beta = (jnp.asarray(x, jnp.float32) for x in (query, key, value, options["beta"]))
    with jax.debug_nans(True):
        output = LinearAttention()(query, key, value, beta=beta, mask=Segments(np.arange(6) // 2))
    assert np.isfinite(output.attention_outputs).all()


@pytest.mark.slow
def test_gradients_of_vmap_are_those_of_a_batch_whatever_the_decays() -> None:
    (query, key, value), options = problem(20, decay="channel", state=False)(np.random.default_rng(0))
    options["decay"] = options["decay"] * np.array([1, 1e3])[:, None, None, None]
    arrays = {"query": query, "key": key, "value": value, **options}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}

    def by_rows(arrays: dict[str, jax.Array]) -> jax.Array:
        rows = {name: x[:, None] for name, x in arrays.items()}
        return (jax.vmap(lambda row: LinearAttention()(**row).attention_outputs)(rows) ** 2).sum()

    found = jax.jit(jax.grad(by_rows))(arrays)
    expected = jax.jit(jax.grad(lambda arrays: (LinearAttention()(**arrays).attention_outputs ** 2).sum()))(arrays)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max()), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("power", [13, 30])
def test_large_keys_and_small_values(power: int) -> None:
    (query, key, value), options = problem(20, decay="channel", beta=False, state=False)(np.random.default_rng(0))
    arrays = {"query": query * 10.0**-power, "key": key * 10.0**power, "value": value, "decay": options["decay"] * 30}
    arrays = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
    found = jax.jit(lambda x: LinearAttention()(**x).attention_outputs)(arrays)
    with jax.enable_x64(True):
        exact = np.asarray(reference(**{n: jnp.asarray(x, jnp.float64) for n, x in arrays.items()})[0])
    np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())


@pytest.mark.slow
def test_the_error_does_not_grow_over_65536_tokens() -> None:
    draw = problem(65_536, B=1, K=1, H=1, D=8, Dv=8)
    (query, key, value), options = draw(np.random.default_rng(0))
    arrays = {"query": query, "key": key, "value": value, **options}
    arrays = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
    found = LinearAttention()(**{n: jnp.asarray(x) for n, x in arrays.items()}).attention_outputs  # type: ignore[arg-type]
    with jax.enable_x64(True):
        exact = reference(**{n: jnp.asarray(x, jnp.float64) for n, x in arrays.items()})[0]
    error = np.abs(np.asarray(found, np.float64) - np.asarray(exact)).reshape(16, -1).max(axis=1)
    assert error.max() < 1e-5
    assert error[-1] < 4 * error[0]


@pytest.mark.slow
def test_second_derivatives() -> None:
    (query, key, value), options = problem(20, B=1, K=1, H=1, D=4, Dv=4)(np.random.default_rng(0))
    arrays = {"query": query, "key": key, "value": value, **options}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}

    def product(function: object, arrays: dict[str, jax.Array]) -> object:
        def loss(arrays: dict[str, jax.Array]) -> jax.Array:
            return jnp.sin(function(**arrays)[0]).sum()  # type: ignore[operator]

        return jax.jvp(jax.grad(loss), (arrays,), (jax.tree.map(jnp.cos, arrays),))[1]

    found = jax.jit(lambda x: product(LinearAttention(), x))(arrays)
    with jax.enable_x64(True):
        exact = product(reference, {name: jnp.asarray(x, jnp.float64) for name, x in arrays.items()})
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y).max())


def test_products_of_matrices_have_all_bits_of_float32() -> None:
    q = jnp.ones((1, 32, 1, 8))
    for metadata, text in ((None, "HIGHEST"), (OperationMetadata(precision="default"), "DEFAULT")):  # type: ignore[arg-type]
        lowered = jax.jit(LinearAttention(metadata)).lower(q, q, q).as_text()
        assert f"precision = [{text}, {text}]" in lowered
    # The derivative of the inverse has it too, where a program is differentiated after it was traced.
    rule = jax.jit(lambda q: LinearAttention()(q, q, q, beta=q[..., 0]).attention_outputs.sum())
    assert "DEFAULT" not in jax.jit(jax.grad(rule)).lower(q).as_text()


@pytest.mark.slow
def test_a_traced_decay_above_any_float32_changes_no_later_document() -> None:
    (query, key, value), options = problem(20, beta=False)(np.random.default_rng(0))
    query, key, value, decay = (jnp.asarray(x, jnp.float32) for x in (query, key, value, options["decay"]))
    mask = Segments(np.arange(20) // 10)
    expected = LinearAttention()(query, key, value, decay=decay, mask=mask).attention_outputs
    found = jax.jit(lambda x: LinearAttention()(query, key, value, decay=x, mask=mask).attention_outputs)(
        decay.at[:, 4].set(3e20)
    )
    assert not np.isfinite(found[:, 4:10]).any()
    np.testing.assert_allclose(found[:, 10:], expected[:, 10:], atol=3e-6)
