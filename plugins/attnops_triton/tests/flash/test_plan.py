"""What follows from the static facts of a call: units of scores, dtypes, split groups, and a fused dq."""

from __future__ import annotations

import pytest
from triton_plans import make_plan

from attnops.kernels import Scoring
from attnops_triton.flash.plan import TileSizes


def test_tile_sizes_are_the_same_after_a_table_of_measured_times() -> None:
    for tiles in (TileSizes(64, 128, 8, 2), TileSizes(128, 64, 4, 3, specialised=True)):
        assert TileSizes.from_numbers(tiles.numbers) == tiles


@pytest.mark.parametrize(
    ("fields", "unit"),
    [
        ({}, 0.125),
        ({"scoring": Scoring(cap=3.0)}, 1.0),
        ({"scoring": Scoring(array=True)}, 1.0),
        ({"scoring": Scoring(sinks=True)}, 0.125),
        ({"scale": -0.125}, 1.0),
        ({"scale": 1e-21}, 1.0),
        ({"scale": 1e21}, 1.0),
    ],
)
def test_scores_have_the_unit_of_products_unless_something_else_is_done_to_them(
    fields: dict[str, object], unit: float
) -> None:
    assert make_plan(**fields).score_unit == unit


def test_gradients_of_float16_and_of_partial_softmaxes_are_float32() -> None:
    assert make_plan().gradient_dtype == make_plan().out_dtype == "bfloat16"
    float16, partial = make_plan(dtype="float16"), make_plan(is_partial=True)
    assert (float16.gradient_dtype, float16.out_dtype) == ("float32", "float16")
    assert (partial.gradient_dtype, partial.out_dtype) == ("float32", "float32")


def test_groups_are_split_where_tiles_of_keys_leave_multiprocessors_idle() -> None:
    # sm_90 has 132 multiprocessors; a kv head has S / 32 tiles of keys.
    assert make_plan(B=1, K=1, S=32 * 131).splits_groups
    assert not make_plan(B=1, K=1, S=32 * 131 + 1).splits_groups
    assert not make_plan(B=1, K=4, S=32).splits_groups, "groups of one head"


@pytest.mark.parametrize(
    ("fields", "fuses"),
    [
        ({}, True),
        ({"unordered": False}, False),
        ({"B": 1}, False),  # its groups are split
        ({"dtype": "float16"}, False),
        ({"is_partial": True}, False),
        ({"by_key": TileSizes(32, 128, 4, 3, specialised=True)}, False),
        ({"by_key": TileSizes(64, 128, 4, 3)}, False),
        ({"arch": "sm_100"}, False),
        ({"arch": "sm_103"}, False),
    ],
)
def test_which_plans_compute_dq_with_dk_and_dv(fields: dict[str, object], fuses: bool) -> None:
    by_key = TileSizes(64, 128, 4, 3, specialised=True)
    assert make_plan(**{"B": 64, "S": 256, "unordered": True, "by_key": by_key} | fields).fuses_dq is fuses
