"""A demonstration runs what computes attention."""

from __future__ import annotations

import attnops
from attnops_lm.installed import attention_operations


def test_operations_of_other_contracts_are_left_out() -> None:
    installed = attnops.OperationRegistry.list_implementations()
    assert {"linear_attention", "causal_conv1d"} <= {*installed}
    assert {*installed} - {*attention_operations()} == {"linear_attention", "causal_conv1d"}
