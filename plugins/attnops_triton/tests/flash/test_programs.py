"""One program serves many lengths and batches."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Mask, Segments, SlidingWindow
from attnops_triton.aot import kernels
from attnops_triton.flash.order import unordered
from attnops_triton.flash.tile_sizes import TABLE
from attnops_triton.language.build import Recipe

# With batches of one and more; shorter and longer than tiles, windows and documents; multiples of tiles or not.
LENGTHS = (17, 100, 128, 192, 256, 777, 1024, 1500, 2048, 4096)
MASKS: dict[str, Callable[[int], Mask | None]] = {
    "none": lambda n: None,
    "causal": lambda n: Causal(),
    "window": lambda n: Causal() & SlidingWindow(255, 0),
    "documents": lambda n: Causal() & Segments(np.arange(n) // max(1, n // 4)),
}


def programs(mask: Callable[[int], Mask | None], lengths: tuple[int, ...], **options: Any) -> dict[str, set[Recipe]]:
    """The programs of forward and backward at all lengths, by kernel."""
    operation: Any = OperationRegistry.create(
        "attnops-triton:flash", OperationMetadata(platform="cuda", on_unsupported="error")
    )
    found = collections.defaultdict(set)
    for n in lengths:

        def both(q: Any, given: Any, n: int = n) -> Any:
            def attend(q: Any, given: Any) -> Any:
                return operation(q, q, q, mask=mask(n), **given).attention_outputs

            out, pull_back = jax.vjp(attend, q, given)
            return pull_back(out)

        q = jax.ShapeDtypeStruct((1 + n % 3, n, 4, 64), jnp.bfloat16)
        given = {name: jax.ShapeDtypeStruct(shape(n), jnp.float32) for name, shape in options.items()}
        for launched in kernels(both, (q, given), "sm_90"):
            found[launched.recipe.kernel.name].add(launched.recipe)
    return found


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.slow
def test_ten_lengths_have_at_most_two_programs_a_kernel_and_kind_of_mask(kind: str) -> None:
    found = programs(MASKS[kind], LENGTHS)
    assert {name: len(recipes) for name, recipes in found.items()} == {
        f"attnops_flash_{name}": 2 for name in ("forward", "backward_query", "backward_key")
    }


def test_lengths_that_tiles_divide_have_one_program_and_may_rely_on_alignment() -> None:
    largest = max(max(t.bq, t.bk) for t in TABLE["sm_90"][2][128])
    found = programs(MASKS["causal"], (largest, 2 * largest, 5 * largest))
    assert [[sorted(recipe.divisible) for recipe in recipes] for recipes in found.values()] == [[["S", "T"]]] * 3


def test_differences_of_lengths_are_data() -> None:
    texts = collections.defaultdict(set)
    for T, S in ((128, 256), (128, 640), (256, 384)):
        q, k = (jax.ShapeDtypeStruct((1, n, 4, 64), jnp.bfloat16) for n in (T, S))
        operation: Any = OperationRegistry.create(
            "attnops-triton:flash", OperationMetadata(platform="cuda", on_unsupported="error")
        )

        def both(q: Any, k: Any, operation: Any = operation) -> Any:
            mask = Causal() & SlidingWindow(255, 0)
            out, pull_back = jax.vjp(lambda q, k: operation(q, k, k, mask=mask).attention_outputs, q, k)
            return pull_back(out)

        for launched in kernels(both, (q, k), "sm_90"):
            texts[launched.recipe.kernel.name].add(launched.recipe)
    assert [len(recipes) for recipes in texts.values()] == [1, 1, 1]


def recipes(B: int = 1, precision: lax.Precision | None = None, **options: Any) -> dict[str, Recipe]:
    """The programs of forward and backward of 512 tokens, by kernel."""
    metadata = OperationMetadata(platform="cuda", on_unsupported="error", precision=precision)
    operation: Any = OperationRegistry.create("attnops-triton:flash", metadata)

    def both(q: Any, k: Any) -> Any:
        out, pull_back = jax.vjp(lambda q, k: operation(q, k, k, mask=Causal(), **options).attention_outputs, q, k)
        return pull_back(out)

    q, k = (jax.ShapeDtypeStruct((B, 512, heads, 64), jnp.bfloat16) for heads in (4, 2))
    return {x.recipe.kernel.name.split("_")[-1]: x.recipe for x in kernels(both, (q, k), "sm_80")}


def test_calls_share_the_programs_of_kernels_on_which_their_difference_has_no_effect() -> None:
    plain = recipes()
    assert recipes(precision=lax.Precision.DEFAULT) == plain, "products are not of float32"
    with unordered():
        assert recipes() == plain, "only Hopper's kernels add dq in any order"
    sinks, many = recipes(sinks=np.zeros(4, np.float32)), recipes(B=64)
    assert [name for name in plain if sinks[name] != plain[name]] == ["forward"]
    assert [name for name in plain if many[name] != plain[name]] == ["key"], "groups are not split in a large batch"
    for name in plain:
        assert (sinks[name].key() == plain[name].key()) is (sinks[name] == plain[name])


@pytest.mark.slow
def test_rows_of_a_bias_that_are_aligned_are_one_more_program() -> None:
    found = programs(MASKS["causal"], (64, 128, 100, 112, 176, 301), bias=lambda n: (1, 1, n, n))
    assert {len(recipes) for recipes in found.values()} == {3}
