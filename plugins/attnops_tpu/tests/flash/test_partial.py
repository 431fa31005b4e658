"""Partial softmaxes, as the ring asks for them."""

from __future__ import annotations

import pytest

from attnops_testing.partial import check_partial


@pytest.mark.slow
@pytest.mark.parametrize(
    "features", ["bias", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("plain", "dropout", "low"))]
)
def test_partial_softmaxes_merge_to_vanilla_over_all_keys(features: str) -> None:
    check_partial("attnops-tpu:flash", "tpu", features, interpret=True, block_q=32, block_k=32)
