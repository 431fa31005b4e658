"""The conformance suite in Triton's interpreter; what kernels leave unwritten is NaN."""

from typing import ClassVar

from attnops_testing import OperationConformance
from attnops_testing.behaviours import WITH_PROGRAM


class TestFlashInTritonsInterpreter(OperationConformance):
    operation, platform = "attnops-triton:flash", "cuda"
    interpret = True
    strict, limit = True, 1200
    slow = WITH_PROGRAM
    refuses = frozenset({"bfloat16", "runtime_dtype", "weights"})
    exhaustive = frozenset({"test_all_pairs", "test_cache_pairs"})
    test_feature = None  # each is in a pair
    every: ClassVar = {"test_sampled_pair": 6, "test_behaviour": 4, "test_memory_growth": 2, "test_caches": 4}
