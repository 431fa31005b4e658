"""The table of docs/numerics.md: a row's results do not depend on its batch where it says so."""

from typing import Unpack

import jax
import pytest

from attnops import AttentionOptions, OperationMetadata, OperationOutput, OperationRegistry
from attnops.operations.flash.tile_sizes import choose_problems_per_tile
from attnops.operations.vanilla import VanillaAttention
from attnops_testing.invariance import NAMES, Sizes, changed_by_batch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.tier(slow=["bfloat16"])
def test_a_row_of_many_queries_is_the_same_in_any_batch(dtype: str) -> None:
    operation = OperationRegistry.create("flash", OperationMetadata(mode="train"))
    assert changed_by_batch(operation, Sizes(512, 512), dtype) == set()


def test_rows_of_a_few_queries_share_products() -> None:
    """Why the table leaves them out: how many share one depends on the batch, and XLA's rounding on how many."""
    of_many = [choose_problems_per_tile(B, 2, 2 * 512 * 512, False, False, False) for B in (1, 5, 8)]
    of_few = [choose_problems_per_tile(B, 2, 2 * 300, False, False, False) for B in (1, 5, 8)]
    assert (of_many, of_few) == ([2, 2, 2], [2, 10, 16])


class ByBatch(VanillaAttention):
    """A kernel whose rounding depends on the size of the batch."""

    def forward_native(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[AttentionOptions]
    ) -> OperationOutput:
        factor = 1 + 2**-20 * (query.shape[0] > 1)
        return super().forward_native(query * factor, key, value, **options)


def test_a_result_that_depends_on_the_batch_is_found() -> None:
    assert changed_by_batch(ByBatch(OperationMetadata(mode="train")), Sizes(8, 8), "float32") == {*NAMES}
