"""Caches with a layer axis: a layer is a view, which a scan over layers updates in place."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal
from attnops_caches import Cache, DenseCache, PagedCache, PagePool, Quantized, WindowCache

L, B, S, H, K, D = 3, 2, 12, 4, 2, 8
TABLE = np.array([[5, 1, 7], [0, 3, 6]], np.int32)
SCALES = np.array([[0.01, 0.02], [0.03, 0.01], [0.02, 0.02]], np.float32)
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "int8": {"codec": Quantized("int8")},
    "by head": {"codec": Quantized("float8_e4m3fn", "head")},
    "latent": {"latent": 4, "codec": Quantized("int4")},
    "ring": {},
    "pages": {"codec": Quantized("int8")},
}


def create(kind: str, layers: int | None, layer: int | None = None) -> Cache:
    """An empty cache; of one layer with that layer's scales."""
    options = {"batch": B, "kv_heads": K, "head_dim": D, "dtype": jnp.float32, "layers": layers, **KINDS[kind]}
    if kind == "by head":
        scales = SCALES if layer is None else SCALES[layer]
        options |= {"key_scale": scales, "value_scale": scales}
    if kind == "ring":
        return WindowCache.create(window=5, max_append=3, **options)
    if kind == "pages":
        return PagedCache.create(pages=8, page_size=4, max_pages=3, table=TABLE, **options)
    return DenseCache.create(length=S, **options)


def tokens(seed: int, heads: int, T: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(L, B, T, heads, D)), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pages", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(KINDS)[:5])])
@pytest.mark.parametrize("operation", ["flash", pytest.param("vanilla", marks=pytest.mark.slow)])
@pytest.mark.tier(every=6)
def test_a_scan_over_layers_equals_a_cache_for_each(kind: str, operation: str) -> None:
    op = OperationRegistry.create(operation, OperationMetadata())
    has_value = KINDS[kind].get("latent") is None

    def model(cache: Cache, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Cache, jax.Array]:
        def block(pending: Any, given: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
            layer, q, k, v = given
            out, pending = op.step(q, k, v if has_value else None, pending.layer(layer), mask=Causal())
            return pending, out.attention_outputs

        pending, out = jax.lax.scan(block, cache.pending(k.shape[2]), (jnp.arange(L), q, k, v))
        return pending.cache, out

    @jax.jit
    def one(cache: Cache, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Cache]:
        out, cache = op.step(q, k, v if has_value else None, cache, mask=Causal())
        return out.attention_outputs, cache

    cache, alone = create(kind, L), [create(kind, None, layer) for layer in range(L)]
    step = jax.jit(model, donate_argnums=0)
    for call, T in enumerate((3, 3, 1)):
        q, k, v = tokens(3 * call, H, T), tokens(3 * call + 1, K, T), tokens(3 * call + 2, K, T)
        cache, found = step(cache, q, k, v)
        for layer in range(L):
            out, alone[layer] = one(alone[layer], q[layer], k[layer], v[layer])
            np.testing.assert_allclose(found[layer], out, atol=1e-5)
    for layer in range(L):
        for mine, other in zip(cache.layer(layer).read(), alone[layer].read(), strict=True):
            np.testing.assert_array_equal(mine, other)
        np.testing.assert_array_equal(cache.lengths, alone[layer].lengths)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("kind", "kv_heads"), [("dense", K), ("ring", K), ("pages", K), ("dense", 1), ("pages", 1)])
@pytest.mark.tier(quick=["pages-1-float32"])
def test_a_step_of_all_layers_copies_no_cache(kind: str, kv_heads: int, dtype: str) -> None:
    op = OperationRegistry.create("flash", OperationMetadata(block_k=4))
    options = {"batch": B, "kv_heads": kv_heads, "head_dim": 32, "layers": 8, "dtype": dtype}
    cache = {
        "dense": lambda: DenseCache.create(length=256, **options),
        "ring": lambda: WindowCache.create(window=250, max_append=7, **options),
        "pages": lambda: PagedCache.create(pages=64, page_size=8, max_pages=32, **options),
    }[kind]()
    q, k = (jnp.ones((B, 1, heads, 32), dtype) for heads in (H, kv_heads))

    def steps(cache: Cache) -> Cache:
        def block(pending: Any, layer: jax.Array) -> tuple[Any, jax.Array]:
            out, pending = op.step(q, k, k, pending.layer(layer), mask=Causal())
            return pending, out.attention_outputs

        def token(cache: Cache, _: None) -> tuple[Cache, jax.Array]:
            pending, out = jax.lax.scan(block, cache.pending(1), jnp.arange(8))
            return pending.cache, out

        return jax.lax.scan(token, cache, None, length=3)[0]

    memory = jax.jit(steps, donate_argnums=0).lower(cache).compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory is not None
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < cache.store.key.nbytes / 8 / B  # less than the keys of one row of one layer


@pytest.mark.slow
def test_a_traced_layer_below_0_is_counted_from_the_last() -> None:
    cache = create("pages", L)
    key = jnp.asarray(np.random.default_rng(0).integers(-99, 99, cache.store.key.shape), jnp.int8)
    store = dataclasses.replace(cache.store, key=key, key_scale=jnp.ones_like(cache.store.key_scale))
    cache = dataclasses.replace(cache, store=store, lengths=jnp.full(B, 7, jnp.int32))
    op = OperationRegistry.create("flash")
    lse = jax.jit(lambda query, layer: op(query, cache.layer(layer), return_lse=True).logsumexp)
    query = jnp.ones((B, 1, H, D))
    found = [np.asarray(lse(query, layer)) for layer in range(-L, L)]
    np.testing.assert_array_equal(found[:L], found[L:])
    assert np.abs(found[0] - found[1]).max() > 1


def test_what_has_no_layer_axis_is_refused() -> None:
    one, cache = create("dense", None), create("dense", L)
    for without in (one, one.pending(1)):
        with pytest.raises(ValueError, match="layer=0 is given, but the cache has no layer axis: use it as it is"):
            without.layer(0)
    with pytest.raises(ValueError, match=r"has 3 layers: give a call one of them, by cache\.layer\(layer\)"):
        cache.read()
    with pytest.raises(ValueError, match=r"a step one of an append to all, by cache\.pending\(T\)\.layer\(layer\)"):
        cache.append(*tokens(0, K, 1)[:2])
    with pytest.raises(ValueError, match="take_rows is for all layers together"):
        cache.layer(1).take_rows(np.array([0, 1]))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_what_layers_share_is_the_same_array_in_a_scan() -> None:
    whole, key = create("pages", L), tokens(0, K, 1)[0]

    def block(pending: Any, layer: jax.Array) -> tuple[Any, None]:
        return pending.layer(layer).write(key, key), None

    def written(cache: Cache) -> Cache:
        return jax.lax.scan(block, cache.pending(1), jnp.arange(L))[0].cache

    jaxpr = jax.make_jaxpr(written)(whole).jaxpr
    (scan,) = [x for x in jaxpr.eqns if x.primitive.name == "scan"]
    body, consts = scan.params["jaxpr"].jaxpr, scan.params["num_consts"]
    changed = [x.aval.shape for x in body.invars[consts:][: scan.params["num_carry"]] if x not in body.outvars]
    assert sorted(changed) == sorted(x.shape for x in jax.tree.leaves(whole.store))
    assert written(whole).lengths.tolist() == [1, 1]


@pytest.mark.slow
def test_a_later_layer_may_read_what_an_earlier_one_wrote() -> None:
    op, (query, *_), (key, *_) = OperationRegistry.create("flash"), tokens(0, H, 3), tokens(1, K, 3)
    pending = create("dense", L).pending(3, [3, 2])
    wanted, pending = op.step(query, key, key, pending.layer(0), mask=Causal())
    found = op(query, pending.layer(0), mask=Causal())
    np.testing.assert_array_equal(found.attention_outputs, wanted.attention_outputs)


@pytest.mark.slow
def test_a_fork_is_of_all_layers() -> None:
    pool = PagePool.create(pages=8, page_size=4, rows=B, max_pages=3).reserve(np.array([6, 0]))
    ids = [0, 1], [1, -1]  # the second entry does nothing
    forked, copies = pool.fork(*map(np.array, ids))
    key, value = tokens(0, K, 6), tokens(1, K, 6)
    pending, ones = create("pages", L).with_table(pool.table).pending(6, [6, 0]), []  # type: ignore[attr-defined]
    for layer in range(L):
        one = create("pages", None).with_table(pool.table)  # type: ignore[attr-defined]
        ones.append(one.append(key[layer], value[layer], [6, 0]).fork(*ids, forked.table, copies))
        pending = pending.layer(layer).write(key[layer], value[layer])
    whole = pending.cache.fork(*ids, forked.table, copies)
    assert whole.lengths.tolist() == [6, 6]
    stores = [one.store for one in ones]
    for found, *wanted in zip(jax.tree.leaves(whole.store), *map(jax.tree.leaves, stores), strict=True):
        np.testing.assert_array_equal(found, np.stack(wanted))
    for name in ("lengths", "starts", "overflowed", "table", "copied"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(ones[0], name))
    with pytest.raises(ValueError, match="copy_pages is for all layers together"):
        whole.layer(1).fork(*ids, forked.table, copies)


@pytest.mark.tier(quick=["ring"], slow=["dense", "pages"])
@pytest.mark.parametrize("kind", ["dense", "ring", "pages"])
def test_rows_of_all_layers_are_emptied_and_shortened_together(kind: str) -> None:
    k = tokens(0, K, 3)

    @jax.jit
    def filled(k: jax.Array) -> Cache:
        pending = create(kind, L).pending(3)
        for layer in range(L):
            pending = pending.layer(layer).write(k[layer], k[layer])
        return pending.cache

    cache = filled(k)
    shorter, emptied = cache.truncate([1, 7]), cache.reset(np.array([True, False]))
    for layer in range(L):
        one = cache.layer(layer)
        for all_layers, expected in ((shorter, one.truncate([1, 7])), (emptied, one.reset(np.array([True, False])))):
            jax.tree.map(np.testing.assert_array_equal, all_layers.layer(layer), expected)
    assert shorter.lengths.tolist() == [1, 3]
    assert emptied.lengths.tolist() == [0, 3]
