"""Operations under a mesh give what they give without one: batch and heads cut, in every combination of axes."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from attnops import OperationMetadata, OperationRegistry, UnsupportedError, UnsupportedWarning
from attnops.biases import ALiBi, alibi_slopes
from attnops.masks import Causal, Mask, Segments
from attnops.sharding import AxisRules, create_mesh
from attnops_testing import oracle
from attnops_testing.features import combine
from attnops_testing.problem import FAST_COMPILE, Problem

AXES = ("dp", "tp", "sp")
# Whole sequences: the rules of a mesh whose "sp" serves something else.
WHOLE = AxisRules(query_length=None, kv_length=None, length=None)
CASES = {
    "documents, sinks": ("Segments", "sinks", "GQA", "logsumexp"),
    "traced documents": ("traced Segments", "MQA"),
    "window per head": ("mask per head", "bias [B, H, T, S]"),
    "window per batch": ("mask per batch", "bias [1, H, T, S]", "sinks"),
    "function": ("MaskFn", "ALiBi", "GQA"),
    "lengths": ("Lengths", "RelativePosition"),
    "positions": ("mask.at(positions)", "ScoreFn"),
    "padding": ("KeyPadding", "bias [B, 1, 1, S]", "soft cap"),
    "dense": ("Dense", "T < S", "D ≠ Dv"),
    "dropout": ("Causal", "dropout", "GQA"),
    "rows that see nothing": ("fully masked rows", "GQA", "logsumexp"),
    "heads first": ("layout BHTD", "Causal"),
    "drafts": ("traced Ancestors", "T < S", "GQA"),
}


def mesh_of(*names: str) -> Mesh:
    """Two devices along each axis."""
    return create_mesh([2] * len(names), names, devices=jax.devices()[: 2 ** len(names)])


def problem_of(names: tuple[str, ...], mesh: Mesh | None, rules: AxisRules = WHOLE, **fields: Any) -> Problem:
    spec = dataclasses.replace(combine(names), **{"B": 4, **fields})
    return spec.problem(OperationMetadata(mesh=mesh, axis_rules=rules, on_unsupported="error"))


def check(name: str, problem: Problem) -> None:
    problem.check(OperationRegistry.create(name, problem.metadata), compiler_options=FAST_COMPILE)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (i % 2)) for i, case in enumerate(CASES)]
)
@pytest.mark.tier(every=6, quick=["rows that see nothing"])
def test_flash_on_three_axes_agrees_with_the_oracle(case: str) -> None:
    check("attnops:flash", problem_of(CASES[case], mesh_of(*AXES)))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [x for n in (1, 2, 3) for x in itertools.combinations(AXES, n)], ids="-".join)
@pytest.mark.parametrize("name", ["attnops:vanilla", "attnops:flash", "sdpa"])
@pytest.mark.tier(every=6)
def test_every_combination_of_axes(name: str, axes: tuple[str, ...]) -> None:
    for case in ("documents, sinks", "window per batch") if name != "sdpa" else ("traced documents", "dense"):
        names = tuple(x for x in CASES[case] if name != "sdpa" or x != "D ≠ Dv")
        check(name, problem_of(names, mesh_of(*axes)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("H", "K", "tp"),
    [
        (4, 1, 4),
        (6, 3, 2),
        (3, 3, 2),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((4, 2, 4), (8, 2, 2), (12, 6, 4), (8, 8, 4))),
    ],
)
@pytest.mark.tier(every=3)
def test_heads_that_do_not_divide_agree_with_the_oracle(H: int, K: int, tp: int) -> None:
    mesh = create_mesh((tp,), ("tp",), devices=jax.devices()[:tp])
    check("attnops:flash", problem_of(("sinks", "mask per head"), mesh, H=H, K=K, B=1))


@pytest.mark.slow
def test_a_batch_that_does_not_divide_agrees_with_the_oracle() -> None:
    check("attnops:flash", problem_of(CASES["documents, sinks"], mesh_of("dp", "fsdp"), B=6))
    check("attnops:flash", problem_of(CASES["documents, sinks"], mesh_of("dp", "tp"), B=3))


@pytest.mark.slow
def test_dropout_is_the_same_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(4, 40, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    key = jax.random.key(5)

    def weights(mesh: Mesh | None) -> Any:
        metadata = OperationMetadata(mesh=mesh, axis_rules=WHOLE, dropout_prob=0.4)
        operation = OperationRegistry.create("attnops:vanilla", metadata)
        return operation(q, k, v, mask=Causal(), dropout_key=key, return_weights=True).attention_weights

    here, there = (np.asarray(weights(mesh)) == 0 for mesh in (None, mesh_of(*AXES)))
    np.testing.assert_array_equal(here, there)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit])
def test_a_mesh_that_is_set_is_used(kind: AxisType) -> None:
    problem = problem_of(CASES["documents, sinks"], None)
    operation = OperationRegistry.create("attnops:flash", problem.metadata)

    @jax.jit
    def both(inputs: Any) -> Any:
        out, pull_back = jax.vjp(lambda x: problem.call(operation, x)["attention_outputs"], inputs)
        return out, pull_back(jnp.cos(out))

    expected = both(problem.inputs)
    mesh = create_mesh((2, 2), ("dp", "tp"), axis_types=(kind, kind), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        found = both(problem.inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    assert found[0].sharding.spec[:3] == ("dp", None, "tp")


@pytest.mark.slow
def test_inside_a_shard_map_of_ones_own() -> None:
    """What it cut already is not cut again; the other axes are."""
    problem = problem_of(("Causal", "GQA"), None)
    operation = OperationRegistry.create("attnops:flash", problem.metadata)
    expected = problem.run(operation, gradients=False)[0]["attention_outputs"]
    qkv = [problem.inputs[name] for name in ("query", "key", "value")]

    def part(*x: Any) -> Any:
        return operation(*x, mask=Causal()).attention_outputs

    for manual in ({"dp"}, {"dp", "tp"}):
        spec = P("dp", None, "tp" if "tp" in manual else None)
        with jax.set_mesh(mesh_of("dp", "tp")):
            mapped = jax.shard_map(part, in_specs=(spec,) * 3, out_specs=spec, axis_names=manual)
            np.testing.assert_allclose(jax.jit(mapped)(*qkv), expected, atol=1e-5)


@pytest.mark.slow
def test_a_sharded_sequence_is_gathered_with_a_warning() -> None:
    names = CASES["documents, sinks"]
    problem = problem_of(names, mesh_of(*AXES), AxisRules())
    with pytest.raises(UnsupportedError, match=r"mesh=sp: shards the sequence.*create 'ring'"):
        check("attnops:flash", problem)
    problem = dataclasses.replace(problem, metadata=problem.metadata.replace(on_unsupported="native"))
    with pytest.warns(UnsupportedWarning, match=r"exchanges no keys between devices.*every device then gathers"):
        check("attnops:flash", problem)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsupportedWarning)
        check("attnops:flash", problem)  # said once


@pytest.mark.slow
def test_what_is_known_when_tracing_stays_known() -> None:
    """A causal mask's tiles are still static on a mesh, and so are documents that every row shares."""
    seen = []

    class Spy(OperationRegistry.get("attnops:flash", "cpu")):  # type: ignore[misc]
        def forward_native(self, query: Any, key: Any, value: Any, *, mask: Any = None) -> Any:
            seen.extend(isinstance(x, np.ndarray) for x in jax.tree.leaves(mask))
            return super().forward_native(query, key, value, mask=mask)

    x = jnp.ones((4, 16, 4, 8))
    Spy(OperationMetadata(mesh=mesh_of("dp", "tp")))(x, x, x, mask=Causal() & Segments(np.arange(16) // 5))
    assert seen
    assert all(seen)


@pytest.mark.parametrize(("kind", "case"), [(Segments, "documents, sinks"), (Causal, "window per batch")])
def test_a_wrong_spec_is_noticed(kind: type[Mask], case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: arrays of a mask that are not cut as query and key are."""
    problem = problem_of(CASES[case], mesh_of("dp", "tp"))
    monkeypatch.setattr(kind, "axes", {})
    with pytest.raises((AssertionError, ValueError, TypeError)):
        check("attnops:flash", problem)


@pytest.mark.slow
def test_vmap_without_jit_gives_the_values_of_one_device() -> None:
    """The batch of a slice is cut, not the mapped axis, which does not divide."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(3, 4, 16, 2, 8)), jnp.float32)
    mesh = create_mesh((2,), ("dp",), devices=jax.devices()[:2])

    def run(operation: Any) -> Any:
        def of(x: Any) -> Any:
            return operation(x, x, x, mask=Causal()).attention_outputs

        return jax.vmap(of)(q), jax.grad(lambda q: jnp.sin(jax.vmap(of)(q)).sum())(q)

    for name in ("vanilla", "flash"):
        cut = OperationRegistry.create(f"attnops:{name}", OperationMetadata(mesh=mesh))
        for x, y in zip(run(cut), run(OperationRegistry.create(f"attnops:{name}")), strict=True):
            np.testing.assert_allclose(x, y, atol=5e-6)


@pytest.mark.parametrize("name", ["vanilla", "flash"])
@pytest.mark.slow
def test_a_bias_whose_offset_is_an_array_agrees_with_the_oracle(name: str) -> None:
    slopes = alibi_slopes(2)
    run = OperationRegistry.create(name, OperationMetadata(mesh=mesh_of("dp", "tp"), on_unsupported="error"))
    arrays = jax.random.normal(jax.random.key(0), (3, 2, 4, 2, 8))
    found = jax.jit(lambda offset: run(*arrays, bias=ALiBi(slopes, offset)).attention_outputs)(jnp.int32(2))
    distance = np.arange(4)[None, :] - np.arange(4)[:, None] - 2
    bias = -slopes[None, :, None, None] * np.abs(distance)
    expected = oracle.attention(*arrays, bias=bias.astype(np.float64)).out
    np.testing.assert_allclose(found, expected, atol=2e-5)
