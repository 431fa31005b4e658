"""Masks: what they allow, what they say of tiles, how they combine, bind and draw."""

import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import draws
from hypothesis import given, settings
from hypothesis import strategies as st

from attnops.masks import (
    Causal,
    Chunked,
    Coverage,
    Dense,
    Full,
    KeyPadding,
    Lengths,
    Mask,
    MaskFn,
    PrefixLM,
    Segments,
    SlidingWindow,
    block_map,
)
from attnops_testing.strategies import masks

SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 13), st.integers(1, 13))


def dense(mask: Mask, shape: tuple[int, int, int, int]) -> np.ndarray:
    return np.broadcast_to(np.asarray(mask.dense(*shape)), shape)


def truth(array: np.ndarray, block_q: int, block_k: int) -> np.ndarray:
    """The coverage of each tile, by looking at all of it."""
    B, H, T, S = array.shape
    rows, columns = -(-T // block_q), -(-S // block_k)
    codes = np.empty((B, H, rows, columns), np.int8)
    for i in range(rows):
        for j in range(columns):
            tile = array[:, :, i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
            codes[:, :, i, j] = np.where(
                tile.all((2, 3)), Coverage.FULL, np.where(tile.any((2, 3)), Coverage.PARTIAL, Coverage.EMPTY)
            )
    return codes


@st.composite
def masks_and_shapes(draw):
    shape = draw(SHAPES)
    return draw(masks(*shape, depth=3)), shape


@draws(40, 100, masks_and_shapes(), st.integers(1, 6), st.integers(1, 6))
def test_empty_and_full_are_never_claimed_wrongly(drawn, block_q, block_k):
    mask, shape = drawn
    claimed = block_map(mask, shape, block_q, block_k)
    whole = dense(mask, shape)
    actual = truth(whole, block_q, block_k)
    assert claimed.is_static
    check_hidden(mask, shape, whole)
    assert claimed.coverage.shape[2:] == actual.shape[2:]
    codes = np.broadcast_to(claimed.coverage, actual.shape)
    assert (codes[codes != Coverage.PARTIAL] == actual[codes != Coverage.PARTIAL]).all()


def check_hidden(mask: Mask, shape: tuple[int, int, int, int], whole: np.ndarray) -> None:
    """A mask that claims to hide no token shows each to somebody."""
    if not mask.bind(*shape).has_fully_masked_tokens(*shape[2:]):
        assert whole.any(axis=2).all()
        assert whole.any(axis=3).all()


@settings(max_examples=15)
@given(masks_and_shapes(), st.integers(1, 6), st.integers(1, 6))
def test_what_is_traced_is_claimed_alike(drawn, block_q, block_k):
    mask, shape = drawn
    codes = block_map(mask, shape, block_q, block_k).coverage
    arrays, tree = jax.tree.flatten(mask)
    traced = jax.jit(lambda x: block_map(jax.tree.unflatten(tree, x), shape, block_q, block_k).coverage)(arrays)
    np.testing.assert_array_equal(traced, codes)


@draws(50, 120, st.data())
def test_nothing_that_could_be_decided_is_called_partial(data):
    """Causal, SlidingWindow, Chunked and Segments at aligned tiles: the claim is the truth."""
    block, tiles = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    length = block * tiles
    documents = np.sort(data.draw(st.lists(st.integers(0, 3), min_size=tiles, max_size=tiles)))
    leaf = st.one_of(
        st.just(Causal()),
        st.builds(Causal, offset=st.integers(-length, length)),
        st.builds(SlidingWindow, st.integers(0, length), st.integers(0, length)),
        st.builds(SlidingWindow, st.none(), st.integers(0, length)),
        st.builds(lambda n: Chunked(n * block), st.integers(1, 3)),
        st.just(Segments(np.repeat(documents, block))),
    )
    mask = data.draw(st.recursive(leaf, combined, max_leaves=6))
    shape = (1, 1, length, length)
    claimed = block_map(mask, shape, block, block).coverage
    whole = dense(mask, shape)
    np.testing.assert_array_equal(claimed, truth(whole, block, block))
    check_hidden(mask, shape, whole)


def combined(children):
    return st.one_of(
        st.builds(lambda a, b: a & b, children, children),
        st.builds(lambda a, b: a | b, children, children),
        st.builds(lambda a: ~a, children),
    )


@settings(max_examples=5)
@given(masks_and_shapes())
@pytest.mark.slow
def test_allowed_is_dense_elementwise(drawn):
    mask, shape = drawn
    B, H, T, S = shape
    whole = dense(mask, shape)
    bound = mask.bind(*shape)
    at = [(b, h, q, kv) for b in range(B) for h in range(H) for q in {0, T // 2, T - 1} for kv in {0, S // 2, S - 1}]
    for b, h, q, kv in at:
        assert bool(bound.allowed(b, h, q, kv)) == whole[b, h, q, kv]


@draws(10, 25, masks_and_shapes())
def test_one_tile_agrees_with_the_map(drawn):
    mask, shape = drawn
    bound = mask.bind(*shape)
    T, S = shape[2:]
    q_range, kv_range = (T // 3, T), (0, max(1, S // 2))
    codes = np.asarray(bound.coverage(q_range, kv_range))
    tile = dense(mask, shape)[:, :, slice(*q_range), slice(*kv_range)]
    codes = np.broadcast_to(codes, shape[:2])
    assert tile.all((2, 3))[codes == Coverage.FULL].all()
    assert not tile.any((2, 3))[codes == Coverage.EMPTY].any()


# Each primitive against what its sentence says, in plain numpy.
I, J = np.arange(4)[:, None], np.arange(6)[None, :]  # T = 4, S = 6, so positions are I + 2


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Full(), I >= 0),
        (Causal(), I + 2 >= J),
        (Causal(offset=0), I >= J),
        (SlidingWindow(1, 0), (I + 2 - 1 <= J) & (I + 2 >= J)),
        (SlidingWindow(2, 1), (I + 2 - 2 <= J) & (I + 2 + 1 >= J)),
        (SlidingWindow(2, 1, offset=0), (I - 2 <= J) & (I + 1 >= J)),
        (SlidingWindow(None, 0), I + 2 >= J),
        (SlidingWindow(None, None), I >= 0),
        (Chunked(3), (I + 2) // 3 == J // 3),
        (PrefixLM(4), (J < 4) | (I + 2 >= J)),
        (Segments([0, 0, 1, 2], [0, 1, 1, 2, 2, 3]), np.array([0, 0, 1, 2])[:, None] == np.array([0, 1, 1, 2, 2, 3])),
        (Lengths([4]), J < 4),
        (Lengths([4], [2]), (J < 4) & (I < 2)),
        (KeyPadding([1, 1, 0, 1, 0, 0]), np.array([1, 1, 0, 1, 0, 0], bool)[None]),
        (Dense((I + J)[None, None] % 3 == 0), (I + J) % 3 == 0),
        (MaskFn(lambda b, h, q, kv: (q + kv) % 2 == 0), (I + J) % 2 == 0),
        (MaskFn(lambda b, h, q, kv, n: q * n >= kv, (np.array(2),)), 2 * I >= J),
        (Causal() & ~SlidingWindow(1, 0), (I + 2 >= J) & ~((I + 1 <= J) & (I + 2 >= J))),
        (
            Causal().at([5, 0, 2, 3], [0, 5, 1, 4, 2, 3]),
            np.array([5, 0, 2, 3])[:, None] >= np.array([0, 5, 1, 4, 2, 3]),
        ),
        (
            (Chunked(2) & Causal()).at(kv_positions=np.arange(6)[::-1]),
            ((I + 2) // 2 == (5 - J) // 2) & (I + 2 >= 5 - J),
        ),
    ],
    ids=repr,
)
def test_each_primitive_allows_what_its_definition_says(mask, expected):
    shape = (1, 1, 4, 6)
    np.testing.assert_array_equal(dense(mask, shape)[0, 0], np.broadcast_to(expected, (4, 6)))


def test_window_sees_as_many_keys_as_the_config_says():
    """``sliding_window=4`` of a model is 4 keys, itself included."""
    seen = dense(Causal() & SlidingWindow(3, 0), (1, 1, 9, 9))[0, 0].sum(axis=1)
    np.testing.assert_array_equal(seen, [1, 2, 3, 4, 4, 4, 4, 4, 4])


@pytest.mark.slow
def test_parameters_by_batch_and_head_are_those_of_single_masks():
    windows = SlidingWindow(np.array([[0, 2]]), 0)  # [1, H]
    offsets = Causal(offset=np.array([[0], [3]]))  # [B, 1]
    shape = (2, 2, 4, 4)
    array = dense(windows & offsets, shape)
    for b, offset in enumerate((0, 3)):
        for h, left in enumerate((0, 2)):
            expected = dense(SlidingWindow(left, 0) & Causal(offset=offset), (1, 1, 4, 4))[0, 0]
            np.testing.assert_array_equal(array[b, h], expected)
    assert block_map(windows & offsets, shape, 2, 2).coverage.shape == (2, 2, 2, 2)
    assert block_map(windows, shape, 2, 2).coverage.shape == (1, 2, 2, 2)


def test_sequence_lengths_padding_and_boolean_arrays_become_masks():
    cu_seqlens = [0, 3, 5]
    assert dense(Segments.from_cu_seqlens(cu_seqlens, 6), (1, 1, 6, 6))[0, 0].sum() == 9 + 4 + 1
    traced = jax.jit(lambda c: Segments.from_cu_seqlens(c, 6).dense(1, 1, 6, 6))(jnp.array(cu_seqlens))
    np.testing.assert_array_equal(traced, dense(Segments.from_cu_seqlens(cu_seqlens, 6), (1, 1, 6, 6)))
    hf = np.array([[1, 1, 0], [1, 1, 1]])
    np.testing.assert_array_equal(dense(KeyPadding(hf), (2, 1, 1, 3))[:, 0, 0], hf.astype(bool))
    array = np.ones((1, 1, 3, 3), bool)
    for mask in (Causal() & array, array & Causal(), Causal() | np.zeros_like(array)):
        np.testing.assert_array_equal(dense(mask, (1, 1, 3, 3)), dense(Causal(), (1, 1, 3, 3)))
    with pytest.raises(TypeError, match="combines with masks and with boolean arrays of rank 4, not with ndarray"):
        Causal() & np.ones((3, 3), bool)


def test_which_masks_hide_tokens():
    def hides(mask, T, S):
        return mask.bind(1, 1, T, S).has_fully_masked_tokens(T, S)

    ids = jnp.array([0, 1, 1])
    windowed, packed = Causal() & SlidingWindow(1, 0), Causal() & Segments(ids)
    for mask in (Causal(), windowed, packed, SlidingWindow(0, 0) | ~Full(), Chunked(2), PrefixLM(1) & Chunked(1)):
        assert not hides(mask, 3, 3)
        assert not hides(mask.bind(1, 1, 3, 3), 3, 3)
    # Decode and prefill, and an offset that reaches all keys.
    for mask in (Full(), Causal(), Causal(offset=9), PrefixLM(2), Causal() | KeyPadding([0, 1, 1, 1, 1])):
        assert not hides(mask, 2, 5)
    for mask in (Segments(ids, ids + 1), Lengths([1]), KeyPadding([1, 0, 1]), Causal() & ~KeyPadding([1, 0, 1]),
                 ~Causal(), Causal() & ~SlidingWindow(0, 0), Causal().at([0, 1, 2], [0, 1, 2]), Causal(offset=-1),
                 SlidingWindow(1, 0, offset=2), Chunked(2, offset=1), MaskFn(lambda b, h, q, kv: q >= kv)):  # fmt: skip
        assert hides(mask, 3, 3)
    for mask in (Causal(offset=1), windowed, SlidingWindow(5, 0), Chunked(2), ~Full()):
        assert hides(mask, 2, 5)
    assert hides(Causal(), 5, 2)
    assert jax.jit(lambda offset: jnp.array(hides(Causal(offset), 3, 3)))(0)


@pytest.mark.parametrize(
    ("xp", "dtype"), [(np, np.uint8), (np, np.uint32), (np, np.int8), (np, np.int64), (jnp, np.uint8), (jnp, np.uint32)]
)
@pytest.mark.tier(quick=["numpy-int8", "numpy-int64"])
def test_integers_of_every_width_mean_the_same(xp, dtype):
    def number(x):
        return xp.asarray([[x]], dtype)

    positions = xp.arange(5).astype(dtype)
    narrow = (Causal(number(2)), SlidingWindow(number(3), number(1)), Chunked(number(2)), PrefixLM(number(2)),
              Causal().at(positions, positions[::-1]),
              Lengths(xp.asarray([3], dtype), xp.asarray([4], dtype)))  # fmt: skip
    wide = (Causal(2), SlidingWindow(3, 1), Chunked(2), PrefixLM(2),
            Causal().at(np.arange(5), np.arange(5)[::-1]), Lengths([3], [4]))  # fmt: skip
    for a, b in zip(narrow, wide, strict=True):
        shape = (1, 1, 5, 5)
        np.testing.assert_array_equal(dense(a, shape), dense(b, shape))
        np.testing.assert_array_equal(block_map(a, shape, 2, 2).coverage, block_map(b, shape, 2, 2).coverage)


@pytest.mark.parametrize("far", [2**31 - 1, sys.maxsize, np.int64(2**40), np.array([[2**62]])])
def test_a_window_of_any_size(far):
    for offset in (None, 0, 3):
        expected = dense(Causal(offset), (1, 1, 4, 8))
        np.testing.assert_array_equal(dense(SlidingWindow(far, 0, offset), (1, 1, 4, 8)), expected)
    assert block_map(SlidingWindow(far, 0), (1, 1, 4, 8), 4, 4).coverage.tolist() == [[[[2, 1]]]]
    assert not dense(SlidingWindow(far, 0, offset=-5), (1, 1, 4, 8)).any()


def test_positions_add_to_what_a_mask_has():
    shape = (1, 1, 4, 6)
    q, kv = np.array([5, 0, 2, 3]), np.array([0, 5, 1, 4, 2, 3])
    both = dense(Causal().at(q, kv), shape)
    np.testing.assert_array_equal(dense(Causal().at(q_positions=q).at(kv_positions=kv), shape), both)
    np.testing.assert_array_equal(dense(Causal().at(kv_positions=kv).at(q_positions=q), shape), both)
    np.testing.assert_array_equal(dense(Causal().at(kv_positions=kv), shape)[0, 0], kv <= I + 2)
    np.testing.assert_array_equal(dense(Causal(offset=0).at(kv_positions=kv), shape)[0, 0], kv <= I)
    np.testing.assert_array_equal(dense(Lengths([4], [2]).at(kv_positions=kv), shape)[0, 0], (kv < 4) & (I < 2))
    function = MaskFn(lambda b, h, q, kv: q >= kv)
    np.testing.assert_array_equal(dense(function.at(kv_positions=kv), shape)[0, 0], kv <= I)
    for mask in (Causal(offset=3), Causal(offset=3).at(kv_positions=kv), Full() & Causal(offset=3)):
        with pytest.raises(
            ValueError, match=r"Causal\(offset=3\) has offset=3, and q_positions=<int64 \[4\]> are given"
        ):
            mask.at(q)


def test_a_function_of_no_index_allows_all_or_nothing():
    for always in (True, False):
        assert (dense(MaskFn(lambda b, h, q, kv, x=always: x), (1, 2, 3, 4)) == always).all()
        assert MaskFn(lambda b, h, q, kv, x=always: x).dense(1, 2, 3, 4).ndim == 4


def test_a_mask_is_a_pytree_that_compares_by_value():
    mask = Causal() & Segments(np.array([0, 0, 1])) & MaskFn(jnp.greater_equal, (1,)) | ~Lengths([2])
    leaves, tree = jax.tree.flatten(mask)
    assert jax.tree.unflatten(tree, leaves) == mask
    assert mask == Causal() & Segments([0, 0, 1]) & MaskFn(jnp.greater_equal, (1,)) | ~Lengths([2])
    assert mask != Causal() & Segments([0, 1, 1]) & MaskFn(jnp.greater_equal, (1,)) | ~Lengths([2])
    assert Causal() != Causal(offset=1)
    assert hash(Causal()) == hash(Causal())
    traces = []

    @jax.jit
    def run(mask):
        traces.append(1)
        return mask.dense(1, 1, 3, 3)

    for ids in ([0, 0, 1], [0, 1, 1]):
        ids = jnp.array(ids)
        np.testing.assert_array_equal(run(Segments(ids))[0, 0], ids[:, None] == ids)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: bool(Causal()), "the truth of Causal() is ambiguous; combine masks with &, | and ~"),
        (lambda: SlidingWindow(-1, 0), "SlidingWindow's left=-1 must be at least 0"),
        (lambda: SlidingWindow(2, np.array([[1, -3]])), "SlidingWindow's right=-3 must be at least 0"),
        (lambda: Chunked(0), "Chunked's size=0 must be at least 1"),
        (lambda: Chunked(np.array([[2, 0]])), "Chunked's size=0 must be at least 1"),
        (
            lambda: Dense(np.eye(3, dtype=int)[None, None]).bind(1, 1, 3, 3),
            "Dense's array has dtype int64, but must be",
        ),
        (lambda: Dense(5).bind(1, 1, 3, 3), "Dense's array has shape (), but must be 4-D"),
        (lambda: Lengths(5).bind(1, 1, 3, 3), "Lengths' kv_lengths has shape (), but must have shape [B]=(1,)"),
        (lambda: Lengths([1.5]).bind(1, 1, 3, 3), "Lengths' kv_lengths has dtype float64, but must be integers"),
        (
            lambda: KeyPadding([0.0, -1e9]).bind(1, 1, 2, 2),
            "is_token has dtype float64, but must be boolean or integers",
        ),
        (lambda: Segments([0, "a", 1]).show(3), "Segments' q_ids has dtype <U21, but must be integers"),
        (
            lambda: Segments.from_cu_seqlens([[0, 2]], 3),
            "cu_seqlens has shape (1, 2), but must have shape [documents + 1]",
        ),
        (lambda: Chunked(None), "Chunked's size=None must be an int, or an integer array of shape [B or 1, H or 1]"),
        (lambda: PrefixLM(None), "PrefixLM's length=None must be an int, or an integer array of shape"),
        (lambda: Segments.from_cu_seqlens([0, 1.5], 3), "cu_seqlens has dtype float64, but must be integers"),
        (
            lambda: Segments.from_cu_seqlens([0, 2, 1], 3),
            "cu_seqlens=[0, 2, 1] must begin with 0, not decrease, and end",
        ),
        (lambda: Segments.from_cu_seqlens(jnp.array([0, 4]), 3), "end at length=3 or before; give the sums of"),
        (lambda: Segments.from_cu_seqlens([1, 2], 3), "cu_seqlens=[1, 2] must begin with 0"),
        (lambda: Causal().at([0.5, 1]).bind(1, 1, 2, 2), "q_positions has dtype float64, but must be integers"),
        (lambda: Causal().coverage((0, 2), (0, 2)), "call mask.bind(B, H, T, S)"),
        (lambda: Chunked(2).allowed(0, 0, 1, 1), "call mask.bind(B, H, T, S)"),
        (lambda: Segments([0, 1]).allowed(0, 0, 1, 1), "call mask.bind(B, H, T, S)"),
        (lambda: KeyPadding([0, 1]).coverage((0, 2), (0, 2)), "call mask.bind(B, H, T, S)"),
        (lambda: Segments([[0, 1], [0, 0]]).show(2, b=5), "q_ids has shape (2, 2), but must have shape [2] or [6, 2]"),
        (lambda: Segments([0, 1]).bind(1, 1, 2, 3), "T=2 and S=3 differ: give Segments(q_ids, kv_ids)"),
        (lambda: Segments([0, 1, 1]).bind(1, 1, 2, 2), "q_ids has shape (3,), but must have shape [2] or [1, 2]"),
        (lambda: Lengths([1, 2]).bind(1, 1, 2, 2), "kv_lengths has shape (2,), but must have shape [B]=(1,)"),
        (lambda: KeyPadding([1]).bind(1, 1, 2, 2), "is_token has shape (1,), but must have shape [2] or [1, 2]"),
        (lambda: Dense(np.ones((1, 1, 2, 2), bool)).bind(1, 1, 2, 3), "its dimension S is 2, but must be 1 or 3"),
        (lambda: Causal(offset=True).bind(1, 1, 2, 2), "Causal's offset=True must be an int, or an integer array"),
        (lambda: SlidingWindow(True, 0).bind(1, 1, 2, 2), "SlidingWindow's left=True must be an int"),
        (lambda: Chunked(True), "Chunked's size=True must be an int"),
        (lambda: PrefixLM(False), "PrefixLM's length=False must be an int"),
        (lambda: Causal(offset=1.5).bind(1, 1, 2, 2), "Causal's offset=1.5 must be an int, or an integer array"),
        (
            lambda: Causal(offset=np.zeros(2, int)).bind(2, 2, 2, 2),
            "give one per batch as x[:, None]",
        ),
        (lambda: MaskFn(lambda b, h, q, kv: q * kv).dense(1, 1, 2, 2), "gave dtype int32, but must give booleans"),
        (lambda: Causal().bind(1, 1, 4, 4).coverage((2, 2), (0, 1)), "q_range=(2, 2) must hold at least one index"),
        (lambda: Causal().at([0, 1]).bind(1, 1, 3, 3), "q_positions has shape (2,), but must have shape [3] or [1, 3]"),
    ],
)
def test_impossible_masks_are_refused_with_a_reason(make, text):
    with pytest.raises((ValueError, TypeError)) as caught:
        make()
    assert text in str(caught.value)


def test_the_map_of_a_million_tokens_takes_little_memory():
    """The map of a causal mask: 4,194,304 tiles in under 64 MB."""
    shape = (1, 1, 1 << 20, 1 << 20)
    tracemalloc.start()
    made = block_map(Causal(), shape, 512, 512)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20
    tiles = 2048
    assert made.count(Coverage.PARTIAL) == tiles
    assert made.count(Coverage.FULL) == tiles * (tiles - 1) // 2


@pytest.mark.slow
def test_a_mask_shows_its_tiles_and_its_expression():
    assert Causal().show(2, 4) == "█ █ █ ·\n█ █ █ █"
    assert str(Causal() & SlidingWindow(1, 0)).splitlines()[:4] == [
        "Causal() & SlidingWindow(1, 0)",
        "█ · · · · · · ·",
        "█ █ · · · · · ·",
        "· █ █ · · · · ·",
    ]
    assert str(Segments([0, 0, 1])).splitlines()[1:] == ["█ █ ·", "█ █ ·", "· · █"]
    assert repr((Causal() | PrefixLM(3)) & ~(Full() & Chunked(2))) == (
        "(Causal() | PrefixLM(3)) & ~(Full() & Chunked(2))"
    )
    texts = []
    jax.eval_shape(lambda ids: texts.append(str(Segments(ids))), jnp.zeros(3, int))
    assert texts == ["Segments(<int32 [3]>)\n(traced: no picture)"]
    assert Lengths([1, 3]).show(2, 4, b=1) == "█ █ █ ·\n█ █ █ ·"
    assert str(Lengths([1, 3])).splitlines()[1] == "█ · · · · · · ·"
    windows = SlidingWindow(np.array([[0, 1]]), 0)
    assert windows.show(2, h=0) == "█ ·\n· █"
    assert windows.show(2, h=1) == "█ ·\n█ █"


@pytest.mark.slow
def test_not_twice_is_the_mask_itself():
    mask = Causal()
    for _ in range(3001):
        mask = ~mask
    assert repr(mask) == "~Causal()"
    np.testing.assert_array_equal(dense(mask, (1, 1, 2, 2))[0, 0], [[False, True], [False, False]])
