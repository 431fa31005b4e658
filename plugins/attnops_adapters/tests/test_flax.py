"""`attnops_adapters.flax`: values, gradients and conventions of linen's and nnx's attention layers, and their traps."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from framework_attention import assert_same, normal

from attnops import masks
from attnops.masks import Causal, Segments, SlidingWindow
from attnops_adapters.flax import attention_fn
from attnops_adapters.jax_nn import use

# Two batch dimensions, T 6, width 16.
INPUTS = normal(2, 3, 6, 16)
LENGTHS = jnp.array([[6, 3, 1], [2, 6, 5]])[..., None] > jnp.arange(6)
OURS = attention_fn("vanilla", on_unsupported="error")
MASKS = {
    "none": None,
    "causal": linen.make_causal_mask(LENGTHS),
    "padding": linen.make_attention_mask(jnp.ones_like(LENGTHS), LENGTHS),
    "both": linen.combine_masks(
        linen.make_causal_mask(LENGTHS), linen.make_attention_mask(jnp.ones_like(LENGTHS), LENGTHS)
    ),
    "of one row": linen.make_causal_mask(jnp.ones(6)),
    "of rank two": jnp.tril(jnp.ones((6, 6), bool)),
}


def some(*names: str):
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in MASKS]


def of_linen(**options):
    return linen.MultiHeadAttention(num_heads=4, **options)


PARAMS = of_linen().init(jax.random.key(0), INPUTS)


def of_nnx(**options):
    return nnx.MultiHeadAttention(4, 16, 16, **{"decode": False, "rngs": nnx.Rngs(0)} | options)


@pytest.mark.slow
@pytest.mark.parametrize("name", some("both"))
@pytest.mark.tier(every=3)
def test_linen_has_the_same_values_gradients_and_weights(name: str) -> None:
    def attend(layer):
        def run(x):
            params = jax.tree.map(lambda p: p.astype(x.dtype), PARAMS)
            return layer.apply(params, x, mask=MASKS[name], sow_weights=True, mutable=["intermediates"])

        return run

    assert_same(attend(of_linen(attention_fn=OURS)), attend(of_linen()), INPUTS)


@pytest.mark.parametrize("kv_heads", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", some())
@pytest.mark.tier(every=4)
def test_nnx_has_the_same_values_and_gradients(name: str, kv_heads: int) -> None:
    mask = MASKS[name]

    def attend(**options):
        # Without a batch, since GQA of nnx takes one batch dimension at most.
        def run(x):
            layer = of_nnx(num_kv_heads=kv_heads, **options)
            graph, state = nnx.split(layer)
            layer = nnx.merge(graph, jax.tree.map(lambda p: p.astype(x.dtype), state))
            return layer(x, mask=None if mask is None else mask.reshape(-1, 1, 6, 6)[:1])

        return run

    assert_same(attend(attention_fn=OURS), attend(), INPUTS[0, :1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.tier(quick=["True"])
def test_nnx_sows_the_same_weights(causal: bool) -> None:
    found = []
    for options in ({"attention_fn": OURS}, {}):
        layer = of_nnx(**options)
        _, sown = nnx.capture(layer, nnx.Intermediate)(INPUTS[0], sow_weights=True, is_causal=causal)
        found.append(sown["attention_weights"][0])
    assert found[0].shape == (3, 4, 6, 6)
    np.testing.assert_allclose(*found, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", pytest.param("nnx", marks=pytest.mark.slow)])
@pytest.mark.tier(every=2)
def test_decoding_with_a_cache_has_the_same_values(kind: str) -> None:
    found = []
    for options in ({"attention_fn": attention_fn("flash")}, {}):
        if kind == "linen":
            layer = of_linen(**options, decode=True)
            cache = layer.init(jax.random.key(0), INPUTS)["cache"]
            outputs = []
            for t in range(4):
                token = INPUTS[:, :, t : t + 1]
                out, changed = layer.apply({**PARAMS, "cache": cache}, token, mutable=["cache"])
                cache = changed["cache"]
                outputs.append(out)
        else:
            layer = of_nnx(**options)
            layer.init_cache((3, 6, 16))
            outputs = [layer(INPUTS[0, :, t : t + 1], decode=True) for t in range(4)]
        found.append(jnp.stack(outputs))
    np.testing.assert_allclose(*found, atol=2e-6)


def test_linen_passes_each_parameter_that_it_filters() -> None:
    """A function of ``**kwargs`` would get none of them, not even the mask."""
    filtered = {"mask", "dropout_rng", "dropout_rate", "broadcast_dropout", "deterministic", "dtype", "precision"}
    filtered |= {"force_fp32_for_softmax", "qk_attn_weights_einsum", "attn_weights_value_einsum"}
    theirs = set(inspect.signature(linen.dot_product_attention).parameters)
    theirs |= set(inspect.signature(nnx.dot_product_attention).parameters)
    assert filtered <= theirs <= set(inspect.signature(OURS).parameters)


@pytest.mark.slow
def test_masks_are_no_biases() -> None:
    mask = jnp.tril(jnp.ones((1, 1, 6, 6), jnp.float32))
    q = INPUTS[0].reshape(3, 6, 4, 4)
    out = OURS(q, q, q, mask=mask)
    np.testing.assert_allclose(out[:, 0], q[:, 0], atol=1e-6)  # query 0 sees key 0 alone
    np.testing.assert_allclose(out, linen.dot_product_attention(q, q, q, mask=mask), atol=1e-6)


@pytest.mark.slow
def test_causal_is_aligned_at_the_start() -> None:
    q, k = normal(1, 3, 2, 8), normal(1, 5, 2, 8)
    expected = nnx.dot_product_attention(q, k, k, is_causal=True)
    np.testing.assert_allclose(OURS(q, k, k, is_causal=True), expected, atol=1e-6)
    np.testing.assert_allclose(OURS(q, k, k, is_causal=True)[:, 0], k[:, 0], atol=1e-6)


def test_causal_attention_of_one_query_is_refused_since_it_would_see_one_key() -> None:
    """As nnx up to 0.12.8 calls it for a token of its cache."""
    q, k = INPUTS[0, :, :1].reshape(3, 1, 4, 4), INPUTS[0].reshape(3, 6, 4, 4)
    with pytest.raises(ValueError, match="only key 0"):
        OURS(q, k, k, mask=jnp.ones((3, 1, 1, 6)), is_causal=True)


def test_a_fully_masked_row_is_0_where_flax_has_the_mean() -> None:
    q = INPUTS[0].reshape(3, 6, 4, 4)
    hidden = jnp.zeros((1, 1, 6, 6))
    assert (np.asarray(OURS(q, q, q, mask=hidden)) == 0).all()
    mean = np.broadcast_to(q.mean(1, keepdims=True), q.shape)
    np.testing.assert_allclose(linen.dot_product_attention(q, q, q, mask=hidden), mean, atol=1e-5)


def dropped(broadcast: bool, heads: int = 4, kv_heads: int = 4, **options) -> np.ndarray:
    """Weights after dropout of 0.4, [2, 3, heads, 50, 50], whose values before it are 1 / 50, or 0 where masked."""
    q, k = jnp.zeros((2, 3, 50, heads, 8)), jnp.zeros((2, 3, 50, kv_heads, 8))
    identity = jnp.broadcast_to(jnp.eye(50)[:, None], (2, 3, 50, kv_heads, 50))
    given = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.4, "broadcast_dropout": broadcast} | options
    return np.asarray(jax.jit(lambda *arrays: OURS(*arrays, **given))(q, k, identity)).swapaxes(2, 3)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.slow
@pytest.mark.tier(every=3)
def test_dropout_is_of_its_rate_and_shared_where_it_is_broadcast(broadcast: bool, kv_heads: int) -> None:
    weights = dropped(broadcast, kv_heads=kv_heads)
    kept = weights > 0
    assert abs(kept.mean() - 0.6) < 0.03
    np.testing.assert_allclose(weights[kept], 1 / 50 / 0.6, rtol=1e-5)
    assert (kept == kept[:1, :1, :1]).all() == broadcast
    if not broadcast:
        assert np.unique(kept.reshape(24, -1), axis=0).shape[0] == 24
    assert (dropped(broadcast, kv_heads=kv_heads, dropout_rng=jax.random.key(1)) != weights).any()
    assert (dropped(broadcast, kv_heads=kv_heads, deterministic=True) > 0).all()


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("rows", [(), (2, 3), (1, 3)], ids=str)
@pytest.mark.tier(quick=["(1, 3)-4"], every=3)
def test_dropout_that_is_broadcast_has_masks_and_biases_by_row_and_head(rows: tuple[int, ...], heads: int) -> None:
    shape = (*rows, heads, 50, 50)
    mask = np.random.default_rng(0).random(shape) < 0.5
    bias = normal(*shape)
    shared = dropped(True)[0, 0, 0] > 0
    weights = np.where(mask, np.exp(bias), 0)
    weights = weights / weights.sum(-1, keepdims=True) * shared / 0.6
    found = dropped(True, kv_heads=2, mask=mask, bias=bias)
    np.testing.assert_allclose(found, np.broadcast_to(weights, found.shape), atol=1e-6)


@pytest.mark.slow
def test_layers_train_with_dropout() -> None:
    """The output is linear in the values, so that a finite difference is exact, with the same weights dropped."""
    layer = of_linen(attention_fn=attention_fn("flash"), dropout_rate=0.3, deterministic=False)

    @jax.jit
    def loss(params):
        return layer.apply(params, INPUTS, mask=MASKS["causal"], rngs={"dropout": jax.random.key(1)}).sum()

    def moved(by):
        params = jax.tree.map(lambda x: x, PARAMS)
        params["params"]["value"]["kernel"] = params["params"]["value"]["kernel"] + by
        return loss(params)

    gradient = jax.grad(loss)(PARAMS)["params"]["value"]["kernel"].sum()
    np.testing.assert_allclose(gradient, (moved(0.5) - moved(-0.5)), rtol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.slow
def test_the_softmax_is_float32(dtype) -> None:
    q, k = normal(1, 9, 2, 8), normal(1, 400, 2, 8)

    def error(function) -> float:
        with jax.enable_x64(True):
            given = [np.asarray(jnp.asarray(x, dtype)).astype(np.float64) for x in (q, k, k)]
            exact = linen.dot_product_attention(*given)
        found = function(*(jnp.asarray(x, dtype) for x in (q, k, k)))
        return float(np.abs(np.asarray(found).astype(np.float64) - exact).max())

    assert error(lambda *a: OURS(*a)) <= error(linen.dot_product_attention)


def test_the_dtype_is_the_calls() -> None:
    q = INPUTS[0].reshape(3, 6, 4, 4)
    assert OURS(q, q, q, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert OURS(q.astype(jnp.bfloat16), q, q).dtype == jnp.float32
    doubled = OURS(q, q, q, promote_dtype=lambda arrays, dtype: tuple(jnp.asarray(2 * x) for x in arrays))
    np.testing.assert_allclose(doubled, OURS(2 * q, 2 * q, 2 * q), atol=1e-6)


@pytest.mark.slow
def test_precision_is_the_calls_then_the_metadatas_then_that_of_jax(monkeypatch) -> None:
    from attnops.dispatch.registry import OperationRegistry

    create, seen = OperationRegistry.create, []
    monkeypatch.setattr(
        OperationRegistry, "create", lambda name, metadata: seen.append(metadata.precision) or create(name, metadata)
    )
    q = INPUTS[0].reshape(3, 6, 4, 4)
    own = attention_fn("vanilla", precision="high")
    seen.clear()
    for function, given in ((OURS, None), (own, None), (own, "highest"), (own, ("highest", "highest"))):
        function(q, q, q, precision=given)
    with jax.default_matmul_precision("float32"):
        OURS(q, q, q)
    P = jax.lax.Precision
    assert seen == [P.DEFAULT, P.HIGH, P.HIGHEST, P.HIGHEST, P.HIGHEST]


@pytest.mark.slow
def test_a_structured_mask_of_the_layer_holds_in_addition() -> None:
    q = INPUTS[0].reshape(3, 6, 4, 4)
    window = attention_fn("vanilla", mask=Causal() & SlidingWindow(1, 0))
    band = jnp.tril(jnp.ones((6, 6))) - jnp.tril(jnp.ones((6, 6)), -2)
    np.testing.assert_allclose(window(q, q, q), OURS(q, q, q, mask=band), atol=1e-6)
    padding = MASKS["padding"][0]
    both = OURS(q, q, q, mask=linen.combine_masks(band[None, None], padding))
    np.testing.assert_allclose(window(q, q, q, mask=padding), both, atol=1e-6)


@pytest.mark.parametrize("mask", ["Causal() & SlidingWindow(2, 0)", "Chunked(3)", "Causal(offset=0)"])
def test_a_layers_mask_is_refused_for_a_token_of_a_cache_unless_causal(mask: str) -> None:
    q, k = INPUTS[0, :, :1].reshape(3, 1, 4, 4), INPUTS[0].reshape(3, 6, 4, 4)
    seen = jnp.arange(6) <= 2  # the cache's mask
    with pytest.raises(ValueError, match="T=1 query and S=6 keys"):
        attention_fn("vanilla", mask=eval(mask, vars(masks)))(q, k, k, mask=seen)
    causal = attention_fn("vanilla", mask=Causal())
    np.testing.assert_array_equal(causal(q, k, k, mask=seen), OURS(q, k, k, mask=seen))


@pytest.mark.slow
def test_a_layers_function_is_refused_where_dropout_takes_heads_apart() -> None:
    q = INPUTS[0].reshape(3, 6, 4, 4)
    function = attention_fn("vanilla", mask=masks.MaskFn(lambda b, h, q, kv: (kv + h) % 2 == 0))
    dropout = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.1}
    with pytest.raises(ValueError, match="broadcast_dropout=True"):
        function(q, q, q, **dropout)
    assert function(q, q, q, **dropout, broadcast_dropout=False).shape == q.shape


@pytest.mark.slow
def test_a_layer_of_nnx_trains_with_dropout() -> None:
    layer = of_nnx(attention_fn=attention_fn("flash"), dropout_rate=0.3, deterministic=False)
    graph, state = nnx.split(layer)

    @jax.jit
    def loss(state, x):
        model = nnx.merge(graph, state)
        return (model(x, mask=MASKS["causal"][0, :1]) ** 2).sum(), nnx.split(model)[1]

    (first, after), gradient = jax.value_and_grad(loss, argnums=1, has_aux=True)(state, INPUTS[0])
    second, _ = loss(after, INPUTS[0])
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0
    assert first != second  # other weights are dropped at each call
    assert loss(state, INPUTS[0])[0] == first


def test_precisions_of_both_operands_are_compared_by_what_they_mean() -> None:
    q = INPUTS[0].reshape(3, 6, 4, 4)
    assert OURS(q, q, q, precision=(jax.lax.Precision.HIGHEST, "highest")).shape == q.shape
    with (
        jax.default_matmul_precision("BF16_BF16_F32"),
        pytest.raises(ValueError, match="jax_default_matmul_precision='BF16_BF16_F32'"),
    ):
        OURS(q, q, q)


@pytest.mark.slow
def test_nnx_without_an_attention_fn_is_served_within_use() -> None:
    """NNX looks `jax.nn.dot_product_attention` up at each call; a fully masked row tells whose it is."""
    q, hidden = INPUTS[0].reshape(3, 6, 4, 4), jnp.zeros((1, 1, 6, 6))
    with use("vanilla"):
        assert (np.asarray(nnx.dot_product_attention(q, q, q, mask=hidden)) == 0).all()
    assert np.asarray(nnx.dot_product_attention(q, q, q, mask=hidden)).any()


def test_equal_functions_are_equal_and_hashable() -> None:
    """Or else a module that holds one would be compiled again."""
    assert attention_fn("flash", mask=Causal()) == attention_fn("flash", mask=Causal())
    assert hash(attention_fn("flash")) == hash(attention_fn("flash"))
    assert attention_fn("flash") != attention_fn("vanilla")


Q = jnp.ones((2, 6, 4, 8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum.*None"),
        ({"attn_weights_value_einsum": jnp.einsum}, "attn_weights_value_einsum.*None"),
        ({"einsum_dot_general": jax.lax.dot_general}, "einsum_dot_general.*None"),
        ({"dropout_rate": 0.1}, "dropout_rate=0.1.*dropout_rng"),
        ({"dropout_rate": 1.5, "dropout_rng": jax.random.key(0)}, "1.5"),
        ({"precision": ("high", "highest")}, "differs between the operands"),
        ({"precision": jax.lax.DotAlgorithmPreset.BF16_BF16_F32}, "algorithms are not supported"),
        ({"mask": jnp.ones((3, 1, 6, 6))}, r"mask has shape \(3, 1, 6, 6\)"),
        ({"mask": jnp.ones((1, 2, 1, 6, 6))}, "5 dimensions"),
        ({"bias": jnp.ones((2, 3, 6, 6))}, "bias"),
        ({"query": jnp.ones((6, 8))}, "batch"),
        ({"mask": jnp.ones((1, 3, 6, 6)), "dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}, "3 heads, .*H=4"),
        ({"key": jnp.ones((3, 6, 4, 8)), "value": jnp.ones((3, 6, 4, 8))}, "same batch"),
        ({"key": jnp.ones((2, 6, 3, 8)), "value": jnp.ones((2, 6, 3, 8))}, "heads"),
    ],
)
def test_what_is_not_served_is_refused(change, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OURS(**{"query": Q, "key": Q, "value": Q} | change)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"operation": "flsh"}, "flsh"),
        ({"layout": "BHTD"}, "layout='BHTD' must not be given: the layer determines it"),
        ({"dropout_prob": 0.1}, "dropout_prob=0.1 must not be given: the layer determines it"),
        ({"mask": Segments(jnp.zeros((2, 6), int))}, "has arrays"),
    ],
)
@pytest.mark.tier(slow=["options3-has arrays"])
def test_what_a_function_can_not_have_is_refused(options, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        attention_fn(**options)
