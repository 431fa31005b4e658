"""The ring inside a `jax.shard_map` of the caller, which shards the arrays: values and gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from attnops import OperationMetadata, OperationOutput, OperationRegistry, UnsupportedError
from attnops.biases import Bias
from attnops.dropout import ShiftedKey
from attnops.masks import Causal, Dense, KeyPadding, Mask, MaskFn, Segments, SlidingWindow
from attnops.sharding import AxisRules
from attnops_ring import reorder, restore
from attnops_testing.features import FEATURES as FEATURES_OF_THE_SUITE
from attnops_testing.features import combine
from attnops_testing.problem import FAST_COMPILE

P = jax.sharding.PartitionSpec
CUT_BY_LENGTH = P(None, "sp")
AXES = {"usp": ("r", "u")}
TWO = AxisRules(query_length=("r", "u"), kv_length=("r", "u"))


def mesh_of(*sizes: int, names: tuple[str, ...]) -> jax.sharding.Mesh:
    n = int(np.prod(sizes))
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=jax.devices()[:n])


def token_axes(value: Any, lengths: tuple[int, int]) -> Any:
    """The sharded dimension of each leaf of a mask, bias or array (that of queries if both are); −1 for none."""
    if not isinstance(value, (Mask, Bias)):
        return jax.tree.map(lambda x: np.asarray(token_axis(x, "bhts", lengths) if np.ndim(x) == 4 else -1), value)
    copy = object.__new__(type(value))
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        x = getattr(value, field.name)
        letters = (value.axes or {}).get(field.name, "")
        if isinstance(x, (Mask, Bias)):
            x = token_axes(x, lengths)
        else:
            x = jax.tree.map(
                lambda x, by=letters: np.asarray(token_axis(x, by, lengths)) if hasattr(x, "shape") else x, x
            )  # type: ignore[misc]
        object.__setattr__(copy, field.name, x)
    return copy


def token_axis(x: Any, letters: str, lengths: tuple[int, int]) -> int:
    own = zip(letters[-np.ndim(x) :] if np.ndim(x) else "", np.shape(x), strict=False)
    by = dict(zip("ts", lengths, strict=True))
    return next((i for i, (letter, size) in enumerate(own) if size > 1 and size == by.get(letter)), -1)


class InShardMap:
    """A model that shards its arrays itself, and calls the ring inside `jax.shard_map`."""

    def __init__(
        self, metadata: OperationMetadata, strategy: str, order: str, are_parts: bool, check_vma: bool
    ) -> None:
        self.metadata, self.strategy, self.order = metadata, strategy, order
        self.are_parts, self.check_vma = are_parts, check_vma
        self.axes = AXES.get(strategy, ("sp",))
        self.mesh = mesh_of(*((2, 2) if strategy == "usp" else (4,)), names=self.axes)
        self.operation: Any = OperationRegistry.create("ring", metadata)

    def __call__(self, *qkv: Any, **options: Any) -> Any:
        axis = 1 if self.metadata.layout == "BTHD" else 2
        n = 2 if self.strategy == "usp" else 4
        lengths = qkv[0].shape[axis], qkv[1].shape[axis]
        static = {name: x for name, x in options.items() if not jax.tree.leaves(x) or isinstance(x, (bool, float))}
        given = {name: x for name, x in options.items() if name not in static}
        leaves, tree = jax.tree.flatten(given)
        cut = jax.tree.leaves({name: token_axes(x, lengths) for name, x in given.items()})
        cut = [int(i) if self.are_parts else -1 for i in cut]
        laid = [reorder(x, n, self.order, axis) for x in qkv]  # type: ignore[arg-type]
        laid += [x if i < 0 else reorder(x, n, self.order, i) for x, i in zip(leaves, cut, strict=True)]  # type: ignore[arg-type]
        by_length = P(*(None,) * axis, self.axes)
        specs = [by_length] * 3 + [P() if i < 0 else P(*(None,) * i, self.axes) for i in cut]

        def local(q: Any, k: Any, v: Any, *arrays: Any) -> Any:
            # Whole arrays of numpy's stay what they are, known when tracing.
            own = [x if isinstance(x, np.ndarray) and i < 0 else y for x, y, i in zip(leaves, arrays, cut, strict=True)]
            named = static | jax.tree.unflatten(tree, own)
            return self.operation(q, k, v, strategy=self.strategy, order=self.order, **named)

        lse = P(None, None, self.axes) if options.get("return_lse") else None
        out_specs = OperationOutput(by_length, None, lse)  # type: ignore[arg-type]
        sharded = jax.shard_map(
            local, mesh=self.mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=self.check_vma
        )
        out = sharded(*laid)
        lse = None if out.logsumexp is None else restore(out.logsumexp, n, self.order, axis=2)  # type: ignore[arg-type]
        return out.replace(attention_outputs=restore(out.attention_outputs, n, self.order, axis), logsumexp=lse)  # type: ignore[arg-type]


def check(
    names: tuple[str, ...], strategy: str = "ring", order: str = "contiguous", are_parts: bool = True,
    check_vma: bool = True, **fields: Any,
) -> None:  # fmt: skip
    """Outputs and gradients of whole arrays, sharded by the caller, are the oracle's."""
    rules = TWO if strategy == "usp" else AxisRules()
    spec = dataclasses.replace(combine(names), **({"T": (3, 0)} | fields))
    problem = spec.problem(OperationMetadata(axis_rules=rules, on_unsupported="error"))
    operation: Any = InShardMap(problem.metadata, strategy, order, are_parts, check_vma)
    problem.check(operation, compiler_options=FAST_COMPILE)


# Combinations of the suite's features that together have every kind of array by token in masks and biases.
CASES: dict[str, tuple[tuple[str, ...], str, str, bool, bool]] = {
    "documents": (("traced Segments", "MQA", "logsumexp"), "ring", "contiguous", True, True),
    "documents, zigzag": (("Segments", "dropout"), "ring", "zigzag", True, True),
    "documents, whole": (("Segments", "GQA", "sinks", "logsumexp"), "ring", "contiguous", False, False),
    "bias by query": (("Dense", "bias [B, H, T, S]", "soft cap"), "ring", "striped", True, False),
    "bias by key": (("KeyPadding", "bias [B, 1, 1, S]", "GQA"), "all_gather", "zigzag", True, True),
    "bias whole": (("mask per head", "bias [1, H, T, S]", "layout BHTD"), "all_gather", "contiguous", False, True),
    "positions": (("mask.at(positions)", "RelativePosition", "dropout"), "ulysses", "contiguous", True, True),
    "function": (("MaskFn", "ScoreFn", "sinks"), "ulysses", "zigzag", False, False),
    "two axes": (("traced Ancestors", "ALiBi", "bfloat16"), "usp", "zigzag", True, True),
    "rows that see nothing": (("fully masked rows", "logsumexp", "sinks"), "usp", "contiguous", True, False),
}
QUICK = {"documents"}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]
)
@pytest.mark.slow
@pytest.mark.tier(every=5)
def test_values_and_gradients_are_the_oracles(case: str) -> None:
    names, strategy, order, are_parts, check_vma = CASES[case]
    check(names, strategy, order, are_parts, check_vma)


STRATEGIES = ["ring", "all_gather", "ulysses", "usp"]
# One query can't be sharded.
CUT = [name for name in FEATURES_OF_THE_SUITE if name not in ("weights", "T = 1")]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("feature", CUT)
def test_every_feature_of_the_suite(feature: str) -> None:
    """Strategies, orders, whole arrays and shards, and `check_vma`, each in turn."""
    i = CUT.index(feature)
    lengths: dict[str, Any] = {
        "T < S": {"T": (0, 24), "S": (3, 0)}, "T > S": {"T": (3, 0), "S": (0, 24)}, "odd lengths": {"T": (0, 40)},
    }.get(feature, {})  # fmt: skip
    strategy, order = STRATEGIES[i % 4], ("contiguous", "zigzag", "striped")[i % 3]
    check((feature,), strategy, order, i // 2 % 2 == 0, i % 5 > 1, **lengths)


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def ring_of(**metadata: Any) -> Any:
    return OperationRegistry.create("ring", OperationMetadata(on_unsupported="error", **metadata))


def vanilla_of(**metadata: Any) -> Any:
    return OperationRegistry.create("attnops:vanilla", OperationMetadata(**metadata))


def same(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * abs(y).max())


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.tier(every=2)
def test_layers_in_a_scan_with_checkpoints_train_inside_the_map(check_vma: bool) -> None:
    """The gradients are taken inside `jax.shard_map`, as hand-written loops do, and summed by the loop."""
    mesh = mesh_of(4, names=("sp",))
    x, weights, ids = draw(2, 16, 8), draw(3, 8, 8), jnp.asarray(np.arange(16)[None].repeat(2, 0) // 5)

    def loss(operation: Any, weights: Any, x: Any, ids: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, w: Any) -> Any:
            heads = (x @ w).reshape(*x.shape[:2], 2, 4)
            out = operation(heads, heads, jnp.sin(heads), mask=Causal() & Segments(ids)).attention_outputs
            return x + out.reshape(x.shape), None

        return (jnp.cos(lax.scan(layer, x, weights)[0]) ** 2).sum()

    def step(weights: Any, x: Any, ids: Any) -> Any:
        if check_vma:  # otherwise JAX sums the gradient of weights that all devices have
            weights = lax.pcast(weights, ("sp",), to="varying")
        value, gradient = jax.value_and_grad(functools.partial(loss, ring_of()))(weights, x, ids)
        return lax.psum((value, gradient), "sp")

    cut = P(None, "sp")
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), cut, cut), out_specs=P(), check_vma=check_vma))
    expected = jax.jit(jax.value_and_grad(functools.partial(loss, vanilla_of())))(weights, x, ids)
    same(run(weights, x, ids), expected)


@pytest.mark.slow
def test_a_map_without_jit_has_gradients() -> None:
    mesh, cut = mesh_of(2, names=("sp",)), P(None, "sp")
    x, ring = draw(1, 8, 2, 4), ring_of()
    run = jax.shard_map(
        lambda x: ring(x, x, x, mask=Causal()).attention_outputs, mesh=mesh, in_specs=cut, out_specs=cut
    )
    expected = jax.grad(lambda x: jnp.sin(vanilla_of()(x, x, x, mask=Causal()).attention_outputs).sum())(x)
    same(jax.grad(lambda x: jnp.sin(run(x)).sum())(x), expected)


@pytest.mark.slow
def test_batch_and_heads_that_the_caller_cut_draw_the_unsharded_dropout() -> None:
    """With a key that says where they start."""
    mesh = mesh_of(2, 2, 2, names=("dp", "sp", "tp"))
    q, k, v = draw(2, 16, 4, 8), draw(2, 16, 2, 8), draw(2, 16, 2, 8)
    key, ring = jax.random.key(3), ring_of(dropout_prob=0.3)

    def local(q: Any, k: Any, v: Any) -> Any:
        shifted = ShiftedKey(key, b=lax.axis_index("dp") * q.shape[0], h=lax.axis_index("tp") * q.shape[2])
        return ring(q, k, v, mask=Causal(), dropout_key=shifted).attention_outputs

    spec = P("dp", "sp", "tp")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    expected = vanilla_of(dropout_prob=0.3)(q, k, v, mask=Causal(), dropout_key=key).attention_outputs
    same(run(q, k, v), expected)


@pytest.mark.slow
def test_queries_that_all_devices_have_see_the_keys_of_all() -> None:
    q, k, v = draw(2, 3, 4, 8), draw(2, 16, 2, 8), draw(2, 16, 2, 8)
    is_token = jnp.asarray(np.arange(16) % 5 != 2)[None].repeat(2, 0)
    ring = ring_of(axis_rules=AxisRules(query_length=None))

    def local(q: Any, k: Any, v: Any, is_token: Any) -> Any:
        mask = SlidingWindow(11, 0) & KeyPadding(is_token)
        return ring(q, k, v, mask=mask, order="zigzag", return_lse=True, return_max_logits=True).to_dict()

    cut, mesh = P(None, "sp"), mesh_of(4, names=("sp",))
    laid = [reorder(x, 4, "zigzag") for x in (k, v, is_token)]
    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), cut, cut, cut), out_specs=P()))(q, *laid)
    mask = SlidingWindow(11, 0) & KeyPadding(is_token)
    same(found, vanilla_of()(q, k, v, mask=mask, return_lse=True, return_max_logits=True).to_dict())


def run_in_map(ring: Any, x: jax.Array, cut: Any = CUT_BY_LENGTH, names: Any = ("sp",), **options: Any) -> Any:
    mesh = mesh_of(*((2,) * len(names)), names=names)
    run = jax.shard_map(lambda x: ring(x, x, x, **options).attention_outputs, mesh=mesh, in_specs=cut, out_specs=cut)
    return jax.eval_shape(run, x)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"cut": P()},
            UnsupportedError,
            r"query=float32 \[1, 8, 2, 4\], equal along \['sp'\]: must be a device's shard",
        ),
        ({"mask": Segments(np.zeros(5, int))}, ValueError, r"5 along queries, but must have all 8 or this device's 4"),
        ({"bias": np.zeros((1, 1, 4, 4), np.float32)}, ValueError, r"bias .* shard along queries and along keys"),
        (
            {"x": 2, "mask": Dense(np.ones((1, 1, 1, 2), bool))},
            ValueError,
            r"1 along queries: with one token per device",
        ),
        ({"x": 6, "order": "zigzag"}, ValueError, r"T=6 and S=6 must be multiples of 4"),
        ({"strategy": "usp"}, UnsupportedError, r"needs a sequence sharded over two mesh axes"),
        ({"order": "spiral"}, ValueError, r"order='spiral' is unknown"),
        ({"return_weights": True}, UnsupportedError, r"return_weights"),
        ({"rules": {"query_length": "a"}, "names": ("a", "sp")}, UnsupportedError, r"must give keys, and queries, the"),
    ],
    ids=lambda x: None,
)
def test_what_can_not_be_known_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    given = dict(arguments)
    x, rules = jnp.ones((1, given.pop("x", 8), 2, 4)), AxisRules(**given.pop("rules", {}))
    with pytest.raises(error, match=message):
        run_in_map(ring_of(axis_rules=rules, mode="train"), x, **given)


@pytest.mark.slow
def test_axes_left_to_the_compiler_cut_batches() -> None:
    mesh, cut, ring = mesh_of(2, 2, names=("dp", "sp")), P(None, "sp"), ring_of()
    x = draw(2, 8, 2, 4)

    def loss(x: Any) -> Any:
        run = jax.shard_map(lambda x: ring(x, x, x, mask=Causal()).attention_outputs, mesh=mesh, in_specs=cut,
                            out_specs=cut, axis_names={"sp"})  # fmt: skip
        return jnp.sin(run(x)).sum()

    placed = jax.device_put(x, jax.NamedSharding(mesh, P("dp")))
    expected = jax.grad(lambda x: jnp.sin(vanilla_of()(x, x, x, mask=Causal()).attention_outputs).sum())(x)
    same(jax.jit(jax.grad(loss))(placed), expected)


@pytest.mark.slow
def test_jax_lowers_no_derivative_of_a_map_in_a_map() -> None:
    """Of any function, where the outer map checks what varies: why the ring's axes must be manual in the caller's map.

    When this fails, JAX has it: delete the test, and the limit in the README.
    """
    mesh, cut = mesh_of(2, 2, names=("dp", "sp")), P(None, "sp")

    def gradient(check_vma: bool) -> Any:
        inner = jax.shard_map(lambda x: 2 * x, in_specs=cut, out_specs=cut, axis_names={"sp"})
        outer = jax.shard_map(inner, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"},
                              check_vma=check_vma)  # fmt: skip
        return jax.jit(jax.grad(lambda x: outer(x).sum()))(jnp.ones((2, 2)))

    same(gradient(check_vma=False), jnp.full((2, 2), 2.0))
    with pytest.raises(ValueError, match=r"already bound by a parent sdy\.manual_computation"):
        gradient(check_vma=True)


@pytest.mark.slow
def test_a_map_over_other_axes_has_gradients_without_its_check() -> None:
    mesh, ring = mesh_of(2, 2, names=("dp", "sp")), ring_of()
    x = draw(2, 8, 2, 4)

    def loss(x: Any) -> Any:
        run = jax.shard_map(lambda x: ring(x, x, x, mask=Causal()).attention_outputs, mesh=mesh, in_specs=P("dp"),
                            out_specs=P("dp"), axis_names={"dp"}, check_vma=False)  # fmt: skip
        return jnp.sin(run(x)).sum()

    expected = jax.grad(lambda x: jnp.sin(vanilla_of()(x, x, x, mask=Causal()).attention_outputs).sum())(x)
    same(jax.jit(jax.grad(loss))(x), expected)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.slow
def test_one_token_a_device_is_of_a_sequence(check_vma: bool) -> None:
    """No decoding, whose query all devices would have."""
    q, k, v = draw(1, 4, 2, 8), draw(1, 8, 2, 8), draw(1, 8, 2, 8)
    ring, cut = ring_of(), P(None, "sp")
    run = jax.shard_map(
        lambda *qkv: ring(*qkv, mask=Causal()).attention_outputs, mesh=mesh_of(4, names=("sp",)),
        in_specs=cut, out_specs=cut, check_vma=check_vma,
    )  # fmt: skip
    same(jax.jit(run)(q, k, v), vanilla_of()(q, k, v, mask=Causal()).attention_outputs)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.tier(quick=["False"])
def test_a_functions_arrays_must_be_whole(check_vma: bool) -> None:
    x, ids, cut = draw(1, 8, 2, 4), jnp.arange(8)[None] // 3, P(None, "sp")
    ring, mesh = ring_of(), mesh_of(2, names=("sp",))
    by_ids = lambda b, h, q, kv, ids: ids[b, q] == ids[b, kv]  # noqa: E731

    def run(spec: Any) -> Any:
        def local(x: Any, ids: Any) -> Any:
            return ring(x, x, x, mask=MaskFn(by_ids, (ids,))).attention_outputs

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(cut, spec), out_specs=cut, check_vma=check_vma))(
            x, ids
        )

    with pytest.raises(UnsupportedError, match=r"a function's arrays must be whole"):
        run(cut)
    same(run(P()), vanilla_of()(x, x, x, mask=MaskFn(by_ids, (ids,))).attention_outputs)
