"""A bias or a sink that is +inf or NaN makes its row NaN, and no other."""

import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops_testing.not_finite import CASES, check_not_finite


@pytest.mark.parametrize(
    ("operation", "case"),
    [(name, case) for name in ("vanilla", "flash", "sdpa") for case in CASES if name != "sdpa" or "bias" in case],
)
@pytest.mark.tier(slow=["vanilla-bias +inf", "flash-bias +inf", "vanilla-bias NaN", "flash-bias NaN"])
def test_a_row_that_is_nan_is_alone(operation, case):
    metadata = OperationMetadata(platform="cpu", block_q=8, block_k=8, on_unsupported="error")
    check_not_finite(OperationRegistry.create(operation, metadata), case, sinks=operation != "sdpa")
