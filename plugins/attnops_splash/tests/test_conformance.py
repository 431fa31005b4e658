"""The conformance suite for JAX's splash attention, in the three lines that every plugin has."""

from typing import ClassVar

import pytest

from attnops_splash import SplashAttention
from attnops_testing import OperationConformance
from attnops_testing.behaviours import WITH_PROGRAM
from attnops_testing.features import FEATURES

SERVED = {
    "bfloat16", "runtime_dtype", "GQA", "MQA", "T < S", "T > S", "T = 1", "odd lengths", "D ≠ Dv", "head_dim 80",
    "head_dim 256", "Causal", "Causal(offset)", "SlidingWindow", "Segments", "mask & mask", "traced Segments",
    "NaN behind Causal(offset)", "NaN behind a window", "fully masked tiles", "softmax_scale", "negative scale",
    "large logits", "soft cap", "layout BHTD", "total-token layout",
}  # fmt: skip


class TestSplash(OperationConformance):
    operation, platform, interpret = SplashAttention, "tpu", True
    limit = 1200
    # The interpreter needs seconds per problem.
    slow = WITH_PROGRAM | {"test_each_feature"}
    every: ClassVar = {"test_each_feature": 3}
    exhaustive = frozenset({"test_sampled_pair", "test_long", "test_caches", "test_behaviour", "test_memory_growth"})
    # A pair has each feature, and the kernel is JAX's, which tests products of features itself.
    test_feature = test_all_pairs = test_cache_pairs = None


@pytest.mark.slow
def test_it_serves_these_features_and_no_others():
    subject = TestSplash.subject()
    assert {name for name in FEATURES if subject.refusal([name]) is None} == SERVED
