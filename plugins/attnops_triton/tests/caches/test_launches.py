"""What a step launches, counted in programs that XLA compiles for an H100 on a host without a GPU."""

from __future__ import annotations

import collections
import functools
import re
from typing import Any

import cuda_compiler
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.masks import Causal, Mask, SlidingWindow
from attnops_caches import Cache, DenseCache, PagedCache, Quantized
from attnops_triton.targets import target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cuda_compiler.PLUGIN.exists(), reason="`make test-all` installs XLA's compiler for CUDA"),
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


CAUSAL = Causal()


def step(q: Any, k: Any, v: Any, cache: Any, mask: Mask = CAUSAL) -> Any:
    out, cache = OPERATION.step(q, k, v, cache, mask=mask)
    return out.attention_outputs, cache


def over_layers(q: Any, k: Any, v: Any, cache: Any) -> Any:
    def block(carry: Any, layer: Any) -> Any:
        return step(q, k, v, carry[1].layer(layer)), None

    (out, pending), _ = jax.lax.scan(block, (q, cache.pending(k.shape[1])), jnp.arange(3))
    return out, pending.cache


def launches(program: Any, create: Any, batch: int, T: int = 1, **options: Any) -> collections.Counter[str]:
    """The instructions of the computation that calls this package's kernels, by kind: "custom-call" for these,
    "fusion" for XLA's, "copy" for copies by the driver.
    """
    q, k = (jax.ShapeDtypeStruct((batch, T, heads, D), jnp.bfloat16) for heads in (8 * K, K))
    cache = jax.eval_shape(lambda: create(batch, **options))
    with target("sm_90"):
        text = cuda_compiler.compiled(jax.jit(program, donate_argnums=3), q, k, k, cache).as_text()
    (body,) = [x for x in re.findall(r"^\S.*?^}", text, re.MULTILINE | re.DOTALL) if " custom-call(" in x]
    names = re.findall(r"^\s+(?:ROOT )?%\S+ = .*? ([a-z-]+)\(", body, re.MULTILINE)
    free = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
    return collections.Counter(name for name in names if name not in free)


WINDOW = Causal() & SlidingWindow(1023, 0)
INT8 = Quantized("int8")
SCALES = np.full(K, 0.02, np.float32)
BY_HEAD = {"codec": Quantized("int8", "head"), "key_scale": SCALES, "value_scale": SCALES}
BY_TENSOR = {"codec": Quantized("int8", "tensor"), "key_scale": SCALES[0], "value_scale": SCALES[0]}


# With 8 rows keys are read in splits, which a second kernel merges. Where new lengths depend on old ones by more than
# each element's own, as by a look-up in the table, they can't replace them in place: the driver copies 4 bytes a row.
@pytest.mark.parametrize(
    ("create", "batch", "T", "codec", "expected"),
    [
        (dense, 8, 1, None, {"fusion": 1, "custom-call": 2}),
        (dense, 64, 1, None, {"fusion": 1, "custom-call": 1}),
        (dense, 64, 4, None, {"fusion": 1, "custom-call": 1, "copy": 1}),
        (dense, 64, 4, INT8, {"fusion": 1, "custom-call": 1, "copy": 1}),
        (paged, 8, 1, None, {"fusion": 1, "custom-call": 2, "copy": 1}),
        (paged, 64, 1, None, {"fusion": 1, "custom-call": 1, "copy": 1}),
        (paged, 64, 1, INT8, {"fusion": 1, "custom-call": 1, "copy": 1}),
        (paged, 64, 4, None, {"fusion": 1, "custom-call": 1, "copy": 1}),
        (paged, 64, 4, INT8, {"fusion": 1, "custom-call": 1, "copy": 1}),
    ],
)  # fmt: skip
def test_a_step_launches_three_kernels_at_most(
    create: Any, batch: int, T: int, codec: Quantized | None, expected: dict[str, int]
) -> None:
    assert launches(step, create, batch, T, codec=codec) == expected


def test_windows_need_no_more() -> None:
    found = launches(functools.partial(step, mask=WINDOW), paged, 64)
    assert found == {"fusion": 1, "custom-call": 1, "copy": 1}


# Next to the kernel of a step outside of loops, XLA counts the layers.
@pytest.mark.parametrize(
    ("create", "T", "options"),
    [(dense, 1, {}), (paged, 4, {"codec": INT8}), (paged, 1, BY_HEAD), (dense, 4, BY_TENSOR)],
)
def test_a_layer_in_a_loop_launches_three_kernels(create: Any, T: int, options: dict[str, Any]) -> None:
    assert launches(over_layers, create, 64, T, layers=3, **options) == {"fusion": 2, "custom-call": 1}


def test_a_mask_that_is_no_interval_needs_more() -> None:
    found = launches(functools.partial(step, mask=~SlidingWindow(1023, 0)), paged, 64)
    assert found["fusion"] > 1
