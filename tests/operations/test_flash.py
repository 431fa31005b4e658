"""flash: what the conformance suite does not ask of every operation."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import draws

from attnops import (
    OperationMetadata,
    OperationRegistry,
    get_gradient_checkpoint_policy,
)
from attnops.biases import ALiBi, RelativePosition, ScoreFn, alibi_slopes
from attnops.masks import Causal, Coverage, KeyPadding, Lengths, Segments, SlidingWindow, block_map
from attnops.operations.flash.backend import _forward
from attnops.operations.flash.tile_schedule import tile_schedule
from attnops.operations.flash.tile_sizes import choose_problems_per_tile, choose_tiles
from attnops_testing.problem import FAST_COMPILE, Problem
from attnops_testing.strategies import problems

# The core's own kernel also runs as users have it: optimised.
pytestmark = pytest.mark.optimised


def flash(**metadata):
    return OperationRegistry.create("flash", OperationMetadata(on_unsupported="error", **metadata))


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def qkv(B=1, T=40, S=40, H=4, K=2, D=8, Dv=8, dtype=np.float32):
    return (
        normal(B, T, H, D, dtype=dtype),
        normal(B, S, K, D, seed=1, dtype=dtype),
        normal(B, S, K, Dv, seed=2, dtype=dtype),
    )


@draws(6, 15, problems(max_length=70))
def test_any_problem_agrees_with_the_oracle_in_tiny_tiles(problem):
    operation = OperationRegistry.create("flash", problem.metadata.replace(block_q=16, block_k=16))
    problem.check(operation, compiler_options=FAST_COMPILE)


@draws(5, 12, problems(max_length=300))
def test_any_problem_agrees_with_the_oracle_in_the_tables_tiles(problem):
    problem.check(OperationRegistry.create("flash", problem.metadata))


def temporaries(operation, T, options, gradient=True):
    """Bytes of temporaries, from the compiler, of forward and backward."""
    shape = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)
    extra = {name: make(T) for name, make in options.items()}

    def run(q, k, v, extra):
        return operation(q, k, v, **extra).attention_outputs.sum()

    function = jax.grad(run, (0, 1, 2)) if gradient else run
    compiled = jax.jit(function).lower(shape, shape, shape, extra).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="none", marks=pytest.mark.slow),
        pytest.param({"mask": lambda T: Causal() & SlidingWindow(64, 0)}, id="window", marks=pytest.mark.slow),
        pytest.param({"mask": lambda T: Causal() & Segments(jnp.zeros(T, int))}, id="segments"),
        pytest.param({"bias": lambda T: ALiBi(jnp.ones(2))}, id="alibi", marks=pytest.mark.slow),
        pytest.param(
            {"bias": lambda T: RelativePosition(jnp.ones((8, 2)))}, id="relative position", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.tier(every=5)
def test_memory_grows_with_the_length(options):
    operation = flash(block_q=64, block_k=64)
    small, large = (temporaries(operation, T, options) for T in (1024, 4096))
    assert large <= 4.5 * small
    assert large < 4096 * 4096  # one byte a score would be more


@pytest.mark.slow
def test_memory_of_vanilla_grows_with_the_square():
    """The measure above can fail."""
    small, large = (temporaries(OperationRegistry.create("vanilla"), T, {}) for T in (512, 2048))
    assert large > 2 * 4.5 * small


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.tier(quick=["False"])
def test_visits_are_the_tiles_that_are_not_empty(traced):
    ids = np.repeat([0, 1, 2, 3], [30, 50, 10, 38])
    mask = Causal() & Segments(jnp.asarray(ids) if traced else ids)
    coverage = block_map(mask, (1, 1, 128, 128), 16, 16).coverage[0]
    assert isinstance(coverage, np.ndarray) != traced
    for tiles in (coverage, coverage.swapaxes(1, 2)):
        v = tile_schedule(tiles)
        tiles = np.asarray(tiles)
        for row in range(8):
            full, partial = (
                np.asarray(v.columns[0, a:b])
                for a, b in ((v.start[0, row], v.middle[0, row]), (v.middle[0, row], v.stop[0, row]))
            )
            np.testing.assert_array_equal(full, np.nonzero(tiles[0, row] == Coverage.FULL)[0])
            np.testing.assert_array_equal(partial, np.nonzero(tiles[0, row] == Coverage.PARTIAL)[0])
    assert (v.stop - v.start).sum() == (tiles != Coverage.EMPTY).sum() < 64 // 2


@pytest.mark.parametrize("traced", [False, True])
def test_one_column_has_one_loop(traced):
    coverage = np.int8([[[Coverage.FULL], [Coverage.PARTIAL], [Coverage.EMPTY]]])
    v = tile_schedule(jnp.asarray(coverage), False) if traced else tile_schedule(coverage, True)
    assert not v.any_full
    np.testing.assert_array_equal(v.middle, v.start)
    np.testing.assert_array_equal(v.stop - v.start, [[1, 1, 0]])


def test_a_prompt_in_one_tile_multiplies_twice():
    """Queries by keys, and weights by values."""
    q, k, v = qkv(T=32, S=32)
    program = jax.jit(lambda lengths: flash()(q, k, v, mask=Causal() & Lengths(lengths)).attention_outputs)
    text = program.lower(jnp.full(len(q), 20, jnp.int32)).as_text()
    assert text.count("stablehlo.dot_general") == 2


@pytest.mark.slow
def test_empty_tiles_are_not_read():
    """NaN in keys of empty tiles has no effect, though the mask hides no token as padding."""
    q, k, v = qkv(T=64, S=64)
    k[:, :16], v[:, :16] = np.nan, np.nan
    mask = Causal() & SlidingWindow(15, 0)
    out = np.asarray(jax.jit(lambda *x: flash(block_q=16, block_k=16)(*x, mask=mask).attention_outputs)(q, k, v))
    assert np.isfinite(out[:, 32:]).all()
    assert np.isnan(out[:, :16]).any()


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["vanilla", "flash", "sdpa"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.tier(every=6)
def test_padding_may_hold_anything(operation, dtype):
    q, k, v = qkv(B=2, T=40, S=40, dtype=dtype)
    lengths = np.array([23, 40])
    padding = np.arange(40) >= lengths[:, None]
    clean = [np.where(padding[..., None, None], 0, x).astype(dtype) for x in (q, k, v)]
    dirty = [np.where(padding[..., None, None], np.nan, x).astype(dtype) for x in (q, k, v)]
    made = OperationRegistry.create(operation, OperationMetadata(block_q=16, block_k=16))
    for mask in (Lengths(lengths, lengths), Lengths(jnp.asarray(lengths), jnp.asarray(lengths)) & Causal(offset=0)):
        results = [Problem(query=x[0], key=x[1], value=x[2], options={"mask": mask}).run(made) for x in (clean, dirty)]
        jax.tree.map(np.testing.assert_array_equal, *results)
        Problem(query=clean[0], key=clean[1], value=clean[2], options={"mask": mask}).check(made)


@pytest.mark.slow
def test_traced_masks_equal_known_ones():
    problem = dict(zip(("query", "key", "value"), qkv(B=2, T=50, S=50), strict=True))
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (2, 50)))
    tokens = np.random.default_rng(1).random((2, 50)) < 0.8
    operation = flash(block_q=16, block_k=16)

    def run(mask):
        return Problem(**problem, options={"mask": mask}).run(operation)

    known = jax.jit(lambda: run(Causal() & Segments(ids) & KeyPadding(tokens)))()
    traced = jax.jit(run)(Causal() & Segments(jnp.asarray(ids)) & KeyPadding(jnp.asarray(tokens)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), known, traced)


@pytest.mark.parametrize("blocks", [(1, 3), (5, 1)])
@pytest.mark.parametrize("shape", [(1, 1, 7, 1), (1, 1, 1, 11), (1, 4, 7, 11)])
@pytest.mark.slow
@pytest.mark.tier(every=3)
def test_tiles_of_one_query_or_key_agree_with_the_oracle(blocks, shape):
    """A tile of one query or key is no axis that the bias broadcasts over."""
    q, k, v = qkv(T=7, S=11)
    metadata = OperationMetadata(block_q=blocks[0], block_k=blocks[1])
    problem = Problem(query=q, key=k, value=v, options={"bias": normal(*shape)}, metadata=metadata)
    problem.check(flash(block_q=blocks[0], block_k=blocks[1]), compiler_options=FAST_COMPILE)


@pytest.mark.parametrize("sink", [None, -np.inf, 1.0])
@pytest.mark.slow
def test_scores_of_any_finite_size_count(sink):
    """A row that model code hides by a bias of finfo.min is a mean of values; one of −inf, a row that sees nothing."""
    q, k, v = qkv(B=3, T=20, S=20)
    bias = np.zeros((3, 1, 1, 20), np.float32)
    bias[0], bias[1] = np.finfo(np.float32).min, -np.inf
    options = {"bias": bias, "return_lse": True}
    if sink is not None:
        options["sinks"] = np.full(4, sink, np.float32)
    problem = Problem(query=q, key=k, value=v, options=options)
    problem.check(flash(block_q=16, block_k=16), compiler_options=FAST_COMPILE)


@pytest.mark.slow
@pytest.mark.parametrize("learnt", [True, False])
@pytest.mark.tier(every=2)
def test_score_fn_has_the_values_and_gradients_of_vanilla(learnt):
    q, k, v = qkv(T=40, S=50)

    def warp(scores, b, h, q, kv, gain, shift):
        return scores * gain[h] + jnp.sin(shift * (q - kv)) * (kv % 3 == 0)

    args = jnp.array([1.0, 0.5, -1.0, 2.0]), jnp.float32(0.1)

    def loss(operation, x, args):
        bias = ScoreFn(warp, args)
        out = operation(*x, bias=bias, mask=Causal(), return_lse=True)
        return (out.attention_outputs**2).sum() + jnp.where(jnp.isfinite(out.logsumexp), out.logsumexp, 0).sum()

    operations = OperationRegistry.create("vanilla"), flash(block_q=16, block_k=16)
    argnums = (1, 2) if learnt else (1,)
    expected, actual = (
        jax.jit(jax.value_and_grad(loss, argnums), static_argnums=0)(op, (q, k, v), args) for op in operations
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), expected, actual)


@pytest.mark.slow
def test_score_fn_has_no_gradient_for_ids_next_to_what_is_learnt():
    q, k, v = map(jnp.asarray, qkv())
    ids = jnp.arange(40) // 7

    def loss(operation, factors):
        bias = ScoreFn(lambda s, b, h, q, kv, f, ids: s + f[h] * (ids[q] == ids[kv]), (factors, ids))
        return (operation(q, k, v, bias=bias).attention_outputs ** 2).sum()

    operations = OperationRegistry.create("vanilla"), flash(block_q=16, block_k=16)
    expected, actual = (jax.jit(jax.grad(loss, 1), static_argnums=0)(op, jnp.ones(4)) for op in operations)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_score_fn_must_keep_shape_and_dtype():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="must give float32 of the scores' shape"):
        flash()(q, k, v, bias=ScoreFn(lambda s, b, h, q, kv: s.sum()))


@pytest.mark.slow
def test_a_bias_given_as_data_costs_the_backward_pass_nothing():
    q = jax.ShapeDtypeStruct((1, 256, 2, 16), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 2, 256, 256), jnp.float32)
    loss = lambda q, bias: flash(block_q=64, block_k=64)(q, q, q, bias=bias).attention_outputs.sum()  # noqa: E731
    updates = [
        str(jax.make_jaxpr(jax.grad(loss, argnums))(q, bias)).count("dynamic_update_slice") for argnums in (0, (0, 1))
    ]
    assert updates[0] < updates[1]


def test_save_attention_does_not_run_the_forward_again():
    q, k, v = map(jnp.asarray, qkv())

    def passes(policy):
        layer = jax.checkpoint(
            lambda q: flash()(jnp.sin(q), k, v).attention_outputs, policy=get_gradient_checkpoint_policy(policy)
        )
        text = str(jax.make_jaxpr(jax.grad(lambda q: layer(q).sum()))(q))
        return text.count("= attention_pass[")

    # Forward and backward; without the policy the forward is there twice.
    assert (passes("save_attention"), passes("nothing_saveable")) == (2, 3)


@pytest.mark.slow
def test_equal_shapes_are_compiled_once():
    operation = flash()
    before = _forward._cache_size()
    for seed in range(3):
        q = normal(1, 33, 2, 8, seed=seed)
        operation(q, q, q, mask=Causal())
    assert _forward._cache_size() == before + 1


@pytest.mark.slow
def test_weights_are_those_of_vanilla():
    q, k, v = qkv()
    out = flash()(q, k, v, mask=Causal(), return_weights=True, return_lse=True)
    expected = OperationRegistry.create("vanilla")(q, k, v, mask=Causal(), return_weights=True, return_lse=True)
    jax.tree.map(np.testing.assert_array_equal, out, expected)


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["array", "alibi", "score"])
@pytest.mark.tier(every=3)
def test_results_are_float32_and_those_of_vanilla_where_x64_is_on(bias):
    with jax.enable_x64(True):
        q, k, v = map(jnp.asarray, qkv())
        value = {
            "array": normal(1, 4, 40, 40),
            "alibi": ALiBi(alibi_slopes(4)),
            "score": ScoreFn(lambda s, b, h, q, kv: s + (q - kv).astype(s.dtype) / 8),
        }[bias]
        out, expected = (
            jax.jit(lambda *x, op=op: op(*x, bias=value, mask=Causal()).attention_outputs)(q, k, v)
            for op in (flash(block_q=16, block_k=16), OperationRegistry.create("vanilla"))
        )
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_float64_argument_of_a_function_has_a_float64_gradient_where_x64_is_on():
    with jax.enable_x64(True):
        q, k, v = map(jnp.asarray, qkv())

        def loss(operation, slope):
            bias = ScoreFn(lambda s, b, h, q, kv, slope: s - (slope * abs(q - kv)).astype(s.dtype), (slope,))
            return (operation(q, k, v, bias=bias).attention_outputs ** 2).sum()

        actual, expected = (
            jax.jit(jax.grad(loss, 1), static_argnums=0)(op, jnp.float64(0.1))
            for op in (flash(block_q=16, block_k=16), OperationRegistry.create("vanilla"))
        )
        assert actual.dtype == jnp.float64
        np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_chosen_tiles_are_multiples_of_16_and_pad_little():
    for T in (1, 15, 16, 100, 513, 4096, 100_000):
        q, k = choose_tiles(T, T, 4, None, None)
        assert q == T if T < 16 else q % 16 == 0  # one token that is decoded is one row
        assert k % 16 == 0
        assert -(-T // k) * k - T < max(16 * -(-T // k), 16)  # little is padded
    assert choose_tiles(100, 100, 1, 32, 48) == (32, 48)
    assert choose_tiles(640, 640, 1, None, None) == (640, 640)  # not two of 320
    assert choose_tiles(641, 641, 1, None, None) == (336, 336)
    assert choose_tiles(256, 256, 4, None, None) == (256, 256)
    assert choose_tiles(256, 256, 8, None, None) == (64, 256)
    assert choose_problems_per_tile(4, 6, 1, by_batch=False, by_head=False, by_kv_head=False) == 24
    assert choose_problems_per_tile(4, 6, 1, by_batch=True, by_head=False, by_kv_head=False) == 6
    assert choose_problems_per_tile(4, 6, 1, by_batch=True, by_head=True, by_kv_head=True) == 1


@pytest.mark.slow
def test_no_warning_is_given():
    q, k, v = map(jnp.asarray, qkv())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(lambda q: flash()(q, k, v, mask=Causal()).attention_outputs.sum())(q)
