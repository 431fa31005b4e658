"""What a mask is made of is what it allows: bands, segments and a rest, whatever the expression."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnops import AttentionRequest, OperationMetadata, OperationRegistry
from attnops.masks import (
    Band,
    Causal,
    Coverage,
    Full,
    KeyPadding,
    MaskFn,
    MaskStructure,
    PrefixLM,
    Segments,
    SlidingWindow,
)
from attnops_testing.strategies import masks

B, H, T, S = 2, 2, 5, 6


def dense(mask):
    return np.broadcast_to(np.asarray(mask.dense(B, H, T, S)), (B, H, T, S))


def of_band(band):
    """What a band allows, told in numpy alone."""
    low, high = (x if x is not None else far for x, far in zip(band, (-99, 99), strict=True))
    difference = np.arange(T)[:, None] - np.arange(S)[None]
    return np.broadcast_to((low <= difference) & (difference <= high), (B, H, T, S))


def of_split(parts):
    """What the parts allow, the band and the segments told in numpy alone."""
    seen = of_band(parts.band.limits)
    if parts.segments is not None:
        q, kv = (np.asarray(x) for x in (parts.segments.q_ids, parts.segments.kv_ids))
        seen = seen & (q[:, None, :, None] == kv[:, None, None, :])
    return seen if parts.rest is None else seen & dense(parts.rest)


@pytest.mark.slow
@settings(max_examples=20)
@given(masks(B, H, T, S))
def test_the_parts_together_are_the_mask(mask):
    bound = mask.bind(B, H, T, S)
    allowed, parts, structure = dense(bound), bound.split(), bound.structure(T, S)
    np.testing.assert_array_equal(of_split(parts), allowed)
    np.testing.assert_array_equal(dense(parts.join()), allowed)
    assert structure.segments == (parts.segments is not None)
    assert bool(structure.rest) == (parts.rest is not None)
    assert structure.static
    if structure.is_band:
        np.testing.assert_array_equal(of_band(structure.band), allowed)
    if not structure.by_batch:
        np.testing.assert_array_equal(allowed[:1], allowed[1:])
    if not structure.by_head:
        np.testing.assert_array_equal(allowed[:, :1], allowed[:, 1:])
    if not structure.may_have_fully_masked_tokens:
        assert allowed.any(axis=2).any(axis=1).all()
        assert allowed.any(axis=3).all()


limits = st.one_of(st.none(), st.integers(-3, 3))


@given(limits, limits, limits, limits)
def test_bands_combine_to_bands_exactly_where_they_are(low, high, other_low, other_high):
    a, b = Band(low, high), Band(other_low, other_high)
    for mask in (a & b, a | b, ~a, ~(a | b), ~~a & b, ~a & ~b):
        structure = mask.structure(T, S)
        if structure.is_band:
            np.testing.assert_array_equal(of_band(structure.band), dense(mask))
        # By tiles of two it says the same.
        tiles = np.array([[mask.coverage((i, i + 2), (j, j + 2)) for j in (0, 2)] for i in (0, 2)])
        whole = dense(mask)[0, 0, :4, :4].reshape(2, 2, 2, 2)
        assert (whole.any(axis=(1, 3)) <= (tiles > 0)).all()
        assert ((tiles == 2) <= whole.all(axis=(1, 3))).all()
    assert (a & b).structure(T, S).is_band


@pytest.mark.parametrize(
    ("mask", "band"),
    [
        (Full(), (None, None)),
        (Causal(offset=0), (0, None)),
        (Causal(), (-1, None)),  # T = 5, S = 6
        (Causal(offset=0) & SlidingWindow(2, None, offset=0), (0, 2)),
        (SlidingWindow(2, 1, offset=0), (-1, 2)),
        (SlidingWindow(10**9, 0, offset=0), (0, None)),
        (~Causal(offset=0), (None, -1)),
        (Causal(offset=0) | ~Causal(offset=0), (None, None)),
        (SlidingWindow(1, 0, offset=0) | SlidingWindow(0, 2, offset=0), (-2, 1)),
    ],
    ids=repr,
)
def test_bands_by_example(mask, band):
    structure = mask.bind(B, H, T, S).structure(T, S)
    assert (structure.band, structure.is_band) == (band, True)


def test_what_is_no_band_is_in_the_rest():
    gap = SlidingWindow(0, 0, offset=-2) | SlidingWindow(0, 0, offset=2)
    for mask, kinds in (
        (gap, {"SlidingWindow", "|"}),
        (~SlidingWindow(1, 1), {"SlidingWindow", "~"}),
        (Causal() | Segments(np.zeros(T, int), np.zeros(S, int)), {"Causal", "Segments", "|"}),
        (SlidingWindow(np.array([[1, 2]]), 0), {"SlidingWindow"}),
        (PrefixLM(2), {"PrefixLM"}),
    ):
        structure = mask.bind(B, H, T, S).structure(T, S)
        assert (structure.band, structure.segments, structure.rest) == ((None, None), False, frozenset(kinds))
    assert SlidingWindow(np.array([[1, 2]]), 0).bind(B, H, T, S).structure(T, S).by_head
    function = MaskFn(lambda b, h, q, kv: q >= kv).structure(T, S)
    assert (function.by_batch, function.by_head) == (True, True)


def test_a_traced_array_is_told_from_a_known_one():
    ids = np.zeros((1, T), np.int32)
    found = []
    for array in (ids, jnp.asarray(ids)):
        mask = (Causal() & Segments(array)).bind(B, H, T, T)
        found.append(mask.structure(T, T))
    assert [(x.static, x.band, x.segments) for x in found] == [(True, (0, None), True), (False, (0, None), True)]


def test_a_request_carries_the_structure():
    operation = OperationRegistry.create("attnops:vanilla", OperationMetadata(platform="tpu"))
    q = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.float32)
    causal = operation.request(q, q, q, mask=Causal() & SlidingWindow(63, 0))
    assert causal.mask_structure == MaskStructure(band=(0, 63))
    padded = operation.request(q, q, q, mask=Causal() & KeyPadding(np.ones((1, 128), bool))).mask_structure
    assert (padded.band, padded.rest, padded.may_have_fully_masked_tokens) == ((0, None), {"KeyPadding"}, True)
    assert operation.request(q, q, q).mask_structure.is_full
    sizes = ("batch", "query_length", "key_length", "heads", "kv_heads", "head_dim", "value_head_dim")
    by_hand = dict.fromkeys(sizes, 8)
    assert AttentionRequest(**by_hand).mask_structure.is_full
    assert not AttentionRequest(**by_hand, mask_kinds=frozenset({"Causal"})).mask_structure.is_band


def test_an_unbound_mask_can_not_be_split():
    with pytest.raises(ValueError, match="bind"):
        Causal().split()
    with pytest.raises(ValueError, match=r"Band's low=1\.5 must be an int"):
        Band(1.5, None)


def test_a_band_holds_where_differences_of_positions_overflow_int32():
    far = np.array([1 - 2**31, 2**31 - 1])
    bound = Band(0, 5).at(far, far).bind(1, 1, 2, 2)
    seen = bound.allowed(np.array([[0]]), np.array([[0]]), np.arange(2)[:, None], np.arange(2)[None])
    np.testing.assert_array_equal(seen, np.eye(2, dtype=bool))


@pytest.mark.parametrize("far", [2**31 - 2, 2**31 - 1, 2**31, 2**40])
def test_a_band_beyond_all_distances_is_empty_and_a_limit_beyond_them_is_none(far):
    for band in (Band(far, None), Band(None, -far), Band(far, far), Band(far, far).at(np.arange(T), np.arange(S))):
        assert not np.asarray(band.bind(B, H, T, S).dense(B, H, T, S)).any()
    for band in (Band(far, None), Band(None, -far)):
        assert band.coverage((0, T), (0, S)) == Coverage.EMPTY
        assert not band.sees_itself()
        assert np.asarray((~band).dense(B, H, T, S)).all()
    assert np.asarray(Band(-far, far).dense(B, H, T, S)).all()
