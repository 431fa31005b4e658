"""tpu-inference's own tests of its kernel, with attnops in its place: values and pages equal its reference's."""

from __future__ import annotations

import functools
import importlib.util
import sys
import unittest
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_inference
from jax._src import test_util

from attnops import OperationMetadata
from attnops_caches.engines import Scores, attend

PATH = Path(tpu_inference.__file__).parents[1] / "tests/kernels/ragged_paged_attention_kernel_v3_test.py"
SPEC = importlib.util.spec_from_file_location("theirs", PATH)
theirs: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(theirs)

jnp.zeros(1) + 1  # JAX's tests may not be the first to open the cache of compiled programs
METADATA = OperationMetadata()
INTERPRETED = OperationMetadata(platform="tpu", interpret=True, on_unsupported="error")
# Scores are up to 50. With 16 bits the reference rounds them by up to 0.1, and weights to the dtype of values.
TOLERANCES = {4: 1e-4, 2: 0.1, 1: 0.1}


def to_pages(cache: Any, K: int) -> Any:
    """[P, page, 2 · K / packing, packing, D], where keys and values alternate, as [P, 1, K, page, 2 · D]."""
    P, page, *_, D = cache.shape
    return cache.reshape(P, page, -1, D)[:, :, : 2 * K].reshape(P, page, K, 2 * D).swapaxes(1, 2)[:, None]


def of_pages(pages: Any, shape: tuple[int, ...]) -> Any:
    """The inverse of `to_pages`; heads of padding are NaN."""
    P, _, K, page, width = pages.shape
    heads = pages[:, 0].swapaxes(1, 2).reshape(P, page, 2 * K, width // 2)
    wanting = shape[2] * shape[3] - 2 * K
    return jnp.pad(heads, ((0, 0), (0, 0), (0, wanting), (0, 0)), constant_values=jnp.nan).reshape(shape)


def attnops_in_its_place(q: Any, k: Any, v: Any, cache: Any, lengths: Any, table: Any, starts: Any, rows: Any,
                         **options: Any) -> Any:  # fmt: skip
    names = {"sliding_window": "window", "use_causal_mask": "causal", "update_kv_cache": "updates", "sm_scale": "scale"}
    known = {"soft_cap", "q_scale", "k_scale", "v_scale", *names}
    scores = Scores(**{"scale": 1.0} | {names.get(x, x): value for x, value in options.items() if x in known})
    D, (_, K, _) = q.shape[-1], k.shape
    # The engine's models pad head dims with zeros.
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, cache.shape[-1] - D))) for x in (q, k, v))
    run = jax.jit(functools.partial(attend, METADATA, scores))
    with jax.numpy_rank_promotion("allow"):  # which JAX's tests forbid
        out, pages = run(to_pages(cache, K), q, k, v, lengths, table, starts, rows)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    return out[..., :D], of_pages(pages, cache.shape)


class TestReference(theirs.RaggedPagedAttentionKernelTest):
    def setUp(self) -> None:
        super().setUp()
        self.enter_context(theirs.mock.patch.object(theirs, "ragged_paged_attention", attnops_in_its_place))
        self.enter_context(theirs.mock.patch.object(test_util, "is_device_tpu_at_least", lambda version: True))

    def assertAllClose(self, given: Any, wanted: Any, **_: Any) -> None:
        tolerance = TOLERANCES[self.stored.itemsize]
        super().assertAllClose(given, wanted, atol=tolerance, rtol=tolerance)

    def _test_ragged_paged_attention(self, seq_lens: Any, num_heads: Any, head_dim: int, page_size: int, q_dtype: Any,
                                     kv_dtype: Any, num_pages: int, **options: Any) -> None:  # fmt: skip
        self.stored = jnp.dtype(kv_dtype)
        super()._test_ragged_paged_attention(
            seq_lens, num_heads, head_dim, page_size, q_dtype, kv_dtype, num_pages, **options
        )


@pytest.mark.parametrize(
    "name", ["sliding_window1", "logit_soft_capping1", "kv_share_chunked_prefill_input_kv_is_ignored"]
)
def test_the_interpreted_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "METADATA", INTERPRETED)
    prefix = "test_" if name.startswith("kv_share") else "test_ragged_paged_attention_"
    result = unittest.TestResult()
    TestReference(prefix + name).run(result)
    assert result.testsRun == 1
    assert not [*result.errors, *result.failures, *result.skipped]
