"""Symbolic dimensions, of `jax.export.symbolic_shape`: served, or refused with a reason."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attnops import Limits, OperationMetadata, OperationRegistry, UnsupportedError, UnsupportedWarning, explain
from attnops.biases import ALiBi, ScoreFn
from attnops.masks import Ancestors, Causal, Lengths, MaskFn, Segments, SlidingWindow

# Without optimisations, XLA's older emitters of fusions take all memory for a program of symbolic shapes.
pytestmark = pytest.mark.optimised

B, T, H, K, D = 3, 10, 4, 2, 8
# The platforms that an installed plugin has kernels for.
PLUGINS = {"tpu": "attnops_tpu", "cuda": "attnops_triton"}
KERNELS = [platform for platform, package in PLUGINS.items() if importlib.util.find_spec(package)]
TRAIN = OperationMetadata(platform="cpu", block_q=8, block_k=8)


def draw(*shape):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), jnp.float32)


CASES = {
    "plain": ((), lambda: {}),
    "Causal": ((), lambda: {"mask": Causal() & SlidingWindow(5, 0)}),
    "Segments": ((jnp.arange(B * T).reshape(B, T) % 10 // 4,), lambda ids: {"mask": Causal() & Segments(ids)}),
    "Lengths": ((jnp.array([4, 10, 0]),), lambda n: {"mask": Lengths(n)}),
    "Ancestors": ((jnp.arange(B * T).reshape(B, T) % 10 // 2 - 1,), lambda parents: {"mask": Ancestors(parents)}),
    "bias by batch": ((draw(B, 1, T, T),), lambda bias: {"bias": bias}),
    "ALiBi and sinks": ((), lambda: {"bias": ALiBi(np.ones(H)), "sinks": jnp.ones(H)}),
}


def exported(call, shapes, *arrays):
    """What a program exported for these shapes, of symbols, gives for these arrays."""
    given = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, arrays, strict=True)]
    program = export.export(jax.jit(call))(*given)
    return export.deserialize(program.serialize()).call(*arrays)


@pytest.mark.parametrize(
    ("name", "gradients"),
    [(name, False) for name in CASES]
    + [pytest.param(name, True, marks=pytest.mark.slow) for name in ("Segments", "bias by batch")],
)
@pytest.mark.slow
@pytest.mark.tier(every=3)
def test_flash_serves_a_symbolic_batch(name, gradients):
    arrays, options = CASES[name]
    (b,) = export.symbolic_shape("b")
    qkv = draw(B, T, H, D), draw(B, T, K, D), draw(B, T, K, D)
    shapes = [(b, *x.shape[1:]) for x in (*qkv, *arrays)]

    def run(operation):
        def call(q, k, v, *given):
            if not gradients:
                return operation(q, k, v, **options(*given)).attention_outputs
            out, pull_back = jax.vjp(lambda *x: operation(*x, **options(*given)).attention_outputs, q, k, v)
            return out, pull_back(2 * out)

        return call

    found = exported(run(OperationRegistry.create("flash", TRAIN)), shapes, *qkv, *arrays)
    expected = jax.jit(run(OperationRegistry.create("vanilla")))(*qkv, *arrays)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("shapes", ["t, t", "t, s"])
@pytest.mark.slow
def test_symbolic_lengths_run_on_vanilla_and_have_a_reason_on_flash(shapes):
    t, s = export.symbolic_shape(shapes)
    q, k = draw(1, 5, H, D), draw(1, 5 if t == s else 7, K, D)
    of_query, of_key = (1, t, H, D), (1, s, K, D)

    def call(operation):
        return lambda q, k: operation(q, k, k, mask=Causal() & SlidingWindow(2, 0)).attention_outputs

    vanilla, flash, auto = (OperationRegistry.create(name, TRAIN) for name in ("vanilla", "flash", "auto"))
    expected = call(vanilla)(q, k)
    for operation in (vanilla, auto):
        np.testing.assert_allclose(exported(call(operation), [of_query, of_key], q, k), expected, atol=1e-6)
    with pytest.raises(UnsupportedError, match=r'query_length=t: must be a number when tracing.*or create "vanilla"'):
        exported(call(flash), [of_query, of_key], q, k)
    request = auto.request(*(jax.ShapeDtypeStruct(x, q.dtype) for x in (of_query, of_key, of_key)))
    assert "query_length=t: must be a number when tracing, not symbolic" in str(explain(request))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "b", "t"), [("b", 3, 10), ("t", 3, 5)])
def test_functions_of_symbolic_scores(shape, b, t):
    vanilla = OperationRegistry.create("vanilla", TRAIN)

    def call(q, k):
        mask = MaskFn(lambda b, h, q, kv: (q >= kv) | (b == 1))
        bias = ScoreFn(lambda score, b, h, q, kv: score + (q - kv) * 0.1 * b)
        return vanilla(q, k, k, mask=mask, bias=bias).attention_outputs

    (symbol,) = export.symbolic_shape(shape)
    B, T = (symbol, t) if shape == "b" else (b, symbol)
    q, k = draw(b, t, H, D), draw(b, t, K, D)
    np.testing.assert_allclose(exported(call, [(B, T, H, D), (B, T, K, D)], q, k), call(q, k), atol=1e-6)


@pytest.mark.slow
def test_a_tree_of_symbolically_many_drafts():
    t, s = export.symbolic_shape("t, s")
    q, k, parents = draw(2, 5, H, D), draw(2, 9, K, D), jnp.array([[-1, 0, 0, 1, 3], [-1, -1, 0, 1, 2]])
    vanilla = OperationRegistry.create("vanilla", TRAIN)

    def call(q, k, parents):
        return vanilla(q, k, k, mask=Ancestors(parents)).attention_outputs

    found = exported(call, [(2, t, H, D), (2, s, K, D), (2, t)], q, k, parents)
    np.testing.assert_allclose(found, call(q, k, parents), atol=1e-6)


@pytest.mark.parametrize("name", ["vanilla", "flash", "auto"])
def test_symbolic_heads_are_refused_with_a_reason(name):
    operation = OperationRegistry.create(name)
    for shape, text in (
        ("2, 5, 2*h, 8", r"heads=2\*h: must be a number"),
        ("2, 5, 4, d", "head_dim=d: must be a number"),
    ):
        q = jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.float32)
        with pytest.raises(UnsupportedError, match=text):
            export.export(jax.jit(lambda q: operation(q, q, q).attention_outputs))(q)


def test_limits_name_dimensions():
    with pytest.raises(ValueError, match=r"symbolic=\['heads'\] must be among \['batch', 'length'\]"):
        Limits(symbolic=frozenset({"heads"}))


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.slow
def test_a_kernel_leaves_a_symbolic_batch_to_the_native_forward(platform):
    (b,) = export.symbolic_shape("b")
    flash = OperationRegistry.create("flash", OperationMetadata(platform=platform, interpret=True))
    q = draw(B, T, H, D)
    with pytest.warns(UnsupportedWarning, match="batch=b: must be a number when tracing, not symbolic"):
        found = exported(lambda q: flash(q, q, q).attention_outputs, [(b, T, H, D)], q)
    expected = OperationRegistry.create("vanilla")(q, q, q).attention_outputs
    np.testing.assert_allclose(found, expected, atol=1e-6)
