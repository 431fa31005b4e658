"""What a step launches, counted in programs that XLA compiles for an H100 on a host without a GPU."""

from __future__ import annotations

import collections
import re
from typing import Any

import cuda_compiler
import jax
import jax.numpy as jnp
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Mask, SlidingWindow
from attnops_caches import Cache, DenseCache, PagedCache, Quantized
from attnops_triton.targets import target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not cuda_compiler.PLUGIN.exists(), reason=f"{cuda_compiler.PLUGIN} is not there"),
]
K, D, LENGTH = 8, 128, 32768
OPERATION: Any = OperationRegistry.create(
    "attnops-triton:flash", OperationMetadata(platform="cuda", on_unsupported="error")
)


def paged(batch: int, **options: Any) -> Cache:
    most = LENGTH // 16
    return PagedCache.create(batch=batch, pages=batch * most, page_size=16, max_pages=most, kv_heads=K, head_dim=D,
                             **options)  # fmt: skip


def dense(batch: int, **options: Any) -> Cache:
    return DenseCache.create(batch=batch, length=LENGTH, kv_heads=K, head_dim=D, **options)


def launches(create: Any, batch: int, mask: Mask, **options: Any) -> collections.Counter[str]:
    """The instructions of a step's program, by kind: "custom-call" for this package's kernels, "fusion" for XLA's,
    "copy" for copies by the driver.
    """

    def step(q: Any, k: Any, v: Any, cache: Any) -> Any:
        out, cache = OPERATION.step(q, k, v, cache, mask=mask)
        return out.attention_outputs, cache

    q, k = (jax.ShapeDtypeStruct((batch, 1, heads, D), jnp.bfloat16) for heads in (8 * K, K))
    cache = jax.eval_shape(lambda: create(batch, **options))
    with target("sm_90"):
        text = cuda_compiler.compiled(jax.jit(step, donate_argnums=3), q, k, k, cache).as_text()
    entry = text[text.index("\nENTRY") :]
    names = re.findall(r"^\s+(?:ROOT )?%\S+ = .*? ([a-z-]+)\(", entry, re.MULTILINE)
    free = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
    return collections.Counter(name for name in names if name not in free)


WINDOW = Causal() & SlidingWindow(1023, 0)


# With 8 rows keys are read in splits, which a second kernel merges. A row's page is looked up in the table by the
# cache's lengths, which so can't be replaced in place: the driver copies them, 4 bytes for each row.
@pytest.mark.parametrize(
    ("create", "batch", "mask", "expected"),
    [
        (dense, 8, Causal(), {"fusion": 1, "custom-call": 2}),
        (dense, 64, Causal(), {"fusion": 1, "custom-call": 1}),
        (paged, 8, Causal(), {"fusion": 1, "custom-call": 2, "copy": 1}),
        (paged, 64, Causal(), {"fusion": 1, "custom-call": 1, "copy": 1}),
        (paged, 8, WINDOW, {"fusion": 1, "custom-call": 2, "copy": 1}),
    ],
)
def test_a_step_launches_three_kernels_at_most(create: Any, batch: int, mask: Mask, expected: dict[str, int]) -> None:
    assert launches(create, batch, mask) == expected


def test_a_codec_adds_the_kernels_that_quantise_the_new_tokens() -> None:
    found = launches(paged, 64, Causal(), codec=Quantized("int8"))
    assert (found["custom-call"], found["copy"]) == (1, 1)
    assert 2 <= found["fusion"] <= 7


def test_a_mask_that_is_no_interval_needs_more() -> None:
    found = launches(paged, 64, ~SlidingWindow(1023, 0))
    assert found["fusion"] > 1
