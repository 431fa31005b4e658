"""Caches on a mesh: values of the same cache without one, and what devices exchange for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from attnops import OperationMetadata, OperationRegistry, UnsupportedError
from attnops.biases import ALiBi, RelativePosition, ScoreFn, alibi_slopes
from attnops.masks import Ancestors, Causal, KeyPadding, Mask, MaskFn, Segments, SlidingWindow
from attnops.sharding import AxisRules
from attnops_caches import DenseCache, PagedCache, PagePool, Quantized, Rows, WindowCache, sharded

B, S, H, K, D = 4, 12, 4, 2, 8
RNG = np.random.default_rng(0)
TABLE = np.array([[5, 1, 7, 2], [0, 3, 6, 4], [5, 2, 7, 1], [0, 6, 3, 4]])  # of 8 pages in each of two shards
INT8 = Quantized("int8")


def array(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def mesh_of(*names: str, kind: AxisType = AxisType.Auto, shape: tuple[int, ...] = (2, 2)) -> Mesh:
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=devices)


def create(storage: str, kv_heads: int = K, **fields: Any) -> Any:
    sizes: dict[str, Any] = {
        "batch": B, "kv_heads": kv_heads, "head_dim": D, "dtype": jnp.float32, "starts": [0, 2, 1, 0], **fields
    }  # fmt: skip
    if storage == "dense":
        return DenseCache.create(length=S, **sizes)
    if storage == "ring":
        return WindowCache.create(window=5, max_append=6, **sizes)
    return PagedCache.create(pages=16, page_size=3, max_pages=4, table=TABLE, **sizes)


def pair(storage: str, mesh: Mesh, kv_heads: int = K, **fields: Any) -> tuple[Any, Any]:
    """A cache on a mesh and one without, both with some tokens."""
    placed = sharded(lambda: create(storage, kv_heads, **fields), mesh)
    single = create(storage, kv_heads, **fields)
    if storage == "paged" and placed.placement.batch:
        single = single.with_table(TABLE + np.array([0, 0, 8, 8])[:, None])
    key, value, lengths = array(B, 4, kv_heads, D), array(B, 4, kv_heads, D), [4, 4, 3, 1]
    return placed.append(key, value, lengths), single.append(key, value, lengths)


def operation(name: str, **fields: Any) -> Any:
    return OperationRegistry.create(name, OperationMetadata(**fields))


def stepped(name: str, *arrays: Any, mesh: Mesh | None = None, **options: Any) -> Any:
    """A step as one program; outside `jax.jit` it is hundreds, which `test_meshes` has."""
    return jax.jit(functools.partial(operation(name, mesh=mesh).step, **options))(*arrays)


def compiled(function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """The result of a function, and the exchanges between devices in its compiled program."""
    program = jax.jit(function).lower(*args).compile()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return program(*args), sorted(re.findall(rf"\b({kinds})(?:-start)?\(", program.as_text()))


def equal(placed: Any, single: Any) -> None:
    """The same tokens, slot by slot; tables differ by what they number."""
    for x, y in zip(jax.tree.leaves(placed.store), jax.tree.leaves(single.store), strict=True):
        np.testing.assert_array_equal(x, y)
    for name in ("lengths", "overflowed"):
        np.testing.assert_array_equal(getattr(placed, name), getattr(single, name))


def check_steps(name: str, mesh: Mesh, caches: tuple[Any, Any], mask: Mask, T: int, **options: Any) -> list[str]:
    """A step on the mesh gives what it gives without one. Its exchanges."""
    placed, single = caches
    heads = single.kv_heads * 2 if "heads" not in options else options.pop("heads")
    q, k, v = array(B, T, heads, D), array(B, T, single.kv_heads, D), array(B, T, single.kv_heads, D)
    lengths = np.array([T, max(T - 1, 1), 0, T])
    options |= {"mask": mask, "return_lse": True}

    def step(cache: Any, q: Any, k: Any, v: Any) -> Any:
        return operation(name, mesh=mesh).step(q, k, v, cache, query_lengths=lengths, **options)

    (found, placed), exchanges = compiled(step, placed, q, k, v)
    wanted, single = stepped(name, q, k, v, single, query_lengths=lengths, **options)
    np.testing.assert_allclose(found.attention_outputs, wanted.attention_outputs, atol=5e-6)
    np.testing.assert_allclose(found.logsumexp, wanted.logsumexp, atol=5e-6)
    equal(placed, single)
    return exchanges


slow = pytest.mark.slow


@pytest.mark.slow
def test_specs_name_the_axes_of_the_rules_that_divide() -> None:
    mesh = mesh_of("dp", "tp", "sp", shape=(2, 2, 2))
    cache = sharded(lambda: create("dense", codec=INT8, layers=3), mesh)
    assert cache.specs.store.key == P(None, "dp", "tp", "sp", None)
    assert cache.specs.store.value_scale == P(None, "dp", "tp", "sp")
    assert cache.specs.lengths == cache.specs.starts == cache.specs.overflowed == P("dp")
    assert cache.store.key.sharding.spec == P(None, "dp", "tp", "sp", None)
    assert cache.store.key.addressable_shards[0].data.shape == (3, B // 2, K // 2, S // 2, D)
    by_head = sharded(
        lambda: create("paged", codec=Quantized("int8", "head"), key_scale=[1, 2], value_scale=[3, 4]), mesh
    )
    assert by_head.specs.store.key == P("dp", "tp", None, None)
    assert by_head.specs.store.key_scale == P("tp")
    assert by_head.specs.table == P("dp", None)
    assert sharded(lambda: create("ring", kv_heads=1), mesh).specs.store.key == P("dp", None, None, None)
    rules = AxisRules(batch=None, kv_length=None, decode={"__KV_HEAD__": "sp"})
    assert sharded(lambda: create("dense"), mesh, rules).specs.store.key == P(None, "sp", None, None)
    with pytest.raises(ValueError, match="placement=None: the cache is on no mesh"):
        _ = create("dense").specs


@pytest.mark.parametrize("name", ["vanilla", pytest.param("attnops:flash", marks=slow)])
@pytest.mark.slow
def test_a_cache_without_placement_is_not_cut_by_the_rules(name: str) -> None:
    cache, query = pair("dense", mesh_of("sp", shape=(4,)))[1], array(B, 1, H, D)
    found, wanted = (
        operation(name, mesh=mesh)(query, cache, mask=Causal()) for mesh in (mesh_of("sp", shape=(4,)), None)
    )
    np.testing.assert_allclose(found.attention_outputs, wanted.attention_outputs, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "names", "codec", "kind"),
    [
        ("dense", ("dp", "sp"), INT8, AxisType.Auto),
        ("paged", ("dp", "tp"), None, AxisType.Auto),
        pytest.param("dense", ("sp", "tp"), None, AxisType.Explicit, marks=slow),
        pytest.param("dense", ("dp", "tp"), INT8, AxisType.Explicit, marks=slow),
        pytest.param("ring", ("dp", "tp"), INT8, AxisType.Auto, marks=slow),
        pytest.param("ring", ("sp", "tp"), None, AxisType.Explicit, marks=slow),
        pytest.param("paged", ("dp", "tp"), INT8, AxisType.Explicit, marks=slow),
    ],
)
@pytest.mark.tier(every=7)
def test_tokens_are_appended_where_they_lie_and_nothing_is_exchanged(
    storage: str, names: tuple[str, ...], codec: Quantized | None, kind: AxisType
) -> None:
    placed, single = pair(storage, mesh_of(*names, kind=kind), codec=codec)

    def append(cache: Any, *tokens: Any) -> Any:
        return cache.append(*tokens)

    given: tuple[Any, ...] = ()
    for T, lengths in ((1, [1, 0, 1, 1]), (4, [4, 1, 4, 4]), (4, [2, 4, 4, 4]), (1, [1, 1, 1, 1])):
        given = array(B, T, K, D), array(B, T, K, D), np.array(lengths)
        placed, single = append(placed, *given), single.append(*given)
    equal(placed, single)
    assert storage == "ring" or placed.overflowed.tolist() == [False, False, True, False]
    assert compiled(append, placed, *given)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "storage", "codec", "T"),
    [
        ("attnops:flash", "paged", None, 1),
        pytest.param("attnops:flash", "dense", None, 1, marks=slow),
        pytest.param("attnops:vanilla", "paged", INT8, 3, marks=slow),
        pytest.param("attnops:flash", "ring", INT8, 3, marks=slow),
        pytest.param("sdpa", "dense", INT8, 3, marks=slow),
        pytest.param("auto", "ring", None, 1, marks=slow),
    ],
)
@pytest.mark.tier(every=4)
def test_rows_and_heads_attend_without_exchange(name: str, storage: str, codec: Quantized | None, T: int) -> None:
    mesh = mesh_of("dp", "tp")
    varied = Causal() & SlidingWindow(jnp.array([[4], [1], [9], [3]]), None)
    if name != "sdpa":
        varied &= MaskFn(lambda b, h, q, k: (q + k + h + b) % 4 != 0)
    options = {} if name == "sdpa" else {"bias": ALiBi(alibi_slopes(H)), "sinks": array(H)}
    assert check_steps(name, mesh, pair(storage, mesh, codec=codec), varied, T, **options) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "codec", "T", "found"),
    [
        ("attnops:flash", None, 1, ["all-gather"]),
        pytest.param("attnops:vanilla", INT8, 3, ["all-gather"], marks=slow),
        pytest.param("attnops:flash", INT8, 3, ["all-gather"], marks=slow),
    ],
)
@pytest.mark.tier(every=3)
def test_a_context_that_is_cut_is_merged_in_one_exchange(
    name: str, codec: Quantized | None, T: int, found: list[str]
) -> None:
    mesh = mesh_of("sp", "tp")
    mask = Causal() & MaskFn(lambda b, h, q, k: (q + k + h) % 4 != 0)
    # A bias and a mask with arrays by position are cut where the slots are.
    options: dict[str, Any] = {"bias": array(B, H, T, S), "sinks": array(H)}
    assert check_steps(name, mesh, pair("dense", mesh, codec=codec), mask, T, **options) == found
    allowed = RNG.random((B, 1, T, S)) < 0.7
    allowed[1] = False  # rows that see nothing on any device
    placed, single = pair("dense", mesh, codec=codec)
    query = array(B, T, H, D)
    asked = {"return_lse": True, "return_max_logits": True}
    results = [operation(name)(query, cache, mask=allowed, **asked) for cache in (placed, single)]
    np.testing.assert_allclose(results[0].attention_outputs, results[1].attention_outputs, atol=5e-6)
    np.testing.assert_allclose(results[0].logsumexp, results[1].logsumexp, atol=5e-6)
    np.testing.assert_allclose(results[0].max_logits, results[1].max_logits, atol=5e-6)
    assert np.isneginf(results[0].max_logits[1]).all()
    assert not np.asarray(results[0].attention_outputs)[1].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([3, 0, 1], AxisType.Explicit),
        *(pytest.param([0, 0, 3, 1, 2, 0], kind, marks=slow) for kind in (AxisType.Auto, AxisType.Explicit)),
        pytest.param([3, 0, 1], AxisType.Auto, marks=slow),
    ],
)
@pytest.mark.tier(every=4)
def test_another_number_of_rows_is_taken_and_sharded_where_it_divides(rows: list[int], kind: AxisType) -> None:
    mesh = mesh_of("dp", "tp", kind=kind)
    placed, single = (cache.take_rows(rows) for cache in pair("dense", mesh))
    assert placed.store.key.sharding.spec[0] == placed.placement.batch == ("dp" if len(rows) % 2 == 0 else None)
    query, key, value = array(len(rows), 1, H, D), array(len(rows), 1, K, D), array(len(rows), 1, K, D)
    found, placed = stepped("flash", query, key, value, placed, mesh=mesh, mask=Causal())
    wanted, single = stepped("flash", query, key, value, single, mask=Causal())
    np.testing.assert_allclose(found.attention_outputs, wanted.attention_outputs, atol=5e-6)
    equal(placed, single)


@slow
@pytest.mark.parametrize("names", [("dp", "sp"), ("dp", "tp")])
@pytest.mark.parametrize("name", ["attnops:flash", "attnops:vanilla"])
@pytest.mark.tier(every=4)
def test_masks_and_biases_act_at_positions_on_every_device(name: str, names: tuple[str, ...]) -> None:
    parents = np.array([[-1, 0, 0], [-1, 0, 1], [-1, -1, 0], [-1, 0, 1]], np.int32)
    factors, table = jnp.asarray(np.abs(array(B, H))), array(32, H)
    cases: list[tuple[Mask, Any]] = [
        (Ancestors(parents), ScoreFn(lambda s, b, h, q, k, x: s * x[b, h] + jnp.log1p(1.0 * k), (factors,))),
        (Segments(np.zeros((B, 3), int), RNG.integers(0, 2, (B, S))) & Causal(), RelativePosition(table)),
        (~Causal() | SlidingWindow(np.array([[1, 2, 3, 4]]), 0), None),
    ]
    mesh = mesh_of(*names)
    for mask, bias in cases:
        check_steps(name, mesh, pair("dense", mesh), mask, 3, bias=bias)


@slow
@pytest.mark.parametrize("names", [("dp", "sp"), ("sp", "tp")])
def test_a_latent_is_sharded_as_a_single_kv_head(names: tuple[str, ...]) -> None:
    sizes = {"batch": B, "length": S, "kv_heads": 1, "head_dim": 12, "latent": 8, "dtype": jnp.float32, "codec": INT8}
    caches = sharded(lambda: DenseCache.create(**sizes), mesh_of(*names)), DenseCache.create(**sizes)
    query, key = array(B, 5, H, 12), array(B, 5, 1, 12)
    results = [stepped("attnops:flash", query, key, None, cache, mask=Causal()) for cache in caches]
    np.testing.assert_allclose(*(result.attention_outputs for result, _ in results), atol=5e-6)
    equal(*(cache for _, cache in results))


@slow
def test_many_queries_over_a_cut_context_are_merged_by_two_reductions() -> None:
    mesh = mesh_of("sp", shape=(4,))
    sizes = {"batch": 1, "length": 24, "kv_heads": K, "head_dim": D, "dtype": jnp.float32}
    q, k, v, sinks = array(1, 20, H, D), array(1, 20, K, D), array(1, 20, K, D), array(H)

    def step(cache: Any, *tokens: Any) -> Any:
        options = {"mask": Causal(), "sinks": sinks, "return_lse": True, "return_max_logits": True}
        return operation("attnops:flash").step(*tokens, cache, **options)[0]

    placed = sharded(lambda: DenseCache.create(**sizes), mesh)
    found, exchanges = compiled(step, placed, q, k, v)
    wanted = jax.jit(step)(DenseCache.create(**sizes), q, k, v)
    np.testing.assert_allclose(found.attention_outputs, wanted.attention_outputs, atol=5e-6)
    np.testing.assert_allclose(found.logsumexp, wanted.logsumexp, atol=5e-6)
    np.testing.assert_allclose(found.max_logits, wanted.max_logits, atol=5e-6)
    assert exchanges == ["all-reduce", "all-reduce"]


@pytest.mark.parametrize(
    ("storage", "names", "codec"),
    [
        ("dense", ("dp", "sp"), None),
        pytest.param("paged", ("dp", "tp"), INT8, marks=slow),
        pytest.param("ring", ("dp", "tp"), Quantized("int8", "head"), marks=slow),
        pytest.param("paged", ("dp", "tp"), Quantized("int4"), marks=slow),
    ],
)
@slow
@pytest.mark.tier(every=3)
def test_a_layer_of_a_cache_on_a_mesh_is_taken_where_it_lies(
    storage: str, names: tuple[str, ...], codec: Quantized | None
) -> None:
    mesh, L = mesh_of(*names), 2
    scales = {"key_scale": [0.02, 0.03], "value_scale": [0.04, 0.03]} if codec and codec.scales == "head" else {}
    fields: dict[str, Any] = {"codec": codec, "layers": L, **scales}
    placed, single = sharded(lambda: create(storage, **fields), mesh), create(storage, **fields)
    if storage == "paged":
        single = single.with_table(TABLE + np.array([0, 0, 8, 8])[:, None])
    tokens = array(L, B, 3, H, D), array(L, B, 3, K, D), array(L, B, 3, K, D)

    def step(cache: Any, *tokens: Any) -> Any:
        def block(pending: Any, given: Any) -> Any:
            layer, *token = given
            result, pending = operation("attnops:flash").step(*token, pending.layer(layer), mask=Causal())
            return pending, result.attention_outputs

        pending, out = jax.lax.scan(block, cache.pending(3), (jnp.arange(L), *tokens))
        return pending.cache, out

    (x, found), exchanges = compiled(step, placed, *tokens)
    y, wanted = step(single, *tokens)
    np.testing.assert_allclose(found, wanted, atol=5e-6)
    equal(x, y)
    assert x.specs == placed.specs
    assert exchanges == ["all-gather"] * ("sp" in names)


@pytest.mark.parametrize(
    ("kv_heads", "heads", "devices"), [(2, 4, 4), pytest.param(2, 6, 3, marks=slow), pytest.param(1, 4, 4, marks=slow)]
)
@pytest.mark.parametrize("codec", [Quantized("int8", "head"), pytest.param(INT8, marks=slow)])
@slow
@pytest.mark.tier(every=6)
def test_kv_heads_that_the_mesh_does_not_divide_are_selected(
    kv_heads: int, heads: int, devices: int, codec: Quantized
) -> None:
    mesh = mesh_of("tp", shape=(devices,))
    scales = np.array([0.02, 0.03], np.float32)[:kv_heads]
    fields = {"key_scale": scales, "value_scale": scales} if codec.scales == "head" else {}
    caches = pair("dense", mesh, kv_heads, codec=codec, **fields)
    assert caches[0].placement.kv_heads is None
    assert check_steps("attnops:flash", mesh, caches, Causal(), 1, heads=heads) == []


@pytest.mark.parametrize("storage", ["dense", *(pytest.param(x, marks=slow) for x in ("ring", "paged"))])
@pytest.mark.parametrize("is_current", [False, pytest.param(True, marks=slow)])
@slow
@pytest.mark.tier(every=4)
def test_explicit_axes_are_those_of_the_results_types(storage: str, is_current: bool) -> None:
    mesh = mesh_of("dp", "tp", kind=AxisType.Explicit)
    placed, single = pair(storage, mesh)
    q, k, v = array(B, 1, H, D), array(B, 1, K, D), array(B, 1, K, D)

    @jax.jit
    def step(cache: Any, *tokens: Any) -> Any:
        result, cache = operation("attnops:flash").step(*tokens, cache, mask=Causal())
        assert str(jax.typeof(result.attention_outputs)) == "float32[4@dp,1,4@tp,8]"
        return result.attention_outputs, cache

    if is_current:
        with jax.set_mesh(mesh):
            found, placed = step(placed, q, k, v)
    else:
        found, placed = step(placed, q, k, v)
    wanted, single = stepped("attnops:flash", q, k, v, single, mask=Causal())
    np.testing.assert_allclose(found, wanted.attention_outputs, atol=5e-6)
    equal(placed, single)
    for x, y in zip(placed.read(), single.read(), strict=True):
        np.testing.assert_array_equal(x, y)
    if storage != "paged":
        equal(placed.take_rows([3, 1, 1, 0]), single.take_rows([3, 1, 1, 0]))


@pytest.mark.parametrize(
    ("storage", "kind"),
    [("dense", AxisType.Auto), ("ring", AxisType.Auto), ("paged", AxisType.Auto), ("dense", AxisType.Explicit)],
)
@slow
@pytest.mark.tier(every=4)
def test_packed_rows_are_merged_over_the_shards_of_rows(storage: str, kind: AxisType) -> None:
    mesh = mesh_of("dp", "tp", kind=kind)
    caches = pair(storage, mesh)
    tokens = array(1, 7, H, D), array(1, 7, K, D), array(1, 7, K, D)
    rows = Rows([0, 3, 4, 6], [2, 0, 3])  # the last query is padding
    options = {"mask": Causal(), "rows": rows, "sinks": array(H), "return_lse": True, "bias": array(B, H, 7, 1)}
    options["return_max_logits"] = True
    # Of explicit axes JAX asks for the mesh where arrays are indexed.
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        found, placed = stepped("attnops:flash", *tokens, caches[0], **options)
    wanted, single = stepped("attnops:flash", *tokens, caches[1], **options)
    np.testing.assert_allclose(found.attention_outputs, wanted.attention_outputs, atol=5e-6)
    np.testing.assert_allclose(found.logsumexp, wanted.logsumexp, atol=5e-6)
    np.testing.assert_allclose(found.max_logits, wanted.max_logits, atol=5e-6)
    equal(placed, single)


@pytest.mark.parametrize("axes", [("dp", "tp"), pytest.param(("dp",), marks=slow)])
@slow
def test_a_cache_in_a_shard_map_of_the_callers_own_is_that_shards(axes: tuple[str, ...]) -> None:
    mesh = mesh_of("dp", "tp")
    placed, single = pair("paged", mesh)
    q, k, v = array(B, 1, H, D), array(B, 1, K, D), array(B, 1, K, D)

    def own(spec: P) -> P:
        return P(*(x if x in axes else None for x in spec))

    specs, tokens = jax.tree.map(own, placed.specs), own(P("dp", None, "tp"))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(specs, *(tokens,) * 3), out_specs=(tokens, specs), axis_names=set(axes),
                   check_vma=False)  # fmt: skip
    def step(cache: Any, *given: Any) -> Any:
        result, cache = operation("attnops:vanilla").step(*given, cache, mask=Causal())
        return result.attention_outputs, cache

    found, placed = step(placed, q, k, v)
    wanted, single = stepped("attnops:vanilla", q, k, v, single, mask=Causal())
    np.testing.assert_allclose(found, wanted.attention_outputs, atol=5e-6)
    equal(placed, single)


@slow
def test_each_shard_of_rows_has_a_pool_of_its_own() -> None:
    mesh = mesh_of("dp", shape=(2,))
    pools = jax.vmap(lambda _: PagePool.create(pages=4, page_size=3, rows=2, max_pages=3))(jnp.arange(2))
    pools = jax.vmap(PagePool.reserve)(pools, jnp.array([[4, 6], [1, 7]]))
    sizes = {"page_size": 3, "max_pages": 3, "batch": 4, "kv_heads": K, "head_dim": D, "dtype": jnp.float32}
    placed = sharded(lambda: PagedCache.create(pages=8, **sizes), mesh)
    assert placed.pages_of_row == 4
    placed = placed.with_table(pools.table.reshape(4, 3))
    single = DenseCache.create(length=9, **{name: sizes[name] for name in ("batch", "kv_heads", "head_dim", "dtype")})
    tokens = array(4, 7, K, D), array(4, 7, K, D), [4, 6, 1, 7]
    query = array(4, 1, H, D)
    placed, single = placed.append(*tokens), single.append(*tokens)
    found, wanted = (operation("attnops:vanilla")(query, x).attention_outputs for x in (placed, single))
    np.testing.assert_allclose(found, wanted, atol=5e-6)
    with pytest.raises(ValueError, match="pages from 0 to 4, but the cache has pages 0 to 3 for each shard of rows"):
        placed.with_table(np.full((4, 3), [0, 1, 4]))
    with pytest.raises(UnsupportedError, match=r"each shard's pool numbers from 0; call it in a jax\.shard_map"):
        placed.copy_pages((jnp.array([0]), jnp.array([3])))


@pytest.mark.slow
def test_a_cache_without_placement_is_sharded_by_the_metadatas_rules_for_a_call() -> None:
    mesh = mesh_of("dp", "tp")
    for storage, spec in (("dense", P("dp", None, "tp")), ("paged", P(None, None, "tp"))):
        cache, query = create(storage).append(array(B, 4, K, D), array(B, 4, K, D)), array(B, 1, H, D)
        found, wanted = (operation("attnops:vanilla", mesh=x)(query, cache).attention_outputs for x in (mesh, None))
        np.testing.assert_allclose(found, wanted, atol=5e-6)
        assert found.sharding.spec == spec


@dataclasses.dataclass(frozen=True)
class Parity(Mask):
    """A mask of keys by their number, which declares no axes."""

    def allowed(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv + q * 0) % 2 == 0

    def coverage_bounds(self, grid: Any) -> Any:
        raise NotImplementedError

    def __repr__(self) -> str:
        return "Parity()"


def test_what_a_cut_context_can_not_serve_is_refused() -> None:
    mesh, f = mesh_of("dp", "sp"), operation("attnops:vanilla")
    cache, query = sharded(lambda: create("dense"), mesh), array(B, 1, H, D)
    with pytest.raises(UnsupportedError, match="return_weights=True: the mesh axes sp shard the keys"):
        f(query, cache, return_weights=True)
    with pytest.raises(UnsupportedError, match=r"Parity\(\)'?: it numbers the keys, which the mesh axes"):
        f(query, cache, mask=Parity())
    by_row = KeyPadding(np.ones((B, S), bool))
    with pytest.raises(UnsupportedError, match="it differs by row, and rows are packed, whose context"):
        f(query[:1], cache, rows=Rows([0, 1], [2]), mask=by_row)
    with pytest.raises(ValueError, match=r"has the axes \{'tp': 2\}, but the cache was placed on a mesh with"):
        operation("attnops:vanilla", mesh=mesh_of("tp", shape=(2,)))(query, cache)
    with pytest.raises(UnsupportedError, match=r"which can't be joined inside a jax\.shard_map over it"):
        jax.eval_shape(
            jax.shard_map(lambda x: x.append(array(B // 2, 1, K, D), array(B // 2, 1, K, D)), mesh=mesh,
                          in_specs=(cache.specs,), out_specs=cache.specs), cache,
        )  # fmt: skip
