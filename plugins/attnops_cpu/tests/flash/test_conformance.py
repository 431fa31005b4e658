"""The conformance suite, with the fastest instruction set of this machine."""

from typing import ClassVar

from attnops_testing import OperationConformance
from attnops_testing.behaviours import memory_growth


class TestFlashOnCPU(OperationConformance):
    operation, platform = "attnops-cpu:flash", "cpu"
    block = 32
    strict, limit = True, 1200
    refuses = frozenset({"ScoreFn", "weights", "export"})
    slow = frozenset({"test_caches", "second derivative"})
    every: ClassVar = {"test_feature": 3, "test_all_pairs": 24, "test_cache_pairs": 16}
    test_sampled_pair = None  # each is one of all pairs

    def test_memory_growth(self, case: str) -> None:
        if case == "ALiBi":  # XLA sums long tables, whose sum is the gradient of slopes, with one temporary more
            memory_growth(self.subject(), case, length=4096)
        else:
            self._check("memory_growth", case)
