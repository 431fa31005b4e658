"""Programs built with the address sanitizer, which reserves terabytes: more than tests may have."""

import resource
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def without_limit_of_memory() -> Iterator[None]:
    """Lift the limit that the root's conftest sets, for the programs that a test runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
