"""The conformance suite, with the fastest instruction set of this machine."""

from typing import ClassVar

from attnops_testing import OperationConformance


class TestFlashOnCPU(OperationConformance):
    operation, platform = "attnops-cpu:flash", "cpu"
    block = 32
    strict, limit = True, 1200
    refuses = frozenset({"ScoreFn", "weights", "export"})
    slow = frozenset({"test_caches", "second derivative"})
    every: ClassVar = {"test_all_pairs": 12, "test_cache_pairs": 8}
    test_sampled_pair = None  # each is one of all pairs
