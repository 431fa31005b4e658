"""Ids and positions of every width mean what Python's integers mean, or are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationRegistry
from attnops.kernels.parts import of_mask
from attnops.masks import Causal, Chunked, Coverage, Lengths, MaskFn, PrefixLM, Segments, SlidingWindow, block_map

FAR = 2**32
NOW = 1_700_000_000  # seconds since 1970


def check(mask, expected):
    """Its scores, its tiles, and what kernels compute from its values, are the expected."""
    T, S = expected.shape
    shape = (1, 1, T, S)
    np.testing.assert_array_equal(np.broadcast_to(mask.dense(*shape), shape)[0, 0], expected)
    codes = np.asarray(block_map(mask, shape, 1, 1).coverage)[0, 0]
    np.testing.assert_array_equal(codes, np.where(expected, Coverage.FULL, Coverage.EMPTY))
    tiles = np.asarray(block_map(mask, shape, T, S).coverage).item()
    assert tiles == Coverage.PARTIAL or tiles == (Coverage.FULL if expected.all() else Coverage.EMPTY)
    function, leaves, _ = of_mask(mask.bind(*shape))
    values = [
        np.asarray(x).astype(np.int32 if x.dtype != bool else bool)[0, 0] for x in function.compute(leaves, shape)
    ]
    q, kv = jnp.arange(T, dtype=jnp.int32)[:, None], jnp.arange(S, dtype=jnp.int32)
    found = function.apply(None, jnp.int32(0), jnp.int32(0), q, kv, [jnp.asarray(x) for x in values])
    np.testing.assert_array_equal(jnp.broadcast_to(found, (T, S)), expected)


@pytest.mark.parametrize(
    ("q_ids", "kv_ids"),
    [
        (np.array([1, 1, 1 + FAR, FAR]), None),
        (np.array([1, 2**63, 2**64 - 1, 2**63], np.uint64), None),
        (np.array([2**64 - 1, 1, 2**63], np.uint64), np.array([-1, 1, -(2**63)])),
        (np.array([2**32 - 1, 7], np.uint32), np.array([-1, 7], np.int32)),
        (np.array([255, 0, 3], np.uint8), np.array([-1, 0, 3], np.int8)),
        (jnp.array([2**32 - 1, 7], jnp.uint32), jnp.array([-1, 7], jnp.int32)),
        (np.array([FAR + 7, 7]), jnp.array([7, 3], jnp.int32)),
    ],
)
@pytest.mark.tier(quick=["q_ids4-kv_ids4"])
def test_segments_compare_by_value(q_ids, kv_ids):
    q, kv = (np.asarray(x).astype(object) for x in (q_ids, q_ids if kv_ids is None else kv_ids))
    check(Segments(q_ids, kv_ids), q[:, None] == kv[None])


def test_renumbering_keeps_whole_tiles():
    ids = np.repeat(np.array([5, -3, 8]) * FAR, 2)
    codes = block_map(Segments(ids), (1, 1, 6, 6), 2, 2).coverage[0, 0]
    np.testing.assert_array_equal(codes, 2 * np.eye(3))


def test_traced_segments_of_32_bits_without_a_sign():
    ids = jnp.array([2**32 - 1, 7, 2**31], jnp.uint32)
    found = jax.jit(lambda ids: Segments(ids).dense(1, 1, 3, 3))(ids)
    np.testing.assert_array_equal(found[0, 0], np.eye(3, dtype=bool))
    with pytest.raises(
        ValueError, match=r"q_ids of dtype uint32 and Segments' kv_ids of dtype int32 can't be compared"
    ):
        jax.jit(lambda q, kv: Segments(q, kv).dense(1, 1, 3, 3))(ids, jnp.arange(3))


def test_traced_segments_of_64_bits():
    with jax.enable_x64(True):
        ids = jnp.array([1, 1 + FAR, 1])
        found = jax.jit(lambda ids: block_map(Segments(ids), (1, 1, 3, 3), 1, 1).coverage)(ids)
        np.testing.assert_array_equal(found[0, 0] == Coverage.FULL, np.equal.outer([0, 1, 0], [0, 1, 0]))
        with pytest.raises(ValueError, match="dtype uint64 and Segments' kv_ids of dtype int64 can't be compared"):
            jax.jit(lambda ids: Segments(ids, ids.astype(int)).dense(1, 1, 3, 3))(ids.astype(jnp.uint64))


@pytest.mark.slow
def test_segments_of_several_dtypes_under_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        mask = Segments(jnp.array([0, 1], jnp.int8), jnp.array([0, 1], jnp.int32))
        np.testing.assert_array_equal(mask.dense(1, 1, 2, 2)[0, 0], np.eye(2, dtype=bool))


STEPS = np.array([0, 1, 5, 6, 7, 30])
POSITIONS = {
    "seconds": STEPS + NOW,
    "seconds as int32": (STEPS + NOW).astype(np.int32),
    "concrete": jnp.asarray(STEPS + NOW, jnp.int32),
    "without a sign": (STEPS + 2**31 - 40).astype(np.uint32),
    "16 bits": (STEPS + 32760).astype(np.uint16),
    "to the end of 8 bits": (STEPS + 97).astype(np.int8),
}


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.tier(slow=["seconds", "concrete"])
def test_positions_of_any_size(name):
    t = POSITIONS[name]
    p = [int(x) for x in np.asarray(t)]

    def table(seen):
        return np.array([[seen(a, b) for b in p] for a in p])

    check(Causal().at(t, t), table(lambda a, b: b <= a))
    check(SlidingWindow(2, 1).at(t, t), table(lambda a, b: a - 2 <= b <= a + 1))
    check(SlidingWindow(np.array([[2]]), None).at(t, t), table(lambda a, b: a - 2 <= b))
    check(Chunked(7).at(t, t), table(lambda a, b: a // 7 == b // 7))
    check(PrefixLM(p[2]).at(t, t), table(lambda a, b: b < p[2] or b <= a))
    check(Lengths(np.array([p[3]])).at(t, t), table(lambda a, b: b < p[3]))


@pytest.mark.slow
def test_positions_that_are_far_apart():
    t = np.array([-(2**31), -7, 0, 2**30, 2**31 - 1])
    difference = t[:, None] - t[None]
    for given in (t, t.astype(np.int32), jnp.asarray(t, jnp.int32)):
        check(Causal().at(given, given), difference >= 0)
        check(SlidingWindow(2**30 + 1, 0).at(given, given), (difference >= 0) & (difference <= 2**30 + 1))
        check(SlidingWindow(2**40, 0).at(given, given), difference >= 0)
        check(SlidingWindow(np.array([[2**40]]), 0).at(given, given), difference >= 0)
        check(SlidingWindow(np.array([[5]]), np.array([[2**31 - 10]])).at(given, given),
              (difference <= 5) & (difference >= 10 - 2**31))  # fmt: skip
    found = jax.jit(lambda t: Causal().at(t, t).dense(1, 1, 5, 5))(jnp.asarray(t, jnp.int32))
    np.testing.assert_array_equal(found[0, 0], difference >= 0)


END = 2**31 - 1


def test_offsets_that_int32_does_not_hold_are_refused():
    check(Causal(offset=NOW + 2).at(kv_positions=np.arange(5) + NOW), np.arange(3)[:, None] + 2 >= np.arange(5))
    for far in (2**40, -(2**40), END - 2**27 + 1, np.array([[3], [2**40]])):
        for mask in (Causal(far), SlidingWindow(2, 0, far), Chunked(7, far), PrefixLM(2, far)):
            with pytest.raises(ValueError, match=r"'s offset=-?\d+ must be from -2013265919 to 2013265919, so that"):
                mask.bind(2, 1, 3, 5)


def rows(T, S, offset):
    """``q - kv`` with the queries from this offset on, exactly."""
    return np.arange(T, dtype=object)[:, None] + offset - np.arange(S, dtype=object)


WINDOWS = (END - 2**27 - 1, END - 2, END, END + 2, 2**33)


@pytest.mark.parametrize("kind", [int, np.int64, lambda x: np.array([[x]]), lambda x: jnp.array([[x]], jnp.int32)])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.tier(
    quick=[f"{sign}-{window}-{kind}" for window in WINDOWS for sign, kind in ((1, "int"), (-1, "<lambda>1"))]
)
def test_windows_and_offsets_near_the_end_of_int32(kind, window, sign):
    traced = isinstance(kind(0), jax.Array)
    for offset in (0, END - 2**27 - 5, END - 2**27):
        if traced and window > END:
            continue  # int32 does not hold it
        difference = rows(3, 5, sign * offset)
        for given in (window, kind(window)):
            left, right = (given, 0) if sign > 0 else (0, given)
            lowest, highest = (0, window) if sign > 0 else (-window, 0)
            expected = ((lowest <= difference) & (difference <= highest)).astype(bool)
            check(SlidingWindow(left, right, kind(sign * offset)), expected)
        if sign > 0:
            check(SlidingWindow(kind(window), None, kind(offset)), (difference <= window).astype(bool))
        check(Causal(kind(sign * offset)), (difference >= 0).astype(bool))


def test_windows_that_are_not_below_the_end_of_int32_are_no_limit():
    for window in (END - 1, END, END + 1, 2**40):
        for mask in (SlidingWindow(window, 0), SlidingWindow(np.array([[window]]), 0)):
            check(mask, np.arange(3)[:, None] + 2 >= np.arange(5))


def test_positions_that_int32_does_not_hold_are_refused():
    t, end = np.array([0, 1]) + 1000 * NOW, "must fit int32, which kernels compute with; subtract the first token's po"
    refused = {
        "q_positions from 1700000000000 to 1700000000001 ": MaskFn(lambda b, h, q, kv: q >= kv).at(t, t),
        "kv_positions from 0 to 8589934592 ": Causal().at(kv_positions=[0, 2**33]),
        "q_positions from 4294967295 to 4294967295 ": Lengths([1]).at(jnp.full(2, 2**32 - 1, jnp.uint32)),
    }
    for text, mask in refused.items():
        with pytest.raises(ValueError, match=text + end):
            mask.bind(1, 1, 2, 2)
    with pytest.raises(ValueError, match="q_positions traced, of dtype uint32, " + end):
        jax.jit(lambda t: Causal().at(t, t).dense(1, 1, 2, 2))(jnp.zeros(2, jnp.uint32))
    with jax.enable_x64(True), pytest.raises(ValueError, match="cast them to int32"):
        jax.jit(lambda t: Causal().at(t, t).dense(1, 1, 2, 2))(jnp.zeros(2, jnp.int64))


@pytest.mark.slow
def test_traced_limits_are_read_as_known_ones_are():
    dense = jax.jit(lambda left: SlidingWindow(left, 0).dense(2, 1, 3, 3))
    np.testing.assert_array_equal(dense(np.uint32(2**32 - 1)), Causal().dense(1, 1, 3, 3))
    for left, text in ((np.float32(1.5), "must be an int, or an integer array"), (np.ones(2, int), "has shape")):
        for window in (dense, dense.__wrapped__):
            with pytest.raises(ValueError, match=f"SlidingWindow's left.*{text}"):
                window(left)


@pytest.mark.slow
def test_an_operation_computes_with_them():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 6, 2, 8), np.float32)
    t = STEPS + NOW
    mask = Causal().at(t, t) & SlidingWindow(6, 0).at(t, t) & Segments(np.array([1, 1, 1, 1 + FAR, 1 + FAR, 1]))
    plain = Causal() & np.array([[a - b <= 6 for b in STEPS] for a in STEPS])[None, None]
    plain = plain & Segments(np.array([0, 0, 0, 1, 1, 0]))
    expected = OperationRegistry.create("vanilla")(q, k, v, mask=plain).attention_outputs
    for name in ("vanilla", "flash"):
        found = OperationRegistry.create(name)(q, k, v, mask=mask).attention_outputs
        np.testing.assert_allclose(found, expected, atol=1e-6)
