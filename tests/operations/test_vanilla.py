"""vanilla against the float64 oracle, and the oracle against finite differences."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import draws

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_testing import attention, attention_gradients
from attnops_testing.problem import FAST_COMPILE, Problem
from attnops_testing.strategies import problems
from attnops_testing.tolerance import tolerance


def vanilla(metadata=None):
    return OperationRegistry.create("vanilla", metadata)


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@draws(10, 25, problems())
def test_any_problem_agrees_with_the_oracle(problem):
    problem.check(vanilla(problem.metadata), compiler_options=FAST_COMPILE)


@draws(12, 60, problems(max_length=70))
def test_longer_problems_agree_with_the_oracle(problem):
    problem.check(vanilla(problem.metadata), compiler_options=FAST_COMPILE)


@pytest.mark.slow
def test_the_check_can_fail():
    """Negative controls: a wrong scale, a gradient that is zero, and a missing output are each caught."""
    q, k, v = normal(1, 4, 2, 8), normal(1, 5, 1, 8, seed=1), normal(1, 5, 1, 8, seed=2)
    problem = Problem(query=q, key=k, value=v, options={"return_lse": True})
    operation = vanilla()
    problem.check(operation)
    outputs, gradients = problem.run(operation)
    with pytest.raises(AssertionError, match="attention_outputs"):
        problem.check_outputs(outputs | {"attention_outputs": outputs["attention_outputs"] * 1.001})
    with pytest.raises(AssertionError, match="gradient of key"):
        problem.check_gradients(gradients | {"key": jnp.zeros_like(gradients["key"])})
    with pytest.raises(AssertionError, match="outputs are"):
        problem.check_outputs({"attention_outputs": outputs["attention_outputs"]})
    with pytest.raises(AssertionError, match="logsumexp"):
        problem.check_outputs(outputs | {"logsumexp": outputs["logsumexp"] / np.log(2)})


def test_a_limit_that_is_no_limit_is_refused():
    """Where the same computation in the narrow dtype overflows, every comparison with the limit would pass."""
    for narrow in (np.nan, np.inf):
        with pytest.raises(ValueError, match="the computation in float16 overflows; draw smaller inputs"):
            tolerance(np.ones(2), np.array([1.0, narrow]), np.ones(2), np.float16, 2)


@pytest.mark.parametrize("dims", list(itertools.product((False, True), repeat=4)), ids=str)
@pytest.mark.tier(
    quick=[
        "(False, False, False, False)",
        "(False, False, False, True)",
        "(False, False, True, True)",
        "(False, True, False, False)",
        "(False, True, True, False)",
        "(True, False, False, True)",
        "(True, True, True, True)",
    ]
)
def test_bias_of_every_broadcastable_shape(dims):
    full = (2, 4, 3, 5)
    shape = [size if whole else 1 for size, whole in zip(full, dims, strict=True)]
    q, k, v = normal(2, 3, 4, 8), normal(2, 5, 2, 8, seed=1), normal(2, 5, 2, 6, seed=2)
    Problem(query=q, key=k, value=v, options={"bias": normal(*shape, seed=3), "mask": Causal()}).check(vanilla())


def test_oracle_gradients_are_those_of_finite_differences():
    rng = np.random.default_rng(3)
    arrays = {
        "query": rng.normal(size=(1, 3, 4, 2)),
        "key": rng.normal(size=(1, 4, 2, 2)),
        "value": rng.normal(size=(1, 4, 2, 3)),
        "bias": rng.normal(size=(1, 4, 1, 4)),
        "sinks": rng.normal(size=4),
    }
    mask = rng.random((1, 1, 3, 4)) < 0.6
    mask[..., 1, :] = False
    keep = rng.random((1, 4, 3, 4)) < 0.7
    static = {"mask": mask, "keep": keep, "dropout_prob": 0.3, "logits_soft_cap": 1.5, "softmax_scale": 0.9}
    d_out, d_lse, d_w = rng.normal(size=(1, 3, 4, 3)), rng.normal(size=(1, 4, 3)), rng.normal(size=(1, 4, 3, 4))

    def loss(arrays):
        result = attention(**arrays, **static)
        lse = np.where(np.isfinite(result.logsumexp), result.logsumexp, 0)
        return (d_out * result.out).sum() + (d_lse * lse).sum() + (d_w * result.weights).sum()

    gradients = attention_gradients(**arrays, **static, d_out=d_out, d_logsumexp=d_lse, d_weights=d_w)
    assert set(gradients.values) == set(arrays)
    step = 1e-6
    for name, array in arrays.items():
        for place in np.ndindex(array.shape):
            up, down = array.copy(), array.copy()
            up[place] += step
            down[place] -= step
            slope = (loss(arrays | {name: up}) - loss(arrays | {name: down})) / (2 * step)
            assert gradients.values[name][place] == pytest.approx(slope, abs=2e-8)
        assert (gradients.magnitudes[name] >= np.abs(gradients.values[name]) - 1e-12).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("through", ["mask", "bias", "causal"])
@pytest.mark.tier(quick=["causal-bfloat16"], every=3)
def test_fully_masked_rows_are_0_with_gradients_0(dtype, through):
    q, k, v = (jnp.asarray(normal(1, n, 2, 4, seed=n), dtype) for n in (5, 3, 3))
    mask = np.ones((1, 1, 5, 3), bool)
    mask[0, 0, :2] = False
    options = {
        "mask": {"mask": mask},
        "bias": {"bias": jnp.where(mask, 0.0, -jnp.inf)},
        "causal": {"mask": Causal()},  # T = 5, S = 3: the first two queries come before every key
    }[through]

    def run(q, k, v, sinks):
        result = vanilla()(q, k, v, sinks=sinks, return_lse=True, return_weights=True, **options)
        return result.attention_outputs, result.logsumexp, result.attention_weights

    for sinks in (None, jnp.ones(2)):
        (out, lse, weights), pull_back = jax.vjp(lambda *x: run(*x, sinks), q, k, v)  # noqa: B023
        assert (out[:, :2] == 0).all()
        assert (lse[:, :, :2] == -jnp.inf).all()
        assert (weights[:, :, :2] == 0).all()
        assert jnp.isfinite(out).all()
        assert jnp.isfinite(lse[:, :, 2:]).all()
        dq, dk, dv = pull_back(jax.tree.map(jnp.ones_like, (out, lse, weights)))
        assert (dq[:, :2] == 0).all()
        assert all(jnp.isfinite(g).all() for g in (dq, dk, dv))


@pytest.mark.slow
def test_second_derivatives_with_sinks_and_an_empty_row_are_those_of_the_formula():
    q, k, v = (jnp.asarray(normal(1, n, 2, 3, seed=n)) for n in (4, 3, 3))
    sinks, cotangent = jnp.array([0.5, -1.0]), jnp.asarray(normal(1, 4, 2, 3, seed=9))
    mask = np.tril(np.ones((4, 3), bool), -1)[None, None]  # the first query sees nothing

    def served(q, sinks):
        result = vanilla()(q, k, v, mask=mask, sinks=sinks, return_lse=True)
        return jnp.vdot(result.attention_outputs, cotangent) + jnp.where(mask.any(-1), result.logsumexp**2, 0).sum()

    def formula(q, sinks):
        exponentials = jnp.exp(jnp.einsum("bthd,bshd->bhts", q[:, 1:], k) * 3**-0.5) * mask[:, :, 1:]
        total = exponentials.sum(-1) + jnp.exp(sinks)[:, None]
        out = jnp.einsum("bhts,bht,bshd->bthd", exponentials, 1 / total, v)
        return jnp.vdot(out, cotangent[:, 1:]) + (jnp.log(total) ** 2).sum()

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        found, exact = (jax.jit(jax.hessian(f, (0, 1)))(q, sinks) for f in (served, formula))
    assert all(jnp.abs(x).max() > 0.1 for x in jax.tree.leaves(exact))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_no_array_of_all_scores_is_transposed():
    """Forward and backward: a transpose is a pass over B · H · T · S scores that the products don't need."""
    q, k, v, cotangent = (jnp.ones(shape) for shape in ((1, 5, 4, 3), (1, 7, 2, 3), (1, 7, 2, 6), (1, 5, 4, 6)))

    def both(q, k, v, cotangent):
        out, pull_back = jax.vjp(lambda *x: vanilla()(*x, mask=Causal()).attention_outputs, q, k, v)
        return out, pull_back(cotangent)

    transposed = [e.outvars[0].aval.shape for e in jax.make_jaxpr(both)(q, k, v, cotangent).eqns
                  if e.primitive.name == "transpose"]  # fmt: skip
    assert transposed
    assert not [shape for shape in transposed if 5 in shape and 7 in shape]


def test_causal_is_aligned_at_the_end():
    mask = np.asarray(Causal().dense(1, 1, 2, 4))[0, 0]
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0], [1, 1, 1, 1]])
    mask = np.asarray(Causal(offset=0).dense(1, 1, 2, 4))[0, 0]
    np.testing.assert_array_equal(mask, [[1, 0, 0, 0], [1, 1, 0, 0]])
    mask = np.asarray(Causal(offset=jnp.array([[0], [3]])).dense(2, 1, 1, 4))[:, 0, 0]
    np.testing.assert_array_equal(mask, [[1, 0, 0, 0], [1, 1, 1, 1]])


@pytest.mark.slow
def test_runtime_dtype_and_metadata_defaults():
    q, k, v = normal(1, 4, 2, 8), normal(1, 5, 2, 8, seed=1), normal(1, 5, 2, 8, seed=2)
    metadata = OperationMetadata(runtime_dtype=jnp.bfloat16, softmax_scale=0.2, logits_soft_cap=3.0)
    out = vanilla(metadata)(q, k, v).attention_outputs
    assert out.dtype == jnp.bfloat16
    narrow = Problem(
        query=q.astype(jnp.bfloat16),
        key=k.astype(jnp.bfloat16),
        value=v.astype(jnp.bfloat16),
        options={"softmax_scale": 0.2, "logits_soft_cap": 3.0},
    )
    narrow.check_outputs({"attention_outputs": out})
    # What the call says wins over the metadata.
    out = vanilla(metadata)(q, k, v, softmax_scale=0.7, logits_soft_cap=9.0).attention_outputs
    dataclass_options = {"softmax_scale": 0.7, "logits_soft_cap": 9.0}
    Problem(query=narrow.query, key=narrow.key, value=narrow.value, options=dataclass_options).check_outputs(
        {"attention_outputs": out}
    )


@pytest.mark.slow
def test_mixed_dtypes_compute_in_float32():
    q, k, v = normal(1, 4, 2, 8), normal(1, 5, 2, 8, seed=1).astype(jnp.bfloat16), normal(1, 5, 2, 8, seed=2)
    problem = Problem(query=q, key=k, value=v.astype(np.float16))
    problem.check(vanilla())


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("BTHD", marks=pytest.mark.slow), "BHTD"])
def test_vmap_and_checkpoint_equal_the_loop(layout):
    problem = Problem(
        query=normal(2, 4, 2, 8), key=normal(2, 6, 1, 8, seed=1), value=normal(2, 6, 1, 8, seed=2),
        options={"mask": Causal()}, metadata=OperationMetadata(layout=layout),
    )  # fmt: skip
    operation = vanilla(problem.metadata)
    call = lambda x: problem.call(operation, x)["attention_outputs"]  # noqa: E731
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), problem.inputs)
    each = jnp.stack([call(jax.tree.map(lambda x: x[i], stacked)) for i in range(3)])  # noqa: B023
    np.testing.assert_allclose(jax.vmap(call)(stacked), each, rtol=1e-6, atol=1e-6)
    loss = lambda f: lambda x: (f(x) ** 2).sum()  # noqa: E731
    plain, remat = (jax.grad(loss(f))(problem.inputs) for f in (call, jax.checkpoint(call)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), plain, remat)


@pytest.mark.slow
def test_export_for_every_platform_that_jax_lowers_to():
    q = jax.ShapeDtypeStruct((1, 4, 2, 8), jnp.bfloat16)
    exported = jax.export.export(
        jax.jit(lambda q, k, v: vanilla()(q, k, v, mask=Causal()).attention_outputs), platforms=["cpu", "cuda", "tpu"]
    )(q, q, q)
    again = jax.export.deserialize(exported.serialize())
    x = jnp.asarray(normal(1, 4, 2, 8), jnp.bfloat16)
    Problem(query=np.asarray(x), key=np.asarray(x), value=np.asarray(x), options={"mask": Causal()}).check_outputs(
        {"attention_outputs": again.call(x, x, x)}
    )


@pytest.mark.parametrize(
    "name", ["vanilla", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sdpa", "auto"))]
)
@pytest.mark.slow
def test_float32_stays_float32_where_x64_is_on(name):
    with jax.enable_x64(True):
        q, bias = jnp.asarray(normal(1, 4, 2, 8)), jnp.zeros((1, 1, 4, 4), jnp.float32)
        out, gradient = jax.value_and_grad(
            lambda q: OperationRegistry.create(name)(q, q, q, bias=bias).attention_outputs.sum()
        )(q)
        assert (out.dtype, gradient.dtype) == (jnp.float32, jnp.float32)
        with pytest.raises(ValueError, match="query has dtype float64"):
            OperationRegistry.create(name)(q.astype(jnp.float64), q, q)
        with pytest.raises(ValueError, match="bias has dtype float64"):
            OperationRegistry.create(name)(q, q, q, bias=bias.astype(jnp.float64))


@pytest.mark.slow
def test_on_a_mesh_and_in_shard_map():
    q, k = (jnp.asarray(normal(4, 6, heads, 8, seed=heads)) for heads in (4, 2))
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=axes, devices=jax.devices()[:4])
    spec = jax.P("b", None, "h", None)
    on_mesh = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in (q, k, k)]

    def same(found, expected):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), found, expected)

    def gradients(function):
        return jax.jit(lambda *x: jax.vjp(function, *x)[1](jnp.cos(q)))

    for name in ("vanilla", "sdpa"):
        operation = OperationRegistry.create(name, OperationMetadata(on_unsupported="error"))

        def attend(q, k, v, operation=operation):
            return operation(q, k, v, mask=Causal()).attention_outputs

        expected, exact = jax.jit(attend)(q, k, k), gradients(attend)(q, k, k)
        for function in (attend, jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)):
            same(jax.jit(function)(*on_mesh), expected)
            same(gradients(function)(*on_mesh), exact)
    # Sharded by XLA, dropout draws the same mask as on one device.
    operation = OperationRegistry.create("vanilla", OperationMetadata(dropout_prob=0.5))
    drop = jax.jit(lambda q, k, v: operation(q, k, v, dropout_key=jax.random.key(0)).attention_outputs)
    same(drop(*on_mesh), drop(q, k, k))
