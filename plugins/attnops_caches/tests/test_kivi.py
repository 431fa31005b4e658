"""`KiviCache` against a model in numpy that has each token in lists, and quantises a group when it is complete."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attnops import NotDifferentiableError, OperationMetadata, OperationRegistry, explain
from attnops.masks import Causal
from attnops_caches import KiviCache, Quantized, Rows, sharded
from attnops_testing import attention
from attnops_testing.cache_codec import Codec

B, S, H, K, D, DV, G = 3, 128, 4, 2, 16, 8, 32
LENGTHS, STARTS = np.array([117, 0, 105]), np.array([0, 0, 37])
OUTLIERS = [3, 9]
CODEC = Codec("int4", "token_head")


def tokens(T: int = 117, seed: int = 0) -> list[Any]:
    """Keys [B, T, K, D] with channels that are 30 times as large as others, or far from 0; values [B, T, K, DV]."""
    rng = np.random.default_rng(seed)
    key, value = (rng.normal(size=(B, T, K, d)).astype(np.float32) for d in (D, DV))
    key[..., OUTLIERS[0]] *= 30
    key[..., OUTLIERS[1]] += 30
    return [key, value]


def create(**options: Any) -> KiviCache:
    sizes: Any = {"batch": B, "length": S, "kv_heads": K, "head_dim": D, "value_head_dim": DV, "dtype": jnp.float32}
    return KiviCache.create(**sizes | {"group": G} | options)


def quantised(keys: Any) -> Any:
    """What is read of a group of keys [n, K, D] with a scale by channel."""
    low, high = keys.min(0), keys.max(0)
    middle, step = low / 2 + high / 2, (high / 2 - low / 2) / 7
    return np.round((keys - middle) / step) * step + middle


def quantised_by_token(x: Any) -> Any:
    scale = CODEC.scale(x)
    return CODEC.encode(x, scale) * scale[..., None]


class Row:
    """One row: its keys, what is read of older ones, and the greatest length that it ever had."""

    def __init__(self, start: int = 0, recent: int = 2 * G, group: int = G) -> None:
        self.start, self.recent, self.group, self.longest = start, recent, group, 0
        self.keys: list[Any] = []
        self.older: dict[int, Any] = {}

    def append(self, keys: Any) -> None:
        for key in keys:
            self.keys.append(key)
            n, self.longest = len(self.keys), max(self.longest, len(self.keys))
            first = max(n - self.group, self.start)
            if n % self.group == 0 and first < n:
                self.older |= dict(zip(range(first, n), quantised(np.stack(self.keys[first:n])), strict=True))

    def truncate(self, length: int) -> None:
        # The newest keys are kept as they were appended; of older ones there is only what is read.
        kept = [self.older.get(i, x) if i < self.longest - self.recent else x for i, x in enumerate(self.keys)]
        self.keys = kept[:length]

    def read(self) -> Any:
        """Keys [n, K, D]."""
        first = len(self.keys) - self.recent
        return np.array([self.older.get(i, x) if i < first else x for i, x in enumerate(self.keys)]).reshape(-1, K, D)


def outside(keys: Any, read: Any, group: int = G) -> Any:
    """Whether an element's error exceeds half a step of its channel in its group; keys [n, K, D] of whole groups."""
    groups = keys.reshape(-1, group, K, D)
    step = (groups.max(1) - groups.min(1)) / 14
    return np.abs(read.reshape(groups.shape) - groups) > step[:, None] / 2 * (1 + 1e-4) + 1e-6


def flash() -> Any:
    return OperationRegistry.create("attnops:flash", OperationMetadata(on_unsupported="error"))


@functools.cache
def appended() -> Any:
    """The cache with `LENGTHS` of `tokens`, NaN in their left padding; what is read; and attention, in place or not."""
    query = np.random.default_rng(1).normal(size=(B, 5, H, D)).astype(np.float32)
    key, value = tokens()
    for b, start in enumerate(STARTS):
        key[b, :start] = value[b, :start] = np.nan
    vanilla = OperationRegistry.create("vanilla", OperationMetadata())

    @jax.jit
    def run(query: Any, key: Any, value: Any, lengths: Any, starts: Any) -> Any:
        cache = create(starts=starts).append(key, value, lengths)
        found = [op(query, cache, mask=Causal(), return_lse=True) for op in (flash(), vanilla)]
        return cache, cache.read(), [(x.attention_outputs, x.logsumexp) for x in found]

    return query, key, value, jax.tree.map(np.asarray, run(query, key, value, LENGTHS, STARTS))


def test_keys_and_values_are_those_of_the_model() -> None:
    _, key, value, (cache, read, _) = appended()
    assert cache.lengths.tolist() == LENGTHS.tolist()
    np.testing.assert_array_equal(read.held, (np.arange(S) >= STARTS[:, None]) & (np.arange(S) < LENGTHS[:, None]))
    for b, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        row, real = Row(start), slice(start, length)
        row.append(key[b, :length])
        np.testing.assert_allclose(read.keys[b, real], row.read()[start:], rtol=1e-5, atol=1e-5)
        newest = slice(max(length - 2 * G, start), length)
        np.testing.assert_array_equal(read.keys[b, newest], key[b, newest])
        np.testing.assert_allclose(read.values[b, real], quantised_by_token(value[b, real]), rtol=1e-5, atol=1e-5)


def test_the_error_is_half_a_step_of_the_channel_and_a_tenth_of_that_by_token() -> None:
    """Keys that are quantised by token are outside of the bound, and lose most of the channels without outliers."""
    _, key, _, (_, read, _) = appended()
    older = slice(0, (LENGTHS[0] - 2 * G) // G * G)
    keys, others = key[0, older], np.setdiff1d(np.arange(D), OUTLIERS)
    assert not outside(keys, read.keys[0, older]).any()
    by_token = quantised_by_token(keys)
    assert outside(keys, by_token)[..., others].mean() > 0.5
    assert outside(keys, np.concatenate([keys[:1], keys[:-1]])).any()  # keys of other tokens
    errors = [np.sqrt(((x - keys)[..., others] ** 2).mean()) for x in (read.keys[0, older], by_token)]
    assert errors[0] < errors[1] / 8, errors


def test_attention_is_the_oracles_over_what_is_read() -> None:
    query, _, _, (_, read, outputs) = appended()
    position = LENGTHS[:, None] - STARTS[:, None] - 5 + np.arange(5)
    sees = read.held[:, None] & (read.positions[:, None] <= position[..., None])
    keys, values = (np.where(read.held[..., None, None], x, 0) for x in (read.keys, read.values))
    wanted = attention(query, keys, values, mask=sees[:, None])
    for out, lse in outputs:
        np.testing.assert_allclose(out, wanted.out, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse, wanted.logsumexp, rtol=1e-5)
    assert not outputs[0][0][1].any()  # a row without tokens


appends = jax.jit(lambda cache, key, value, lengths: cache.append(key, value, lengths))
read_of = jax.jit(lambda cache: cache.read())


def append(cache: KiviCache, key: Any, value: Any, lengths: Any) -> KiviCache:
    grown: KiviCache = appends(cache, key, value, np.asarray(lengths))
    return grown


def equal(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [{}, {"group": 8, "recent": 8}, {"group": 16, "recent": 21}, {"group": 1}])
@pytest.mark.tier(quick=[], slow=["sizes0-float32", "sizes1-bfloat16", "sizes2-float16", "sizes3-float32"])
def test_one_token_at_a_time_is_a_prompt_in_chunks(sizes: dict[str, int], dtype: str) -> None:
    key, value = (jnp.asarray(x, dtype) for x in tokens(117))
    cache = create(dtype=dtype, starts=STARTS, **sizes)

    @jax.jit
    def by_token(cache: KiviCache, key: Any, value: Any, lengths: Any) -> KiviCache:
        def one(cache: KiviCache, new: Any) -> Any:
            index, *pair = new
            return cache.append(*(x[:, None] for x in pair), (index < lengths).astype(jnp.int32)), None

        given = jnp.arange(key.shape[1]), key.swapaxes(0, 1), value.swapaxes(0, 1)
        return jax.lax.scan(one, cache, given)[0]

    wanted = by_token(cache, key, value, LENGTHS)
    for bounds in ((0, 117), (0, 3, 70, 117)):
        found = cache
        for first, last in itertools.pairwise(bounds):
            found = append(found, key[:, first:last], value[:, first:last], np.clip(LENGTHS - first, 0, last - first))
        equal(found, wanted)


@pytest.mark.slow
def test_packed_rows_are_a_batch() -> None:
    key, value = tokens(50)
    counts = [50, 0, 41]
    cache = append(create(), *tokens(29, 1), np.array([29, 7, 0]))
    wanted = append(cache, key, value, np.array(counts))
    rows = Rows([0, 41, 91, 91], [2, 0, 1])
    query = np.random.default_rng(1).normal(size=(B, 50, H, D)).astype(np.float32)
    packed = (np.concatenate([x[2, :41], x[0, :50], x[1, :3]])[None] for x in (query, key, value))
    step = lambda cache, *new: flash().step(*new, cache, mask=Causal(), rows=rows)  # noqa: E731
    out, found = jax.jit(step)(cache, *packed)
    equal(found, wanted)
    of_batch = lambda *x: flash()(*x, mask=Causal(), query_lengths=np.array(counts)).attention_outputs  # noqa: E731
    outputs = jax.jit(of_batch)(query, wanted)
    of_rows = np.concatenate([outputs[2, :41], outputs[0, :50]])
    np.testing.assert_allclose(out.attention_outputs[0, :91], of_rows, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("taken_back", [1, G + 1, G + 2, 60, 99])
def test_truncate_leaves_what_the_model_has(taken_back: int) -> None:
    """Up to R - G + 1 tokens leave no trace in keys that are quantised later; others add to the error."""
    key, value = tokens(117)
    truncate = jax.jit(lambda cache, lengths: cache.truncate(lengths))
    for length in (97, 103, 117):
        row, kept = Row(), max(length - taken_back, 0)
        row.append(key[0, :length])
        row.truncate(kept)
        cache = truncate(append(create(), key, value, [length] * B), np.array([length - taken_back, S, kept]))
        assert cache.lengths.tolist() == [kept, length, kept]
        np.testing.assert_allclose(read_of(cache).keys[0, :kept], row.read(), atol=1e-4)
        new, more = tokens(40, seed=2), min(40, S - kept)
        cache = append(cache, *new, [more] * B)
        row.append(new[0][0, :more])
        found = read_of(cache).keys[0, : kept + more]
        np.testing.assert_allclose(found, row.read(), atol=1e-4)
        given = np.concatenate([key[0, :kept], new[0][0, :more]])
        older = slice(0, max(kept + more - 2 * G, 0) // G * G)
        if taken_back <= G + 1:
            assert not outside(given[older], found[older]).any()


@pytest.mark.slow
def test_rows_are_taken_reset_and_full() -> None:
    cache = append(create(), *tokens(117), LENGTHS)
    taken = jax.jit(lambda cache: cache.take_rows(jnp.array([2, 2, 0, 7])))(cache)
    assert taken.lengths.tolist() == [105, 105, 117, 0]
    assert taken.overflowed.tolist() == [False, False, False, True]
    for name in ("keys", "values"):
        found, wanted = (getattr(read_of(x), name) for x in (taken, cache))
        np.testing.assert_array_equal(found[:3], wanted[jnp.array([2, 2, 0])])
    nan = [np.full_like(x, np.nan) for x in tokens(9)]
    emptied = append(append(cache, *nan, [0, 9, 0]), *tokens(1), [0] * B).reset(jnp.array([True, True, False]))
    again, fresh = (read_of(append(x, *tokens(64, 4), [64, 64, 0])) for x in (emptied, create()))
    equal((again.keys[:2, :64], again.values[:2, :64]), (fresh.keys[:2, :64], fresh.values[:2, :64]))
    full = append(cache, *tokens(20, 5), [20, 20, 20])
    assert full.lengths.tolist() == [128, 20, 125]
    assert full.overflowed.tolist() == [True, False, False]
    equal(read_of(full).keys[0, 117:], tokens(20, 5)[0][0, :11])


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_reaches_no_other_row_head_channel_or_group(bad: float) -> None:
    key, value = tokens(117)
    key[0, 33, 1, 5] = bad
    read, clean = (read_of(append(create(), x, value, LENGTHS)).keys for x in (key, tokens(117)[0]))
    is_same = np.array(read == clean)
    assert np.isnan(read[0, 32:53, 1, 5]).all()  # of the group's tokens, 53 to 63 are among the newest 64
    is_same[0, 32:53, 1, 5] = True
    assert is_same.all()


@pytest.mark.slow
def test_equal_and_extreme_keys() -> None:
    """Channels that have one number are exact; the greatest numbers of a dtype stay finite, and within the bound."""
    for dtype in ("float32", "bfloat16", "float16"):
        largest = float(jnp.finfo(dtype).max)
        key, value = (jnp.asarray(np.clip(x / 30, -1, 1) * largest, dtype) for x in tokens(117))
        key = key.at[..., 0].set(-largest).at[..., 1].set(0).at[:, ::2, :, 2].set(largest)
        read = read_of(append(create(dtype=dtype), key, value, LENGTHS))
        assert np.isfinite(np.asarray(read.keys[0, :117], np.float64)).all(), dtype
        np.testing.assert_array_equal(read.keys[0, :117, :, :2], key[0, :, :, :2])
        wide, found = (np.asarray(x[0, :32], np.float64) for x in (key, read.keys))
        allowed = (wide.max(0) - wide.min(0)) / 28 + np.abs(wide) * float(jnp.finfo(dtype).eps)
        assert (np.abs(found - wide) <= allowed * (1 + 1e-5)).all()


@pytest.mark.slow
def test_flash_reads_it_in_place_and_other_operations_through_arrays() -> None:
    query, cache = jnp.ones((B, 1, H, D)), create()
    for name, reads in (("flash", "reads the cache in place"), ("vanilla", "reads the cache into arrays")):
        op: Any = OperationRegistry.create(name, OperationMetadata(platform="cpu"))
        use = explain(op.request(query, cache, mask=Causal()), name, op.metadata).chosen.source_use
        assert str(getattr(use, "reads", "")).startswith(reads)


@pytest.mark.slow
def test_vmap_export_and_a_mesh() -> None:
    step = lambda cache, *new: flash().step(*new, cache, mask=Causal())  # noqa: E731
    rng = np.random.default_rng(0)
    new = [rng.normal(size=(2, B, 40, heads, d)).astype(np.float32) for heads, d in ((H, D), (K, D), (K, DV))]
    caches = [append(create(), *tokens(117, seed), LENGTHS) for seed in (1, 2)]
    found, after = jax.jit(jax.vmap(step))(jax.tree.map(lambda *x: jnp.stack(x), *caches), *new)
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    on_mesh: Any = OperationRegistry.create("attnops:flash", OperationMetadata(mesh=mesh))
    for i, cache in enumerate(caches):
        given = [x[i] for x in new]
        wanted, grown = jax.jit(step)(cache, *given)
        np.testing.assert_allclose(found.attention_outputs[i], wanted.attention_outputs, atol=1e-5)
        equal(jax.tree.map(lambda x, i=i: x[i], after), grown)
        sharded_out, _ = jax.jit(lambda cache, *new: on_mesh.step(*new, cache, mask=Causal()))(cache, *given)
        np.testing.assert_allclose(sharded_out.attention_outputs, wanted.attention_outputs, atol=1e-5)
    program = export.export(jax.jit(step))(caches[0], *(x[0] for x in new))
    again = export.deserialize(program.serialize())
    assert (again.in_tree, again.out_tree) == (program.in_tree, program.out_tree)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"length": 100}, ValueError, "length=100 must be a multiple of group=32, such as 128"),
        ({"recent": 31}, ValueError, "recent=31 must be at least group=32"),
        ({"head_dim": 15, "codec": None}, ValueError, "head_dim=15 is odd"),
        ({"value_head_dim": 7}, ValueError, "value_head_dim=7 is odd"),
        ({"group": 0}, ValueError, "group=0 must be an int of at least 1"),
        ({"group": 2.0}, TypeError, "group=2.0 of type float must be an int"),
        ({"dtype": jnp.int8}, ValueError, "dtype=int8 must be float32, bfloat16 or float16"),
        ({"codec": Quantized("int8")}, ValueError, r"codec=.* is given, but a KiviCache has"),
        ({"layers": 2}, ValueError, "layers=2 is given, but a KiviCache has"),
        ({"heads": 2}, TypeError, "a cache has no option 'heads'"),
        ({"starts": [-1, 0, 0]}, ValueError, "must be at least 0"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        create(**options)


@pytest.mark.slow
def test_a_mesh_and_a_gradient_are_refused() -> None:
    mesh = jax.make_mesh((2,), ("dp",))
    with pytest.raises(ValueError, match="create made a KiviCache, which no mesh shards"):
        sharded(create, mesh)
    cache, query = create(), jnp.ones((B, 1, H, D))
    with pytest.raises(NotDifferentiableError, match="gradient"):
        jax.grad(lambda q: flash()(q, cache, mask=Causal()).attention_outputs.sum())(query)
