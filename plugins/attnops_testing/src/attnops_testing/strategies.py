"""Hypothesis strategies that draw calls of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from attnops.dispatch.metadata import OperationMetadata
from attnops.dispatch.platforms import PLATFORMS
from attnops.dispatch.request import AttentionRequest
from attnops.masks import (
    Ancestors,
    Blocks,
    Causal,
    Chunked,
    Dense,
    Full,
    KeyPadding,
    Lengths,
    Mask,
    MaskFn,
    PrefixLM,
    Segments,
    SlidingWindow,
)
from attnops.operations.vanilla import VanillaAttention
from attnops_testing.problem import Problem

if TYPE_CHECKING:
    from attnops.dispatch.metadata import Layout
    from attnops_testing.oracle import Array

DTYPES = ("float32", "bfloat16", "float16")


def broadcastable(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of the same rank that broadcast to ``shape``."""
    return st.tuples(*(st.sampled_from(sorted({1, size})) for size in shape))


@st.composite
def problems(draw: st.DrawFn, max_length: int = 12, layouts: tuple[Layout, ...] = ("BTHD", "BHTD")) -> Problem:
    """Calls of small shapes with any combination of the contract's features.

    Args:
        draw: the function that hypothesis passes.
        max_length: the most queries, and the most keys.
        layouts: the layouts to draw from.
    """
    B, K, G = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    T, S = draw(st.integers(1, max_length)), draw(st.integers(1, max_length))
    D, Dv = draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([1, 4, 8]))
    H = K * G
    dtype = jnp.dtype(draw(st.sampled_from(DTYPES)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def normal(*shape: int) -> Array:
        return rng.normal(size=shape).astype(dtype)

    options: dict[str, Any] = {}
    kind = draw(st.sampled_from(["none", "causal", "offset", "array"]))
    if kind == "causal":
        options["mask"] = Causal()
    elif kind == "offset":
        options["mask"] = Causal(offset=draw(st.integers(-T, S)))
    elif kind == "array":
        # Sparse enough that rows without any key are common.
        options["mask"] = rng.random(draw(broadcastable((B, H, T, S)))) < draw(st.sampled_from([0.2, 0.7]))
    if draw(st.booleans()):
        options["bias"] = normal(*draw(broadcastable((B, H, T, S))))
    if draw(st.booleans()):
        options["sinks"] = normal(H)
    if draw(st.booleans()):
        options["softmax_scale"] = draw(st.sampled_from([0.0, 0.3, 1.0]))
    if draw(st.booleans()):
        options["logits_soft_cap"] = draw(st.sampled_from([0.5, 20.0]))
    dropout = draw(st.sampled_from([0.0, 0.0, 0.4]))
    if dropout:
        options["dropout_key"] = jax.random.key(draw(st.integers(0, 99)))
    options["return_lse"] = draw(st.booleans())
    options["return_weights"] = draw(st.booleans())
    options["return_max_logits"] = draw(st.booleans())
    return Problem(
        query=normal(B, T, H, D),
        key=normal(B, S, K, D),
        value=normal(B, S, K, Dv),
        options=options,
        metadata=OperationMetadata(dropout_prob=dropout, layout=draw(st.sampled_from(layouts))),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def requests(draw: st.DrawFn, platforms: tuple[str, ...] = PLATFORMS) -> AttentionRequest:
    """Requests of calls as in `problems`, for an operation's ``reasons`` and `attnops.explain`.

    Args:
        draw: the function that hypothesis passes.
        platforms: the platforms to draw from.
    """
    problem = draw(problems())
    request = problem.request(VanillaAttention(problem.metadata))
    assert isinstance(request, AttentionRequest)
    drawn: AttentionRequest = request.replace(platform=draw(st.sampled_from(platforms)))
    return drawn


@st.composite
def masks(draw: st.DrawFn, B: int, H: int, T: int, S: int, depth: int = 2) -> Mask:
    """Mask expressions with any primitive, up to ``depth`` operators deep, whose arrays fit [B, H, T, S].

    Args:
        draw: the function that hypothesis passes.
        B: batch.
        H: heads.
        T: queries.
        S: keys.
        depth: how deep operators nest.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def tokens(length: int, high: int) -> Array:
        ids = rng.integers(0, high, (draw(st.sampled_from([1, B])), length))
        return np.sort(ids, axis=1) if draw(st.booleans()) else ids

    def number(low: int, high: int) -> int | Array:
        shape = draw(st.sampled_from([(), (1, 1), (B, 1), (1, H), (B, H)]))
        return int(rng.integers(low, high + 1)) if shape == () else rng.integers(low, high + 1, shape)

    # Which positions are explicit; with explicit query positions there is no offset.
    placed = draw(st.sampled_from(["", "", "", "", "", "q", "kv", "q and kv"]))
    offset = None if "q" in placed or draw(st.booleans()) else number(-T, S)
    leaf = draw(st.sampled_from(_LEAVES))
    match leaf:
        case "Full":
            mask: Mask = Full()
        case "Causal":
            mask = Causal(offset)
        case "SlidingWindow":
            left, right = (None if draw(st.booleans()) else number(0, S) for _ in range(2))
            mask = SlidingWindow(left, right, offset)
        case "Chunked":
            mask = Chunked(number(1, 5), offset)
        case "PrefixLM":
            mask = PrefixLM(number(0, S), offset)
        case "Segments":
            mask = Segments(tokens(T, 3), tokens(S, 3))
        case "Lengths":
            mask = Lengths(rng.integers(0, S + 1, B), rng.integers(0, T + 1, B) if draw(st.booleans()) else None)
        case "KeyPadding":
            mask = KeyPadding(tokens(S, 2))
        case "Ancestors":
            parents = rng.integers(0, 2**31, (draw(st.sampled_from([1, B])), T)) % (np.arange(T) + 1) - 1
            per_row = draw(st.booleans()) and offset is not None
            mask = Ancestors(parents, rng.integers(-T, S + 1, (B, 1)) if per_row else _first(offset))
        case "Blocks":
            sizes = int(rng.integers(1, 9)), int(rng.integers(1, 9))
            heads = draw(st.sampled_from([n for n in (1, 2, H) if H % n == 0]))
            shape = draw(st.sampled_from([1, B])), heads, -(-T // sizes[0]), -(-S // sizes[1])
            mask = Blocks(rng.random(shape) < 0.6, *sizes)
        case "Dense":
            mask = Dense(rng.random(draw(broadcastable((B, H, T, S)))) < 0.6)
        case _:
            mask = MaskFn(_is_even)
    if placed:
        q = rng.permutation(T) if "q" in placed else None
        mask = mask.at(q, rng.permutation(S) if "kv" in placed else None)
    if depth and draw(st.booleans()):
        other = draw(masks(B, H, T, S, depth=depth - 1))
        mask = draw(st.sampled_from([mask & other, mask | other, ~mask & other, ~(mask | other)]))
    return mask


_LEAVES = (
    "Full", "Causal", "SlidingWindow", "Chunked", "PrefixLM", "Segments", "Lengths", "KeyPadding", "Ancestors", "Dense",
    "Blocks", "MaskFn",
)  # fmt: skip


def _first(offset: int | Array | None) -> int | None:
    """One number for all batches and heads."""
    return offset if offset is None else int(np.ravel(offset)[0])


def _is_even(b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array) -> jax.Array:
    return (b + h + q + kv) % 2 == 0
