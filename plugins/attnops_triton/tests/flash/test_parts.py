"""Parts of a softmax, as the ring asks for them."""

from __future__ import annotations

import pytest

from attnops.testing.parts import check_parts


@pytest.mark.parametrize(
    "features",
    ["low", *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "bias", "dropout"))],
)
def test_parts_of_keys_add_up_to_the_whole(features: str) -> None:
    check_parts("attnops-triton:flash", "cuda", features, interpret=True, block_q=16, block_k=16)
