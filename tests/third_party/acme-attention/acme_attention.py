"""A third party's operation that works."""

import os
from pathlib import Path

import jax

import attnops

# Tells the tests that this module was imported.
Path(os.environ["ATTNOPS_TEST_IMPORTS"], __name__).touch()


class Operation(attnops.OperationImpl):
    """Attention that sees every key alike: the mean of the values."""

    api_version = 2

    @classmethod
    def get_impl_name(cls) -> str:
        return "acme"

    @classmethod
    def rank(cls, request: attnops.Request) -> None:
        return None

    def forward_native(self, query: jax.Array, key: jax.Array, value: jax.Array) -> attnops.OperationOutput:
        mean = value.mean(axis=1, keepdims=True)
        mean = attnops.repeat_kv_bsnh(mean, query.shape[2] // value.shape[2])
        return attnops.OperationOutput(jax.numpy.broadcast_to(mean, (*query.shape[:3], value.shape[3])))
