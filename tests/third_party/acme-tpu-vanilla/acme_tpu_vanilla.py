"""A third party's vanilla, for TPUs alone."""

import os
from pathlib import Path

import jax

import attnops
from attnops.operations.vanilla import VanillaAttention

# Tells the tests that this module was imported.
Path(os.environ["ATTNOPS_TEST_IMPORTS"], __name__).touch()


class Operation(VanillaAttention):
    """The core's, but for its forward on TPUs, which gives the queries back."""

    api_version = 2

    def forward_tpu(self, query: jax.Array, key: jax.Array, value: jax.Array) -> attnops.OperationOutput:
        return attnops.OperationOutput(query)
