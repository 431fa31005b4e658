"""Parts of a softmax, as the ring asks for them."""

from __future__ import annotations

import pytest

from attnops.testing.parts import check_parts


@pytest.mark.slow
@pytest.mark.parametrize("features", ["plain", "bias", "dropout", "low"])
def test_parts_of_keys_add_up_to_the_whole(features: str) -> None:
    check_parts("attnops-tpu:flash", "tpu", features, interpret=True, block_q=16, block_k=16)
