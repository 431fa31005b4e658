"""Every operation of the core passes the whole conformance suite: right or refused, nothing wrong."""

from typing import ClassVar

import pytest
from hypothesis import given, settings

from attnops import OperationMetadata, OperationRegistry, explain
from attnops_testing import OperationConformance
from attnops_testing.features import combine
from attnops_testing.strategies import requests


class TestVanilla(OperationConformance):
    operation = "vanilla"
    strict, limit = True, 1200
    slow = frozenset({"test_caches"})  # through read(), with flash's masks
    exhaustive = frozenset({"test_all_pairs", "test_cache_pairs"})
    every: ClassVar = {"test_sampled_pair": 3, "test_caches": 3}
    test_feature = None  # each is in a pair


class TestFlash(OperationConformance):
    operation = "attnops:flash"  # also where a plugin for CPUs is installed
    strict, limit = True, 1200
    every: ClassVar = {"test_feature": 3, "test_all_pairs": 36, "test_cache_pairs": 24}
    test_sampled_pair = None  # each is one of all pairs


class TestScaledDotProduct(OperationConformance):
    operation = "sdpa"
    strict, limit = True, 1200
    refuses = frozenset(
        {"mixed dtypes", "D ≠ Dv", "head dims 576/512", "ALiBi", "RelativePosition", "ScoreFn", "soft cap", "sinks",
         "dropout", "logsumexp", "weights", "max logits", "latent"}
    )  # fmt: skip
    slow = frozenset({"test_caches"})  # through read(), as vanilla's
    exhaustive = frozenset({"test_all_pairs"})
    every: ClassVar = {"test_sampled_pair": 3, "test_caches": 3}
    test_feature = None  # each is in a pair
    test_cache_pairs = None  # through read(), as vanilla's


@pytest.mark.parametrize("block", [4, 16, 64])
def test_lengths_are_counted_in_tiles(block):
    assert combine([], block).problem().shape == (2, 4, 2.5 * block, 2.5 * block)
    T, S = combine(["T < S"], block).problem().shape[2:]
    assert block < T < 2 * block < S < 3 * block


@settings(max_examples=30)
@given(requests())
@pytest.mark.slow
def test_every_request_is_served_by_someone_or_has_reasons(request):
    metadata = OperationMetadata(platform=request.platform)
    for name in ("attnops:vanilla", "attnops:flash"):
        assert not OperationRegistry.create(name, metadata).reasons(request)
    explanation = explain(request, "auto", metadata)
    assert explanation.chosen.serves
    assert all(other.reasons or other.serves or other.problem for other in explanation.others)
