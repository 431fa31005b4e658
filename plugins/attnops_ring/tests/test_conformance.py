"""The conformance suite over four devices along the sequence."""

import functools
from typing import ClassVar

import jax

from attnops import OperationMetadata
from attnops.sharding import create_mesh
from attnops_testing import OperationConformance
from attnops_testing.runner import Subject


@functools.cache
def over_four_devices() -> OperationMetadata:
    return OperationMetadata(mesh=create_mesh((4,), ("sp",), devices=jax.devices()[:4]))


class TestRing(OperationConformance):
    operation = "ring"
    strict, limit = True, 1200
    refuses = frozenset({"weights", "caches"})
    slow = frozenset({"test_behaviour", "test_caches", "test_memory_growth"})
    exhaustive = frozenset({"test_all_pairs"})
    every: ClassVar = {"test_behaviour": 3, "test_memory_growth": 2, "test_caches": 5}
    test_feature = test_sampled_pair = None  # all pairs have each
    test_cache_pairs = None  # caches are refused

    @classmethod
    def subject(cls) -> Subject:
        cls.metadata = over_four_devices()  # asks for devices, which collecting tests should not
        return super().subject()
