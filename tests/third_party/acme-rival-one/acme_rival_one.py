"""A third party's operation that claims the same name and platform as another's."""

import os
from pathlib import Path

import jax

import attnops

# Tells the tests that this module was imported.
Path(os.environ["ATTNOPS_TEST_IMPORTS"], __name__).touch()


class Operation(attnops.OperationImpl):
    """Gives the queries back."""

    api_version = 2

    @classmethod
    def get_impl_name(cls) -> str:
        return "rival"

    @classmethod
    def rank(cls, request: attnops.Request) -> None:
        return None

    def forward_native(self, query: jax.Array, key: jax.Array, value: jax.Array) -> attnops.OperationOutput:
        return attnops.OperationOutput(query)

    def forward_cpu(self, query: jax.Array, key: jax.Array, value: jax.Array) -> attnops.OperationOutput:
        return attnops.OperationOutput(query)
