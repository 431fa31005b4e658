"""Partial softmaxes, as `ring` uses them."""

from __future__ import annotations

import pytest

from attnops_testing.partial import check_partial


@pytest.mark.slow
@pytest.mark.parametrize(
    "features",
    ["low", "plain", "bias", "dropout"],
)
@pytest.mark.tier(every=4)
def test_partial_softmaxes_merge_to_vanilla_over_all_keys(features: str) -> None:
    check_partial("attnops-triton:flash", "cuda", features, interpret=True, block_q=16, block_k=16)
