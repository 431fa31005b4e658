"""Trees of drafted tokens: who sees whom, against a walk up each tree."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Ancestors, Causal, Coverage, Mask, SlidingWindow, block_map
from attnops_testing.oracle import attention

Array = np.ndarray[Any, Any]
BRANCHED = [-1, 0, 0, 1, 1, 2, -1, 6]


def walk(parents: Any, S: int, offset: Any = None) -> Array:
    """Who sees whom, [B, T, S]: a token's parents one after another, then all keys before the drafts."""
    parents = np.atleast_2d(parents)
    B, T = parents.shape
    first = np.broadcast_to(S - T if offset is None else offset, B)
    seen = np.zeros((B, T, S), bool)
    for b, i in np.ndindex(B, T):
        seen[b, i, : max(0, first[b])] = True
        token = i
        while token != -1:
            if 0 <= first[b] + token < S:
                seen[b, i, first[b] + token] = True
            token = parents[b, token]
    return seen


def dense(mask: Mask, B: int, T: int, S: int) -> Array:
    return np.broadcast_to(np.asarray(mask.dense(B, 2, T, S)), (B, 2, T, S))[:, 1]


def trees(rng: np.random.Generator, B: int, T: int) -> Array:
    return rng.integers(0, 2**31, (B, T)) % (np.arange(T) + 1) - 1


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.slow
def test_a_query_sees_itself_its_ancestors_and_what_is_committed(xp: Any) -> None:
    for S in (8, 13, 5):  # of the latter, the first drafts are no keys
        for parents in (BRANCHED, [-1] * 8, [-1, *[0] * 7], np.arange(8) - 1):
            mask = Ancestors(xp.asarray(parents, np.int32))
            np.testing.assert_array_equal(dense(mask, 1, 8, S), walk(parents, S))
    literal = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]], bool)
    np.testing.assert_array_equal(dense(Ancestors([-1, 0, 0]), 1, 3, 5)[0], literal)


@pytest.mark.slow
def test_a_tree_is_not_the_causal_mask_and_a_chain_is() -> None:
    chain, causal = Ancestors(np.arange(6) - 1), Causal()
    for S in (6, 9, 4):
        np.testing.assert_array_equal(dense(chain, 1, 6, S), dense(causal, 1, 6, S))
        for block in (1, 2, 3):
            claimed, expected = (block_map(mask, (1, 1, 6, S), block, block).coverage for mask in (chain, causal))
            np.testing.assert_array_equal(claimed, expected)
    branched = dense(Ancestors([-1, 0, 0, 2, 1, 4]), 1, 6, 9)
    assert (branched <= dense(causal, 1, 6, 9)).all()
    assert (branched != dense(causal, 1, 6, 9)).sum() == 1 + 1 + 2 + 2


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([(2, 7, 11), (1, 6, 6), (3, 9, 4)]), st.sampled_from([1, 3]),
    st.sampled_from(["none", "number", "by row", "at", "at with keys"]), st.booleans(),
)  # fmt: skip
def test_trees_of_a_batch(seed: int, shape: tuple[int, int, int], block: int, placed: str, traced: bool) -> None:
    B, T, S = shape
    rng = np.random.default_rng(seed)
    parents, first = trees(rng, B, T), rng.integers(0, S + 1, B)
    keys, expected = np.arange(S), walk(parents, S, first)
    mask: Mask = Ancestors(parents)
    match placed:
        case "none":
            expected = walk(parents, S)
        case "number":
            mask, expected = Ancestors(parents, int(first[0])), walk(parents, S, first[0])
        case "by row":
            mask = Ancestors(parents, first[:, None])
        case "at":
            mask = mask.at(first[:, None] + np.arange(T))
        case _:
            keys = rng.permutation(S)
            mask, expected = mask.at(first[:, None] + np.arange(T), keys), expected[:, :, keys]

    def of(mask: Mask) -> tuple[Any, Any]:
        return mask.dense(B, 1, T, S), block_map(mask, (B, 1, T, S), block, block).coverage

    seen, coverage = jax.jit(of)(jax.tree.map(jnp.asarray, mask)) if traced else of(mask)
    np.testing.assert_array_equal(np.broadcast_to(seen, (B, 1, T, S))[:, 0], expected)
    for b, i, j in np.ndindex(B, *coverage.shape[2:]):
        tile = expected[b, i * block : (i + 1) * block, j * block : (j + 1) * block]
        code = np.broadcast_to(coverage, (B, *coverage.shape[1:]))[b, 0, i, j]
        assert code == Coverage.PARTIAL or (code == Coverage.FULL if tile.any() else code == Coverage.EMPTY)
        assert code != Coverage.FULL or tile.all()
    bound = mask.bind(B, 1, T, S)
    if not bound.has_fully_masked_tokens(T, S):
        assert expected.any(1).all()
        assert expected.any(2).all()
    if T == S and bound.sees_itself():
        assert expected[:, range(T), range(T)].all()


def test_committed_tiles_are_full_and_those_after_the_drafts_empty() -> None:
    for mask in (Ancestors([-1, 0, 0, 1], offset=8), Ancestors([-1, 0, 0, 1]).at(np.arange(4) + 8)):
        assert block_map(mask, (1, 1, 4, 16), 4, 4).coverage.tolist() == [[[[2, 2, 1, 0]]]]
        assert block_map(~mask, (1, 1, 4, 16), 4, 4).coverage.tolist() == [[[[0, 0, 1, 2]]]]


def test_which_trees_hide_tokens() -> None:
    parents = jnp.array(BRANCHED)

    def hides(mask: Mask, S: int) -> bool:
        return mask.bind(1, 1, 8, S).has_fully_masked_tokens(8, S)

    @jax.jit
    def check(parents: jax.Array) -> None:
        tree = Ancestors(parents)
        assert not hides(tree, 8)
        assert not hides(tree, 20)
        assert not hides(tree & Causal(), 8)
        assert tree.bind(1, 1, 8, 8).sees_itself()
        assert not tree.bind(1, 1, 8, 9).sees_itself()
        for mask, S in ((tree, 7), (Ancestors(parents, offset=2), 20), (tree.at(parents), 20), (~tree, 8)):
            assert hides(mask, S)

    check(parents)


def test_of_positions_only_a_rows_first_counts_for_queries() -> None:
    """The caller may give depths after it; the tree is by index."""
    parents = np.array([BRANCHED, [-1, -1, 0, 1, 2, 3, 4, 5]])
    first = np.array([3, 7])
    q = first[:, None] + np.array([0, 1, 1, 2, 2, 2, 0, 1])
    np.testing.assert_array_equal(dense(Ancestors(parents).at(q), 2, 8, 16), walk(parents, 16, first))
    far = 2**30
    mask = Ancestors(parents).at(q + far, np.arange(16) + far)
    np.testing.assert_array_equal(dense(mask, 2, 8, 16), walk(parents, 16, first))
    ends = Ancestors(parents).at(q, np.full(16, 2**31 - 1)) | Ancestors(parents).at(q, np.full(16, -(2**31)))
    assert dense(ends, 2, 8, 16).all()
    assert not dense(Ancestors(parents).at(q, np.full(16, 2**31 - 1)), 2, 8, 16).any()
    with pytest.raises(ValueError, match=r"has offset=2, and q_positions=<int64 \[2, 8\]> are given"):
        Ancestors(parents, offset=2).at(q)
    with pytest.raises(ValueError, match="is bound already; give it positions"):
        Ancestors(parents).bind(2, 1, 8, 16).at(q)


@pytest.mark.slow
def test_a_tree_combines_with_other_masks() -> None:
    tree, window = Ancestors(BRANCHED), SlidingWindow(4, 0)
    a, w = walk(BRANCHED, 12), dense(window, 1, 8, 12)
    for mask, expected in ((tree & window, a & w), (tree | ~window, a | ~w), (~tree & window, ~a & w)):
        np.testing.assert_array_equal(dense(mask, 1, 8, 12), expected)
    q, kv = np.arange(8) + 2, np.arange(12)[::-1]
    a, w = walk(BRANCHED, 12, 2)[..., ::-1], (q[:, None] - 4 <= kv) & (kv <= q[:, None])
    np.testing.assert_array_equal(dense((tree & window).at(q, kv), 1, 8, 12), a & w)
    structure = (Causal() & tree).bind(1, 1, 8, 12).structure(8, 12)
    assert (structure.band, structure.rest) == ((-4, None), {"Ancestors"})


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int8])
def test_traced_parents_out_of_range_read_nothing_else(dtype: Any) -> None:
    """They are clamped, and the trees of other tokens are those of the parents that are right."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    parents = jnp.asarray([low, 0, 0, 2, high, high], dtype)
    seen = np.asarray(jax.jit(lambda p: Ancestors(p).dense(1, 1, 6, 8))(parents))[0, 0]
    np.testing.assert_array_equal(seen, walk([-1, 0, 0, 2, 3, 4], 8)[0])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Ancestors([-1, 1]).bind(1, 1, 2, 2), "Ancestors' parents[0, 1]=1 must be at least -1"),
        (lambda: Ancestors([[-1, 0], [-1, -2]]).bind(2, 1, 2, 2), "Ancestors' parents[1, 1]=-2 must be at least -1"),
        (lambda: Ancestors(jnp.array([0, 0])).bind(1, 1, 2, 2), "parents[0, 0]=0 must be at least -1, for a root, and "
         "below its own index 0, since a token is drafted after its parent; sort the tokens by depth"),
        (lambda: Ancestors(np.array([2**63], np.uint64)).bind(1, 1, 1, 1), f"parents[0, 0]={2**63} must be"),
        (lambda: Ancestors([-1, 2**40]).bind(1, 1, 2, 2), f"parents[0, 1]={2**40} must be at least -1"),
        (lambda: Ancestors([-1.0, 0.0]).bind(1, 1, 2, 2), "Ancestors' parents has dtype float64, but must be integers"),
        (lambda: Ancestors([True]).bind(1, 1, 1, 1), "Ancestors' parents has dtype bool, but must be integers"),
        (lambda: Ancestors([-1, 0]).bind(1, 1, 3, 3), "parents has shape (2,), but must have shape [3] or [1, 3]"),
        (lambda: Ancestors([-1], np.zeros((1, 2), int)).bind(1, 2, 1, 4), "but must be a number or have shape "
         "[B or 1, 1]=[1, 1]: all heads have the same drafted tokens"),
        (lambda: Ancestors([-1], True).bind(1, 1, 1, 1), "Ancestors' offset=True must be an int"),
        (lambda: Ancestors([-1]).allowed(0, 0, 0, 0), "Ancestors(<int64 [1]>) is not bound; call mask.bind("),
        (lambda: Ancestors([-1]).coverage((0, 1), (0, 1)), "is not bound; call mask.bind(B, H, T, S)"),
    ],
)  # fmt: skip
def test_impossible_trees_are_refused_with_a_reason(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


def test_expressions_and_pictures() -> None:
    assert repr(Ancestors([-1, 0], offset=3)) == "Ancestors(<int64 [2]>, offset=3)"
    placed = Ancestors([-1, 0]).at(np.arange(2, dtype=np.int32)[None])
    assert repr(placed) == repr(placed.bind(1, 1, 2, 4)) == "Ancestors(<int64 [2]>).at(<int32 [1, 2]>, None)"
    assert placed.kinds() == placed.bind(1, 1, 2, 4).kinds() == {"Ancestors", "at"}
    assert str(Ancestors([-1, 0, 0])).splitlines()[1:] == ["█ · ·", "█ █ ·", "█ · █"]
    assert str(Ancestors([-1, 0, 0]).bind(1, 1, 3, 3)).splitlines()[1:] == ["█ · ·", "█ █ ·", "█ · █"]
    assert Ancestors([-1, 0]) == Ancestors([-1, 0]) != Ancestors([-1, -1])


def test_calls_with_other_trees_and_offsets_compile_once() -> None:
    traces = []

    @jax.jit
    def run(mask: Mask) -> jax.Array:
        traces.append(1)
        return mask.dense(1, 1, 3, 8)

    for parents, first in (([-1, 0, 0], 2), ([-1, 0, 1], 5)):
        mask = Ancestors(jnp.array(parents), jnp.array([[first]]))
        np.testing.assert_array_equal(run(mask)[0], walk(parents, 8, first))
    assert len(traces) == 1
    one, other = (Ancestors([-1, 0, 0], n).bind(1, 1, 3, 8).as_data() for n in (2, 5))
    assert jax.tree.structure(one) == jax.tree.structure(other)


@pytest.mark.slow
def test_as_many_drafts_as_a_node_can_have() -> None:
    """Deeper than any draft: 300 in a chain, and 300 roots."""
    for parents in (np.arange(300) - 1, np.full(300, -1), (np.arange(300) - 1) // 2):
        np.testing.assert_array_equal(dense(Ancestors(parents), 1, 300, 301), walk(parents, 301))


@pytest.mark.slow
def test_verifying_a_tree_equals_decoding_each_branch() -> None:
    """Each drafted token's attention is that of its branch alone, appended to what is committed."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, n, 2, 4)).astype(np.float32) for n in (8, 13, 13))
    flash = OperationRegistry.create("flash", OperationMetadata(on_unsupported="error"))
    outputs = np.asarray(flash(q, k, v, mask=Ancestors(BRANCHED)).attention_outputs)
    for i, seen in enumerate(walk(BRANCHED, 13)[0]):
        alone = attention(q[:, [i]], k[:, seen], v[:, seen]).out
        np.testing.assert_allclose(outputs[:, [i]], alone, rtol=2e-6, atol=2e-6)
