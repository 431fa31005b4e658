"""Every strategy and order agrees with one device, by the oracle and the tolerance rule."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from attnops import OperationMetadata, OperationRegistry, UnsupportedError, explain
from attnops.masks import Causal, KeyPadding, MaskFn, Segments, SlidingWindow
from attnops.sharding import AxisRules, create_mesh
from attnops_ring import positions, reorder, restore
from attnops_ring.block import Inner
from attnops_ring.operation import STRATEGIES, needed_hops
from attnops_ring.orders import ORDERS, Order
from attnops_ring.slices import Chunk, sees_any, slice_mask
from attnops_testing import attention, attention_gradients
from attnops_testing.features import FEATURES as FEATURES_OF_THE_SUITE
from attnops_testing.features import combine
from attnops_testing.not_finite import check_not_finite
from attnops_testing.problem import FAST_COMPILE

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
TWO_AXES = AxisRules(query_length=("r", "u"), kv_length=("r", "u"))


def check(names: tuple[str, ...], cp: int, strategy: str, order: str, batch: int = 1, **fields: Any) -> None:
    """Outputs and gradients on ``cp`` devices along the sequence, and ``batch`` along the batch, are the oracle's."""
    across = min(cp, 2) if strategy == "usp" else 1
    ring = cp // across
    axes = ((batch, ring, across), ("dp", "r", "u")) if strategy == "usp" else ((batch, cp), ("dp", "sp"))
    mesh = create_mesh(*axes, devices=jax.devices()[: batch * cp])
    rules = TWO_AXES if strategy == "usp" else AxisRules()
    spec = dataclasses.replace(combine(names), **fields)
    problem = spec.problem(OperationMetadata(mesh=mesh, axis_rules=rules, on_unsupported="error"))
    operation = OperationRegistry.create("ring", problem.metadata)

    class Reordered:
        """A model that reorders its tokens."""

        metadata = problem.metadata

        def __call__(self, *qkv: Any, **options: Any) -> Any:
            axis = 1 if problem.metadata.layout == "BTHD" else 2
            out = operation(*(reorder(x, ring, order, axis) for x in qkv), strategy=strategy, order=order, **options)
            lse = None if out.logsumexp is None else restore(out.logsumexp, ring, order, axis=2)
            return out.replace(attention_outputs=restore(out.attention_outputs, ring, order, axis), logsumexp=lse)

    class AsItIs(Reordered):
        def __call__(self, *qkv: Any, **options: Any) -> Any:
            return operation(*qkv, strategy=strategy, order=order, **options)

    problem.check((AsItIs if order == "contiguous" else Reordered)(), compiler_options=FAST_COMPILE)  # type: ignore[arg-type]


# Combinations of the suite's features.
FEATURES = {
    "documents": ("Segments", "GQA", "logsumexp"),
    "traced documents": ("traced Segments", "MQA", "soft cap"),
    "window": ("SlidingWindow", "ALiBi", "sinks"),
    "window per head": ("mask per head", "bias [1, H, T, S]"),
    "window per batch": ("mask per batch", "ScoreFn"),
    "function": ("MaskFn", "RelativePosition", "D ≠ Dv"),
    "lengths": ("Lengths", "bias [B, 1, 1, S]"),
    "positions": ("mask.at(positions)", "logsumexp"),
    "drafts": ("traced Ancestors", "GQA"),
    "dense": ("Dense", "bias [B, H, T, S]"),
    "rows that see nothing": ("fully masked rows", "sinks", "logsumexp"),
    "tiles that see nothing": ("fully masked tiles", "GQA"),
    "not, or": ("~mask", "bfloat16"),
    "padding": ("NaN behind KeyPadding", "layout BHTD"),
    "very low scores": ("bias near finfo.min", "GQA"),
}
# Also: lengths that do not divide, which only the contiguous order accepts.
CONTIGUOUS = {
    "T < S": ("KeyPadding", "T < S"),
    "T > S": ("Causal", "T > S", "dropout"),
    "odd lengths": ("Causal", "odd lengths", "GQA"),
    "odd lengths, NaN": ("NaN behind Causal(offset)", "odd lengths"),
}
# The conformance suite has every feature with the strategy and order that are the defaults.
QUICK = {("ring", "zigzag", "documents"), ("ulysses", "contiguous", "documents"), ("usp", "contiguous", "T < S")}
# Features that orders and strategies handle differently: documents, heads, and lengths that do not divide.
SLOW = ("documents", "window per head", "T > S")


def cases() -> list[Any]:
    """Every feature for every strategy, in one order after the other."""
    found = []
    for (i, strategy), (j, order) in itertools.product(enumerate(STRATEGIES), enumerate(ORDERS)):
        for k, name in enumerate([*FEATURES, *(CONTIGUOUS if order == "contiguous" else ())]):
            slow = [pytest.mark.slow] if (strategy, order, name) not in QUICK else []
            often = name in SLOW and (order == "zigzag" or strategy == "ring" or name == "T > S")
            if (i + j + k) % len(ORDERS) and slow and not often and name not in CONTIGUOUS:
                continue
            exhaustive = [pytest.mark.exhaustive] if slow and not often else []
            found.append(pytest.param(strategy, order, name, marks=slow + exhaustive))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "order", "name"), cases())
@pytest.mark.tier(every=6)
def test_each_strategy_and_order_agrees_with_the_oracle_on_four_devices(strategy: str, order: str, name: str) -> None:
    check((FEATURES | CONTIGUOUS)[name], 4, strategy, order)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("feature", "strategy", "order"),
    [
        (feature, *each)
        for i, feature in enumerate(FEATURES_OF_THE_SUITE)
        for j, each in enumerate(itertools.product(STRATEGIES, ORDERS))
        if (i + j) % 12 == 0  # each feature once
    ],
)
def test_every_feature_of_the_suite(feature: str, strategy: str, order: str) -> None:
    """On 1, 2, 4 and 8 devices in turn; features with lengths of their own in contiguous order, which accepts any."""
    sizes = (1, 2, 4, 4) if strategy == "ulysses" else (1, 2, 4, 8)  # of 4 heads
    cp = sizes[(list(FEATURES_OF_THE_SUITE).index(feature) + STRATEGIES.index(strategy) + ORDERS.index(order)) % 4]
    fields = {} if feature in ("T < S", "T > S", "T = 1", "odd lengths") else {"T": (3, 0)}
    order = order if fields else "contiguous"
    if feature == "weights":
        with pytest.raises(UnsupportedError, match=r"return_weights"):
            check((feature,), max(cp, 2), strategy, order, **fields)
    else:
        check((feature,), cp, strategy, order, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2, 8])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.tier(every=6)
def test_right_on_other_numbers_of_devices(cp: int, order: str) -> None:
    check(("Causal", "GQA", "sinks", "logsumexp"), cp, "ring", order, T=(3, 0), block=16)


@pytest.mark.slow
def test_batch_and_heads_are_cut_too() -> None:
    check(FEATURES["documents"], 2, "ring", "zigzag", batch=2)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "order"), [*(("ring", order) for order in ORDERS), ("ulysses", "striped")])
@pytest.mark.tier(every=4)
def test_dropout_is_the_unsharded_ones(strategy: str, order: str) -> None:
    check(("Causal", "dropout", "GQA"), 4, strategy, order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.slow
@pytest.mark.tier(every=6)
def test_queries_over_keys_that_devices_share(T: int, order: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, h, 16)), jnp.float32) for n, h in ((T, 4), (40, 2), (40, 2)))
    mask = SlidingWindow(30, 0)
    asked = {"sinks": jnp.ones(4), "return_lse": True, "return_max_logits": True}
    expected = OperationRegistry.create("attnops:vanilla")(q, k, v, mask=mask, **asked)
    mesh = create_mesh((2, 4), ("dp", "sp"), devices=jax.devices())
    metadata = OperationMetadata(mesh=mesh, axis_rules=AxisRules(query_length=None))
    found = OperationRegistry.create("ring", metadata)(
        q, reorder(k, 4, order), reorder(v, 4, order), mask=mask, order=order, **asked
    )  # fmt: skip
    np.testing.assert_allclose(found.max_logits, expected.max_logits, atol=2e-6)
    np.testing.assert_allclose(found.attention_outputs, expected.attention_outputs, atol=2e-6)
    np.testing.assert_allclose(found.logsumexp, expected.logsumexp, atol=2e-6)


def test_auto_takes_the_ring_where_the_sequence_is_cut() -> None:
    x = jnp.ones((1, 64, 2, 16))
    for axes, chosen in ((("sp",), "attnops-ring:ring"), (("dp",), "attnops:flash")):
        metadata = OperationMetadata(mesh=create_mesh((2,), axes, devices=jax.devices()[:2]))
        request = OperationRegistry.create("auto", metadata).request(x, x, x, mask=Causal())
        assert explain(request, metadata=metadata).chosen.name == chosen


@pytest.mark.slow
def test_an_eager_call_with_other_arrays_compiles_nothing() -> None:
    compiled: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(details.get("fun_name", event)))

    rng = np.random.default_rng(0)
    q, k, v, other = (jnp.asarray(rng.normal(size=(1, 16, 2, 8)), jnp.float32) for _ in range(4))
    operation = OperationRegistry.create(
        "ring", OperationMetadata(mesh=create_mesh((2,), ("sp",), devices=jax.devices()[:2]))
    )
    jax.block_until_ready(operation(q, k, v, mask=Causal()))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        found = operation(other, k, v, mask=Causal()).attention_outputs
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    mask = np.tri(16, dtype=bool)[None, None]
    np.testing.assert_allclose(found, attention(other, k, v, mask=mask).out, atol=2e-6)
    # Another mask needs fewer hops: another program.
    found = operation(other, k, v, mask=Causal() & SlidingWindow(1, 0)).attention_outputs
    np.testing.assert_allclose(found, attention(other, k, v, mask=mask & ~np.tri(16, k=-2, dtype=bool)).out, atol=2e-6)


def inner(devices: int, order: Order, length: int) -> Inner:
    return Inner(OperationMetadata(), None, None, length, length, order, devices, False)


@pytest.mark.parametrize(
    ("mask", "order", "hops"),
    [
        (None, "contiguous", 8),
        (Causal(), "contiguous", 8),
        (Causal() & SlidingWindow(9, 0), "contiguous", 2),
        (Causal() & SlidingWindow(100, 0), "contiguous", 3),
        (Causal() & SlidingWindow(129, 0), "contiguous", 4),
        (SlidingWindow(9, 9), "contiguous", 8),  # the keys ahead are those of the previous device, n − 1 hops away
        (MaskFn(lambda b, h, q, kv: q == kv), "contiguous", 8),
    ],
)
def test_windows_end_the_ring_early(mask: Any, order: Order, hops: int) -> None:
    bound = None if mask is None else mask.bind(1, 2, 512, 512)
    assert needed_hops(bound, inner(8, order, 512), (1, 512, 2, 16), 512, 512) == hops


def test_bytes_sent_are_those_of_the_kv_heads() -> None:
    """One permute each of keys and values a hop, and none of them repeated for the query heads."""
    mesh = create_mesh((4,), ("sp",), devices=jax.devices()[:4])
    ring = OperationRegistry.create("ring", OperationMetadata(mesh=mesh))
    q, kv = jax.ShapeDtypeStruct((1, 64, 8, 16), jnp.bfloat16), jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.bfloat16)
    text = jax.jit(lambda q, k, v: ring(q, k, v, mask=Causal()).attention_outputs).lower(q, kv, kv).as_text()
    sent = re.findall(r"collective_permute.*?-> tensor<([^>]*)>", text)
    assert sent == ["1x16x2x16xbf16"] * 2, "in the loop once each, and nowhere else"


@pytest.mark.parametrize("order", ORDERS)
def test_orders_are_undone_by_restore_and_balance_a_causal_mask(order: Any) -> None:
    x = jnp.arange(32).reshape(1, 32)
    laid = reorder(x, 4, order)
    assert (restore(laid, 4, order) == x).all()
    assert (laid[0] == positions(32, 4, order)).all()
    causal = np.tril(np.ones((32, 32)))[positions(32, 4, order)].sum(1).reshape(4, 8).sum(1)
    assert causal.max() <= {"contiguous": 2, "zigzag": 1, "striped": 1.2}[order] * causal.mean()


def both(function: Any, *arguments: Any) -> Any:
    """What a function gives, and its gradients for cotangents of its own making."""
    out, pull_back = jax.vjp(function, *arguments)
    return out, pull_back(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))


def same(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * abs(y).max())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.tier(every=2)
def test_queries_beyond_the_last_see_nothing_of_their_own(strategy: str) -> None:
    """They would see keys that no query sees, and that may hold NaN."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, 4, 8)), jnp.float32) for n in (6, 8, 8))
    mesh = create_mesh((4,), ("sp",), devices=jax.devices()[:4])
    ring: Any = OperationRegistry.create("ring", OperationMetadata(mesh=mesh))
    vanilla: Any = OperationRegistry.create("attnops:vanilla")
    hidden = [x.at[:, 6:].set(jnp.nan) for x in (k, v)]
    mask = Causal(offset=0)
    found = both(lambda *qkv: ring(*qkv, mask=mask, strategy=strategy).attention_outputs, q, *hidden)
    same(found, both(lambda *qkv: vanilla(*qkv, mask=mask).attention_outputs, q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.tier(every=3)
def test_masks_of_mapped_arrays_give_the_values_of_vanilla(strategy: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(3, 1, 16, 4, 8)), jnp.float32) for _ in range(3))
    ids = jnp.asarray(np.sort(rng.integers(0, 3, size=(3, 1, 16))))
    mesh = create_mesh((4,), ("sp",), devices=jax.devices()[:4])
    ring: Any = OperationRegistry.create("ring", OperationMetadata(mesh=mesh))
    vanilla: Any = OperationRegistry.create("attnops:vanilla")

    def of(operation: Any, **options: Any) -> Any:
        def run(q: Any, k: Any, v: Any, ids: Any) -> Any:
            return operation(q, k, v, mask=Causal() & Segments(ids), **options).attention_outputs

        return jax.jit(lambda *qkv: both(lambda *qkv: jax.vmap(run)(*qkv, ids), *qkv))

    same(of(ring, strategy=strategy)(q, k, v), of(vanilla)(q, k, v))


@pytest.mark.slow
def test_lengths_that_do_not_divide_on_explicit_axes() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 15, 2, 8)), jnp.float32) for _ in range(3))
    asked = {"return_lse": True, "return_max_logits": True}
    expected = OperationRegistry.create("attnops:vanilla")(q, k, v, mask=Causal(), **asked)
    mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        ring: Any = OperationRegistry.create("ring")
        for run in (ring, jax.jit(lambda *qkv, **options: ring(*qkv, **options), static_argnames=tuple(asked))):
            same(run(q, k, v, mask=Causal(), **asked).to_dict(), expected.to_dict())


@pytest.mark.slow
def test_a_single_key_that_may_be_padding_gives_the_values_of_vanilla() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, 2, 8)), jnp.float32) for n in (9, 1, 1))
    mesh = create_mesh((4,), ("sp",), devices=jax.devices()[:4])
    mask = KeyPadding(jnp.array([[True], [False]]))
    expected = OperationRegistry.create("attnops:vanilla")(q, k, v, mask=mask).attention_outputs
    for strategy in ("ring", "all_gather"):
        ring: Any = OperationRegistry.create("ring", OperationMetadata(mesh=mesh))
        same(ring(q, k, v, mask=mask, strategy=strategy).attention_outputs, expected)


@pytest.mark.slow
def test_chunks_that_a_mask_of_positions_hides_are_skipped() -> None:
    mask = Causal().at(np.arange(64)).bind(1, 1, 64, 64)
    early, late = (Chunk(first, 16, 1, 64) for first in (0, 48))
    for q, kv, seen in ((early, late, False), (late, early, True)):
        sliced = slice_mask(mask, q, kv, is_padded=False, queries_are_padded=False)
        assert bool(sees_any(sliced, 16, 16)) is seen


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bias NaN", "sink +inf"])
def test_a_row_that_is_nan_is_alone(case: str) -> None:
    mesh = create_mesh((1, 2), ("dp", "sp"), devices=jax.devices()[:2])
    operation = OperationRegistry.create("ring", OperationMetadata(mesh=mesh, on_unsupported="error"))
    check_not_finite(operation, case, sinks=True)


@pytest.mark.parametrize(
    ("shape", "kinds", "T"),
    [((1, 1), (EXPLICIT, EXPLICIT), 8), ((2, 2), (EXPLICIT, EXPLICIT), 8), ((2, 2), (EXPLICIT, AUTO), 7),
     pytest.param((2, 2), (AUTO, EXPLICIT), 7, marks=pytest.mark.slow)],
)  # fmt: skip
@pytest.mark.tier(every=3, quick=["shape0-kinds0-8"])
def test_meshes_that_types_name(shape: tuple[int, int], kinds: tuple[AxisType, AxisType], T: int) -> None:
    """A program taken to one device, documents with types, and lengths that such axes can't cut."""
    rng = np.random.default_rng(0)
    qkv = [rng.normal(size=(2, T, heads, 8)).astype(np.float32) for heads in (2, 1, 1)]
    d_out = rng.normal(size=qkv[0].shape).astype(np.float32)
    ids = (np.arange(T, dtype=np.int32) // 3)[None].repeat(2, 0)
    mesh = jax.make_mesh(shape, ("dp", "sp"), axis_types=kinds, devices=jax.devices()[: shape[0] * shape[1]])
    metadata = OperationMetadata(mesh=mesh, on_unsupported="error")
    specs, operation = metadata.get_shardings(*qkv[:2]), OperationRegistry.create("ring", metadata)
    arrays = [jax.device_put(x, specs.named(specs.query)) for x in qkv]

    @jax.jit
    def run(qkv: Any, ids: Any) -> Any:
        def loss(*qkv: Any) -> Any:
            out = operation(*qkv, mask=Causal() & Segments(ids, ids)).attention_outputs
            return (out * d_out).sum(), out

        return jax.grad(loss, (0, 1, 2), has_aux=True)(*qkv)

    gradients, out = run(arrays, jax.device_put(ids, specs.named(specs.by_query)))
    mask = np.tril(np.ones((T, T), bool)) & (ids[:, None, :, None] == ids[:, None, None, :])
    expected = attention_gradients(*qkv, d_out=d_out, mask=mask).values
    np.testing.assert_allclose(out, attention(*qkv, mask=mask).out, atol=5e-6)
    for name, gradient in zip(("query", "key", "value"), gradients, strict=True):
        np.testing.assert_allclose(gradient, expected[name], atol=5e-6)
    if AUTO not in kinds:
        assert jax.typeof(out).sharding.spec == specs.output


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.tier(quick=["1"])
def test_reordering_keeps_types(axis: int) -> None:
    mesh = jax.make_mesh((2, 2), ("dp", "sp"), axis_types=(EXPLICIT, EXPLICIT), devices=jax.devices()[:4])
    tokens = np.arange(16).reshape(2, 8)
    x = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("dp", "sp")))
    there = jax.jit(lambda x: reorder(x, 2, "zigzag", axis))(x)
    np.testing.assert_array_equal(np.asarray(there)[0], [0, 1, 6, 7, 2, 3, 4, 5])
    assert jax.typeof(there).sharding.spec == jax.P("dp", "sp")
    np.testing.assert_array_equal(restore(there, 2, "zigzag", axis), tokens)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.tier(slow=["ring-zigzag", "all_gather-striped", "ulysses-contiguous", "usp-zigzag"], quick=[])
def test_the_largest_scores_are_those_over_all_devices(strategy: str, order: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 32, h, 8)), jnp.float32) for h in (4, 2, 2))
    options = {"mask": SlidingWindow(9, 0) & KeyPadding(jnp.arange(32)[None] > 3), "sinks": jnp.array([9.0, 0, -9, 1])}

    def run(operation: Any, order: str | None = None) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            given = (x if order is None else reorder(x, 2 if strategy == "usp" else 4, order) for x in (q, k, v))
            named = {} if order is None else {"order": order, "strategy": strategy}
            found = operation(*given, **options, **named, return_max_logits=True)
            out, highest = found.attention_outputs, found.max_logits
            if order is not None:
                n = 2 if strategy == "usp" else 4
                out, highest = restore(out, n, order), restore(highest, n, order, axis=2)
            seen = jnp.where(jnp.isfinite(highest), highest, 0)
            return (out * jnp.cos(out)).sum() + (seen**2).sum(), highest

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    names = ("a", "b") if strategy == "usp" else ("sp",)
    mesh = create_mesh((2, 2) if strategy == "usp" else (4,), names, devices=jax.devices()[:4])
    rules = AxisRules(query_length=names, kv_length=names)
    ring: Any = OperationRegistry.create("ring", OperationMetadata(mesh=mesh, axis_rules=rules))
    found, expected = run(ring, order), run(OperationRegistry.create("attnops:vanilla"))
    assert np.isneginf(expected[1][:, :, :4]).all()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), found, expected)
