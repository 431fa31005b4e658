"""How tokens of each layout of a store are read: which features queries and weights are multiplied with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attnops_tpu.caches.plan import CachePlan


@pytest.mark.parametrize(("fields", "arrays", "key_lanes", "value"), [
    ({"D": 128, "Dv": 64, "width": 128}, 2, 128, (0, 64)),
    ({"D": 128, "Dv": 128, "width": 256, "is_joined": True}, 1, 128, (128, 256)),
    # A key and its value in one register: its first lanes are the key.
    ({"D": 64, "Dv": 64, "width": 128, "is_joined": True}, 1, 128, (0, 128)),
    ({"D": 80, "Dv": 80, "width": 256, "is_joined": True}, 1, 128, (128, 256)),
    ({"D": 192, "Dv": 128, "width": 384, "is_joined": True}, 1, 256, (256, 384)),
    ({"D": 96, "Dv": 96, "width": 192, "is_joined": True}, 1, 128, (0, 192)),
    ({"D": 576, "Dv": 512, "width": 640, "is_latent": True}, 1, 640, (0, 512)),
    ({"D": 12, "Dv": 8, "width": 12, "is_latent": True}, 1, 12, (0, 8)),
])  # fmt: skip
def test_features_of_keys_and_values_by_layout(
    fields: dict[str, Any], arrays: int, key_lanes: int, value: tuple[int, int], cache_plan: Callable[..., CachePlan]
) -> None:
    plan = cache_plan(**fields)
    assert plan.token_arrays == arrays
    assert plan.key_lanes == key_lanes >= plan.D
    assert (plan.value_start, plan.value_start + plan.value_lanes) == value
    # The last Dv of these are the value, whose lanes a query must not see as a key's.
    stop = plan.width if plan.is_joined else plan.Dv
    assert value[1] == stop
    assert value[0] <= stop - plan.Dv
    assert plan.values_in_key_lanes == (plan.is_joined and stop - plan.Dv < key_lanes)


@pytest.mark.parametrize(("scales", "is_latent", "sources"), [
    ("", False, 2), ("head", False, 2), ("token_head", False, 4), ("token_head", True, 2), ("", True, 1),
])  # fmt: skip
def test_scales_by_token_are_sources_and_scales_by_head_are_none(
    scales: str, is_latent: bool, sources: int, cache_plan: Callable[..., CachePlan]
) -> None:
    plan = cache_plan(scales=scales, is_latent=is_latent)
    assert plan.sources == sources
    assert plan.token_arrays == (1 if is_latent else 2)


def test_counts_of_tiles_units_pieces_and_words(cache_plan: Callable[..., CachePlan]) -> None:
    plan = cache_plan(T=5, bq=2, S=60, cores=2)
    assert (plan.nq, plan.items, plan.units, plan.nk, plan.pieces, plan.words) == (3, 10, 4, 4, 2, 1)
    assert [cache_plan(unit=1, bk=n).words for n in (32, 33, 65, 128)] == [1, 2, 4, 4]
    for scale in (0.088, -3.0, 1.0, 0.0):
        plan = cache_plan(scale=scale)
        assert plan.folded * plan.scale_residual == scale
        assert 1 <= plan.scale_residual < 2
