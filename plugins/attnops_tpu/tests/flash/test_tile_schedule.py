"""Schedules have the active tiles of a mask alone, and kernels compute these alone, counted in the interpreter."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.kernels import FlashCall
from attnops.masks import Band, Causal, Chunked, Coverage, Dense, Mask, Segments, SlidingWindow, block_map
from attnops_testing import attention, attention_gradients
from attnops_tpu.flash import backward, forward, prepare, tile_sizes
from attnops_tpu.flash.backend import PallasFlash
from attnops_tpu.flash.plan import FlashPlan
from attnops_tpu.flash.tile_schedule import (
    KINDS,
    MAX_ROWS,
    REDUCED,
    Body,
    TileSchedule,
    kinds_of,
    reduced,
    tile_schedule,
    unpack,
)
from attnops_tpu.generations import target


def operation() -> Any:
    metadata = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error", block_q=16, block_k=16)
    return OperationRegistry.create("attnops-tpu:flash", metadata)


def listed(coverage: np.ndarray, schedule: Any) -> list[list[tuple[int, int, int]]]:
    """(row, column, kind) of each map, with the flags checked against the rows."""
    maps = []
    for entries in np.asarray(schedule.entries).reshape(-1, schedule.longest + 1):
        entry = unpack(entries)
        steps = int(schedule.steps)
        rows = entry.row[:steps]
        active = (entry.first | entry.last | entry.kind)[:steps] > 0
        starts = np.r_[True, rows[1:] != rows[:-1]] & active
        assert (entry.first[:steps][active] == starts[active]).all()
        assert sorted(set(rows[active])) == list(range(coverage.shape[2])), "each row must end, to be written"
        assert entry.last[:steps].sum() == coverage.shape[2]
        assert unpack(entries[steps:]).kind.sum() == 0, "padding does nothing"
        triples = np.stack([rows, entry.column[:steps], entry.kind[:steps]], axis=1)
        maps.append([tuple(triple) for triple in triples.tolist() if triple[2]])
    return maps


@pytest.mark.parametrize("traced", [False, True])
def test_lists_are_the_tiles_that_are_not_empty(traced: bool) -> None:
    coverage = np.random.default_rng(0).integers(0, 3, (2, 3, 7, 5)).astype(np.int8)
    coverage[0, 0, 2] = coverage[1, 2] = Coverage.EMPTY
    schedule = jax.jit(tile_schedule)(jnp.asarray(coverage)) if traced else tile_schedule(coverage)
    flat = coverage.reshape(-1, 7, 5)
    expected = [[(r, c, int(m[r, c])) for r in range(7) for c in range(5) if m[r, c]] for m in flat]
    assert listed(coverage, schedule) == expected
    assert (schedule.traced is not None) == traced


def test_too_many_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="make tiles larger"):
        tile_schedule(np.ones((1, 1, MAX_ROWS + 1, 1), np.int8))


MASKS = {
    "causal": Causal(),
    "window": Causal() & SlidingWindow(20, 0),
    "chunked": Causal() & Chunked(32),
    "documents": Causal() & Segments(np.repeat([0, 1, 2], [20, 50, 26])),
}


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", [name if name == "documents" else pytest.param(name, marks=pytest.mark.slow)
                                  for name in MASKS])  # fmt: skip
@pytest.mark.tier(every=4)
def test_only_tiles_that_are_not_empty_are_computed(name: str, traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: collections.Counter[tuple[str, int, int]] = collections.Counter()

    def counting(which: str, function: Any) -> Any:
        def wrapped(sub: Any, *args: Any) -> Any:
            if sub.row == sub.col == 0:
                count = lambda q, kv: seen.update([(which, int(q), int(kv))])  # noqa: E731
                jax.debug.callback(count, sub.index.q_tile, sub.index.kv_tile)
            return function(sub, *args)

        return wrapped

    monkeypatch.setattr(forward, "_scores", counting("forward", forward._scores))
    monkeypatch.setattr(backward, "products", counting("backward", backward.products))
    flash = operation()
    q, k, v = jnp.ones((1, 96, 1, 8)), jnp.ones((1, 96, 1, 8)), jnp.ones((1, 96, 1, 8))

    def run(mask: Mask, *qkv: jax.Array) -> jax.Array:
        return jax.grad(lambda *qkv: flash(*qkv, mask=mask).attention_outputs.sum(), (0, 1, 2))(*qkv)

    mask = jax.tree.map(jnp.asarray, MASKS[name]) if traced else MASKS[name]
    jax.block_until_ready(jax.jit(run)(mask, q, k, v) if traced else jax.jit(lambda *a: run(mask, *a))(q, k, v))
    jax.effects_barrier()
    coverage = np.asarray(block_map(MASKS[name], (1, 1, 96, 96), 16, 16).coverage)[0, 0]
    tiles = [(int(q), int(kv)) for q, kv in zip(*np.nonzero(coverage), strict=True)]
    assert len(tiles) < coverage.size
    assert seen == collections.Counter((which, q, kv) for which in ("forward", "backward") for q, kv in tiles)


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
def test_maps_of_very_different_lengths_are_drained_once_each(traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries that pad the shorter maps compute nothing."""
    drained: list[int] = []
    step = forward._step

    def counting(plan: Any, refs: Any, indices: Any, first: Any, *rest: Any) -> None:
        if first is None:
            jax.debug.callback(lambda b: drained.append(int(b)), indices[0].b)
        step(plan, refs, indices, first, *rest)

    monkeypatch.setattr(forward, "_step", counting)
    ids = np.stack([np.zeros(64, np.int32), np.arange(64, dtype=np.int32) // 8])
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 64, 1, 8)).astype(np.float32)
    out = jax.jit(lambda ids: operation()(q, k, v, mask=Segments(ids)).attention_outputs)
    result = out(jnp.asarray(ids)) if traced else operation()(q, k, v, mask=Segments(ids)).attention_outputs
    jax.effects_barrier()
    assert sorted(drained) == [0, 1]
    expected = attention(q, k, v, mask=(ids[:, :, None] == ids[:, None])[:, None]).out
    np.testing.assert_allclose(result, expected, atol=5e-6)


@pytest.mark.slow
def test_an_empty_row_is_zero_after_a_row_of_nan() -> None:
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 48, 1, 8)).astype(np.float32)
    q[:, :16] = np.nan
    seen = np.ones((1, 1, 48, 48), bool)
    seen[:, :, 16:32] = False
    out = operation()(q, k, v, mask=Dense(seen)).attention_outputs
    assert (out[:, 16:32] == 0).all()
    np.testing.assert_allclose(out[:, 32:], attention(q[:, 32:], k, v, mask=seen[:, :, 32:]).out, atol=5e-6)


def test_partial_tiles_lack_the_sub_tiles_that_a_mask_hides() -> None:
    full, partial = int(Coverage.FULL), int(Coverage.PARTIAL)
    coverage = np.array([[partial, full, full], [0, partial, full], [0, 0, partial]], np.int8)[None, None]
    sub_tiles = np.triu(np.full((6, 6), full, np.int8))[None, None]  # [keys, queries]
    sub_tiles[..., range(6), range(6)] = partial
    result, bodies = reduced(coverage, sub_tiles)
    assert bodies == (Body(True, hidden=((1, 0),), unmasked=((0, 1),)), Body(masked=True))
    assert (result == np.where(coverage == partial, REDUCED, coverage)).all()
    sub_tiles[..., 4:, 4:] = partial  # the last tile lacks nothing
    result, bodies = reduced(coverage, sub_tiles)
    assert bodies == (Body(True, hidden=((1, 0),), unmasked=((0, 1),)), Body(masked=True))
    assert np.diagonal(result[0, 0]).tolist() == [REDUCED, REDUCED, partial]
    sub_tiles[..., 4, 5], sub_tiles[..., 4, 4] = 0, full  # it lacks another
    assert reduced(coverage, sub_tiles)[1][1] == Body(True, hidden=((0, 1),), unmasked=((0, 0),))
    assert reduced(coverage, np.ones((1, 1, 6, 6), np.int8)) == (coverage, (Body(masked=True), Body(masked=True)))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.tier(quick=["False"])
def test_joined_batches_are_not_padded(traced: bool) -> None:
    coverage = np.array([[[1, 0], [2, 1]], [[1, 0], [0, 0]], [[1, 2], [2, 1]]], np.int8)[:, None]
    schedule = tile_schedule(jnp.asarray(coverage) if traced else coverage, joins=True)
    assert (schedule.joined, schedule.map_shape, schedule.stride) == (3, (1, 1), len(schedule.entries))
    entries, batches = np.asarray(schedule.entries).reshape(2, -1)
    entry = unpack(entries)
    steps = int(schedule.steps)
    assert batches[:steps].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert entry.row[:steps].tolist() == [0, 1, 1, 0, 1, 0, 0, 1, 1]
    assert entry.kind[:steps].tolist() == [1, 2, 1, 1, 0, 1, 2, 2, 1]
    assert entry.first[:steps].tolist() == [1, 1, 0, 1, 1, 1, 0, 1, 0]
    assert (batches[-1], entry.row[-1], entry.kind[-1], entry.last[-1]) == (2, 1, 0, 0), "the last tile is repeated"


def test_code_by_the_tile_before() -> None:
    """A map's first tile follows the last one of the map before, if one core runs all; there is code for no others."""
    empty, partial, full = (int(kind) for kind in (Coverage.EMPTY, Coverage.PARTIAL, Coverage.FULL))
    bodies = (Body(True, hidden=((1, 0),)), Body(True, hidden=((0, 1), (1, 1))))

    def variants(coverage: np.ndarray, **options: Any) -> tuple[TileSchedule, set[tuple[int, tuple[int, ...]]]]:
        schedule = tile_schedule(coverage[:, None], bodies=bodies, sub_tiles=4, **options)
        return schedule, {tuple(variant) for variant in schedule.variants}

    causal = np.array([[[REDUCED, empty], [full, REDUCED]]])
    expected = {(full, (REDUCED,)), (REDUCED, (full,)), (empty, (REDUCED,))}
    assert variants(causal)[1] == expected
    schedule, of_window = variants(causal, sequential=True)
    assert of_window == {*expected, (REDUCED, (REDUCED,))}
    assert [schedule.hidden_before(v) for v in schedule.variants if v.kind == full] == [((1, 0),)]
    assert not schedule.fills(REDUCED), "nothing reads what a tile hides"
    window = np.array([[[REDUCED, empty, empty], [partial, REDUCED, empty], [empty, partial, REDUCED]]])
    schedule, of_window = variants(window)
    assert of_window == {(partial, (REDUCED,)), (REDUCED, (partial,)), (empty, (REDUCED,))}
    assert {v.kind: schedule.hidden_before(v) for v in schedule.variants} == {
        partial: ((1, 0),), REDUCED: ((0, 1), (1, 1)), empty: ((1, 0),)
    }  # fmt: skip
    # Merged, those first that then compute least in addition: they read what is hidden in some of the tiles before.
    maps = np.concatenate([window, np.array([[[partial, full, full], [REDUCED, empty, empty], [full, empty, empty]]])])
    for most, of_full, fills in (
        (9, {(partial,), (full,), (REDUCED,)}, []),
        (5, {(partial,), (full, REDUCED)}, [REDUCED]),
        (4, {(partial, full, REDUCED)}, [partial, REDUCED]),
    ):
        schedule, merged = variants(maps, most_code=most)
        assert {before for kind, before in merged if kind == full} == of_full
        assert [kind for kind in schedule.kinds if schedule.fills(kind)] == fills
    smallest = variants(maps, most_code=0)[0].variants
    assert [variant.kind for variant in smallest] == [full, partial, REDUCED, empty], "code of each kind at least"
    padded = np.concatenate([causal, np.array([[[REDUCED, empty], [REDUCED, empty]]])])
    assert variants(padded)[0].fills(REDUCED), "padding may be between a tile and what accumulates it"
    rows = variants(np.array([[[REDUCED], [empty], [empty], [full]]]))[1]
    assert rows == {(full, (empty,)), (REDUCED, (REDUCED,)), (empty, (REDUCED,)), (empty, (full,))}


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.tier(every=2)
def test_gradients_of_joined_batches_are_written_once_each(traced: bool) -> None:
    """In bfloat16, gradients of queries are accumulated in float32 and written after the last tile of a batch."""
    ids = np.stack([np.zeros(32, np.int32), np.arange(32, dtype=np.int32) // 8])
    random = np.random.default_rng(0)
    q, d = random.normal(size=(2, 2, 32, 2, 8)).astype(jnp.bfloat16)
    k, v = random.normal(size=(2, 2, 32, 1, 8)).astype(jnp.bfloat16)

    def gradients(ids: Any) -> Any:
        return jax.vjp(lambda *qkv: operation()(*qkv, mask=Segments(ids)).attention_outputs, q, k, v)[1](d)

    with target("v6e"):
        result = jax.jit(gradients)(jnp.asarray(ids)) if traced else jax.jit(lambda: gradients(ids))()
    mask = (ids[:, :, None] == ids[:, None])[:, None]
    expected = attention_gradients(*(x.astype(np.float64) for x in (q, k, v)), d_out=d.astype(np.float64), mask=mask)
    for gradient, name in zip(result, ("query", "key", "value"), strict=True):
        np.testing.assert_allclose(np.asarray(gradient, np.float64), expected.values[name], atol=0.04)


def test_kinds_of_several_schedules_have_one_order() -> None:
    """The benchmark counts the code of each kind by its place in the kernel."""
    schedules = [tile_schedule(np.full((1, 1, 1, 1), kind)) for kind in reversed(KINDS)]
    assert kinds_of(schedules) == KINDS
    assert kinds_of(schedules[:2]) == tuple(kind for kind in KINDS if kind in KINDS[1:])


@pytest.mark.slow
def test_what_is_not_joined() -> None:
    coverage = np.array([[[1, 0], [2, 1]], [[1, 0], [0, 0]]], np.int8)
    assert tile_schedule(coverage[:, None]).joined == 1
    assert tile_schedule(coverage[None], joins=True).joined == 1, "maps of heads"
    assert tile_schedule(coverage[[0, 0], None], joins=True).joined == 1, "nothing would be padded"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["causal", *(pytest.param(name, marks=pytest.mark.slow) for name in ("window", "documents", "per head"))]
)
@pytest.mark.tier(every=4)
def test_attention_without_hidden_sub_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients are those of the contract, and the hidden sub-tiles are not computed."""
    monkeypatch.setattr(tile_sizes, "_sub_tile", lambda block, most: 8)
    hidden: dict[str, list[int]] = {"forward": [], "backward": []}
    step, add = forward._step, backward._add_tile
    monkeypatch.setattr(forward, "_step", lambda *args: (hidden["forward"].append(len(args[4].hidden)), step(*args))[1])
    monkeypatch.setattr(
        backward, "_add_tile", lambda *args: (hidden["backward"].append(len(args[3].hidden)), add(*args))[1]
    )
    q, k, v, d = np.random.default_rng(0).normal(size=(4, 1, 28, 1, 8)).astype(np.float32)
    if name in ("causal", "per head"):
        q, d = (np.repeat(x, 2, axis=2) for x in (q, d))
    H = q.shape[2]
    mask = (
        SlidingWindow(np.array([[5, 9]]), 0)
        if name == "per head"
        else Causal() & Segments(np.repeat([0, 1, 2], [6, 12, 10]))
        if name == "documents"
        else Causal() & SlidingWindow(9, 0)
        if name == "window"
        else MASKS[name]
    )
    with target("v6e"):  # one core runs both heads
        out, pull_back = jax.vjp(lambda *qkv: operation()(*qkv, mask=mask).attention_outputs, q, k, v)
        result = pull_back(d)
    assert all(max(each) > 0 for each in hidden.values())
    # Tiles at both ends of a window lack sub-tiles, others than each other.
    assert name != "window" or hidden["backward"] == [1, 1]
    seen = np.asarray(mask.bind(1, H, 28, 28).dense(1, H, 28, 28))
    np.testing.assert_allclose(out, attention(q, k, v, mask=seen).out, atol=5e-6)
    expected = attention_gradients(q, k, v, mask=seen, d_out=d).values
    for x, y in zip(result, (expected[name] for name in ("query", "key", "value")), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


BANDS = {
    "half a tile": (Causal() & SlidingWindow(15, 0), [(None, 15), (0, 15)]),
    "two tiles": (Causal() & SlidingWindow(63, 0), [(0, None), (None, 63)]),
    "between": (Causal() & SlidingWindow(43, 0), [(None, 43), (0, None)]),
    "both sides": (SlidingWindow(20, 11), [(-11, 20), (-11, 20)]),
    "documents": (Causal() & Segments(np.repeat(np.arange(6), 16)), [(0, None)]),
    "ragged documents": (Causal() & Segments(np.repeat([0, 1, 2], [37, 9, 50])), [None]),
    "rows without keys": (Causal(offset=-40) & SlidingWindow(30, 0, offset=-40), [(40, None), (40, 70)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("most", [9.0, 0.0], ids=["all variants", "merged"])
@pytest.mark.parametrize("name", BANDS)
@pytest.mark.tier(every=len(BANDS))
def test_attention_with_several_variants(name: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variant accumulates what the tiles before it show, and only a band is compared where the mask is no more."""
    monkeypatch.setattr(tile_sizes, "_sub_tile", lambda block, most: 8)
    monkeypatch.setattr(prepare, "most_forward_code", lambda bq, bk: most)
    bands = []
    step = forward._step
    monkeypatch.setattr(forward, "_step", lambda *args: (bands.append(args[4].band), step(*args))[1])
    q, k, v, d = np.random.default_rng(0).normal(size=(4, 1, 96, 2, 8)).astype(np.float32)
    mask, expected_bands = BANDS[name]
    metadata = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error", block_q=32, block_k=32)
    flash = OperationRegistry.create("attnops-tpu:flash", metadata)
    with target("v6e"):
        out, pull_back = jax.vjp(lambda *qkv: flash(*qkv, mask=mask).attention_outputs, q, k, v)
        result = pull_back(d)
    assert set(bands) >= set(expected_bands)
    seen = np.asarray(mask.bind(1, 2, 96, 96).dense(1, 2, 96, 96))
    np.testing.assert_allclose(out, attention(q, k, v, mask=seen).out, atol=5e-6)
    expected = attention_gradients(q, k, v, mask=seen, d_out=d).values
    for x, y in zip(result, (expected[name] for name in ("query", "key", "value")), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


def draws(rng: np.random.Generator) -> tuple[Mask, int, int]:
    """A mask that is known when tracing, and numbers of queries and of keys."""
    T, S = (int(256 * n - cut) for n, cut in zip(rng.integers(1, 9, 2), rng.choice([0, 3, 200], 2), strict=True))
    low, high = sorted(rng.integers(-S, T, 2).tolist())
    ids = np.sort(rng.integers(0, 4, max(T, S)))
    masks = [Band(low, high), Band(None, high), Band(low, None), SlidingWindow(int(rng.integers(0, 900)), 0),
             SlidingWindow(np.array([[5, 600]]), 100), Chunked(int(rng.integers(1, 900))),
             Segments(ids[-T:], ids[-S:])]  # fmt: skip
    first, second = rng.choice(len(masks), 2)
    return masks[first] & masks[second] if rng.integers(2) else masks[first], T, S


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v6e", "tpu7x"])
def test_schedules_show_what_a_mask_shows(generation: str) -> None:
    """Sub-tiles that are hidden, not masked, or masked by a band; and what each step reads of the tile before."""
    rng, seen_bands = np.random.default_rng(0), 0
    for _ in range(40):
        mask, T, S = draws(rng)
        mask = mask.bind(1, 2, T, S)
        q, k = (jax.ShapeDtypeStruct((1, n, 2, 128), jnp.bfloat16) for n in (T, S))
        sizes = {f"block_{x}": int(rng.choice([256, 512, 1024])) for x in "qk"}
        with target(generation):
            plan = PallasFlash().plan(FlashCall(OperationMetadata(platform="tpu", **sizes), q, k, k, mask=mask))
            schedules = prepare.tile_schedules(plan, mask)
        seen = np.broadcast_to(np.asarray(mask.dense(1, 2, T, S)), (1, 2, T, S))[0]
        dense = np.pad(seen, ((0, 0), (0, plan.Tp - T), (0, plan.Sp - S)))
        for schedule, by_key in ((schedules.forward[0], False), (schedules.spans[0], True)):
            shape = (plan.backward if by_key else plan.forward)[:2]
            maps = np.asarray(schedule.entries).reshape(-1, schedule.stride)[:, : schedule.longest + 1]
            for h in range(2):
                entry, shown = unpack(maps[h % len(maps)]), np.zeros((plan.Tp, plan.Sp), bool)
                seen_bands += sum(body.band is not None for body in schedule.bodies)
                for row, column, kind in zip(entry.row[:-1], entry.column[:-1], entry.kind[:-1], strict=True):
                    if kind:
                        at = (column, row) if by_key else (row, column)
                        _show(shown, plan, schedule.body(int(kind)), dense[h], at, shape, by_key)
                np.testing.assert_array_equal(shown[:T, :S], seen[h], str(mask))
                if not by_key:
                    _check_reads(schedule, entry.kind[:-1].tolist())
    assert seen_bands > 40


def _show(
    shown: np.ndarray, plan: FlashPlan, body: Body, dense: np.ndarray, tile: tuple[int, int], sizes: tuple[int, int],
    by_key: bool,
) -> None:  # fmt: skip
    """What the code of a tile shows, by sub-tiles of (keys, queries)."""
    rows, cols = sizes
    for i, j in np.ndindex(plan.bq // cols, plan.bk // rows):
        q = np.arange(cols)[:, None] + tile[0] * plan.bq + i * cols
        kv = np.arange(rows) + tile[1] * plan.bk + j * rows
        at, here = ((j, i) if by_key else (i, j)), (slice(q[0, 0], q[-1, 0] + 1), slice(kv[0], kv[-1] + 1))
        if at in body.hidden:
            continue
        if not body.is_masked(*at):
            shown[here] = True
        elif body.band is not None:
            low, high = body.band
            shown[here] = (low is None or kv <= q - low) & (True if high is None else kv >= q - high)
        else:
            shown[here] = dense[here]


def _check_reads(schedule: TileSchedule, kinds: list[int]) -> None:
    """A step reads all that the tile before shows, and of what it hides only what that has filled."""
    for before, kind in itertools.pairwise(kinds):
        if kind == before == Coverage.EMPTY:
            continue  # padding, or rows without tiles, of which the first one accumulates
        variants = [v for v in schedule.variants if v.kind == kind]
        (variant,) = (v for v in variants if before in v.before)
        left_out, hidden = set(schedule.hidden_before(variant)), set(schedule.body(before).hidden)
        assert left_out <= hidden
        assert left_out == hidden or schedule.fills(before)
