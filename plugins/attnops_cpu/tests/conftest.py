"""The operations of attnops-cpu, which tests elsewhere leave out: they test the native forwards on this platform."""

import os
from collections.abc import Iterator

import pytest

from attnops import OperationRegistry
from attnops_cpu import CpuFlashAttention
from attnops_cpu.linear.operation import CpuLinearAttention

_CLASSES = (CpuFlashAttention, CpuLinearAttention)


@pytest.fixture(scope="module", autouse=True)
def with_attnops_cpu() -> Iterator[None]:
    """Have them, whether they are installed or only on the path."""
    disabled = os.environ.pop("ATTNOPS_DISABLE", None)
    OperationRegistry.refresh()
    for operation in _CLASSES:
        OperationRegistry.register(operation)
    yield
    OperationRegistry._registered[:] = [p for p in OperationRegistry._registered if p.operation_class not in _CLASSES]
    if disabled is not None:
        os.environ["ATTNOPS_DISABLE"] = disabled
    OperationRegistry.refresh()
