"""The operation of attnops-cpu, which tests elsewhere leave out: they test native `flash` on this platform."""

import os
from collections.abc import Iterator

import pytest

from attnops import OperationRegistry
from attnops_cpu import CpuFlashAttention


@pytest.fixture(scope="module", autouse=True)
def with_attnops_cpu() -> Iterator[None]:
    """Have it, whether it is installed or only on the path."""
    disabled = os.environ.pop("ATTNOPS_DISABLE", None)
    OperationRegistry.refresh()
    OperationRegistry.register(CpuFlashAttention)
    yield
    OperationRegistry._registered[:] = [
        p for p in OperationRegistry._registered if p.operation_class is not CpuFlashAttention
    ]
    if disabled is not None:
        os.environ["ATTNOPS_DISABLE"] = disabled
    OperationRegistry.refresh()
