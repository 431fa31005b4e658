"""Which tiles a call has: the table's row, tiles for ends and elements per score, measured ones, the metadata's."""

from __future__ import annotations

import pytest

from attnops_triton.flash.plan import TileSizes
from attnops_triton.flash.tile_sizes import _FLOAT16, _PER_SCORE, _RAGGED, SPECIALISED, TABLE, choose, specialised_rows


@pytest.mark.parametrize(
    ("dim", "limit"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 192), (192, 192), (256, 256), (257, 576)]
)
def test_a_head_dim_has_the_row_of_the_smallest_limit_that_holds_it(dim: int, limit: int) -> None:
    assert choose("sm_80", "bfloat16", dim, None, None) == TABLE["sm_80"][2][limit]


def test_float32_and_float16_have_rows_of_their_own() -> None:
    assert choose("sm_90", "float32", 64, None, None) == TABLE["sm_90"][4][64]
    assert choose("gfx942", "float16", 128, None, None) == _FLOAT16["gfx942"][128] != TABLE["gfx942"][2][128]
    assert choose("gfx942", "float16", 64, None, None) == TABLE["gfx942"][2][64]


def test_an_element_per_score_halves_the_keys_of_a_forward_tile() -> None:
    forward, by_query, by_key, _ = TABLE["sm_90"][2][128]
    tiles = choose("sm_90", "bfloat16", 128, None, None, per_score=True)
    assert (tiles[0].bq, tiles[0].bk) == (forward.bq, forward.bk // 2)
    assert (tiles[1], tiles[2]) == (by_query, _PER_SCORE["sm_90"][128][2])
    assert tiles[2] != by_key
    narrow = choose("sm_80", "bfloat16", 576, None, None, per_score=True)[0]
    assert narrow.bk == TABLE["sm_80"][2][576][0].bk // 2
    assert choose("sm_86", "float32", 576, None, None, per_score=True)[0].bk == 16, "no tile is below 16"


@pytest.mark.parametrize(("lengths", "is_ragged"), [((1024, 1024), False), ((1024, 1000), True), ((1000, 1024), True)])
def test_lengths_that_tiles_do_not_divide_have_tiles_that_spill_nothing(
    lengths: tuple[int, int], is_ragged: bool
) -> None:
    tiles = choose("sm_80", "bfloat16", 128, None, None, lengths=lengths)
    assert tiles[1] == (_RAGGED["sm_80"][128][1] if is_ragged else TABLE["sm_80"][2][128][1])
    assert choose("sm_80", "float32", 128, None, None, lengths=lengths) == TABLE["sm_80"][4][128]


def test_measured_tiles_replace_the_rows_and_keep_its_registers() -> None:
    row = TABLE["sm_100"][2][128]
    same, other = TileSizes.from_numbers(row[0].numbers), TileSizes(32, 64, 4, 3)
    tiles = choose("sm_100", "bfloat16", 128, None, None, measured={0: same, 2: other})
    assert tiles == (row[0], row[1], other, row[3])
    assert tiles[0].registers == 255 != same.registers
    ignored = choose("sm_100", "bfloat16", 128, None, None, per_score=True, measured={1: other})
    assert ignored[1] == row[1]


def test_block_sizes_of_the_metadata_hold_for_all_kernels_and_by_score_is_square() -> None:
    tiles = choose("sm_90", "bfloat16", 128, 64, 32)
    assert [(t.bq, t.bk) for t in tiles] == [(64, 32)] * 3 + [(32, 32)]
    only_keys = choose("sm_90", "bfloat16", 128, None, 16)
    assert [t.bq for t in only_keys[:3]] == [t.bq for t in TABLE["sm_90"][2][128][:3]]
    assert {t.bk for t in only_keys} == {16}


def test_sm_103_has_the_specialised_tiles_of_sm_100() -> None:
    assert specialised_rows("sm_103") == SPECIALISED["sm_100"]
    assert specialised_rows("sm_120") == {}
