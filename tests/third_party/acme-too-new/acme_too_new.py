"""A third party's operation that was written for a later attnops."""

import os
from pathlib import Path

import attnops

# Tells the tests that this module was imported.
Path(os.environ["ATTNOPS_TEST_IMPORTS"], __name__).touch()


class Operation(attnops.OperationImpl):
    """Never used."""

    api_version = 99

    @classmethod
    def get_impl_name(cls) -> str:
        return "too_new"

    def forward_native(self, query: object, key: object, value: object) -> attnops.OperationOutput:
        raise NotImplementedError
