"""The suite's problems over caches can fail: each finds the mistakes that it ought to find."""

from __future__ import annotations

import pytest
from cache_mutants import IN_PLACE, MUTANTS

from attnops_caches.flash import attention
from attnops_testing.caches import check_cache
from attnops_testing.runner import Status, Subject

VANILLA, FLASH = Subject(operation="attnops:vanilla"), Subject(operation="attnops:flash")
# What flash, which reads caches in place, does not call.
READS = ("paged:PagedCache._keys_values", "store:Store.decoded", "layout:TokenLayout.value_of",
         "codec:Quantized.decode", "calls.run:arrays_of")  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.tier(
    quick=[
        "left padding is seen",
        "a ring's window is forgotten",
        "a ring's window is one too small",
        "values are dequantised with the keys' scales",
        "a latent value is the key's last features",
        "int8 holds -128",
        "windows of rows are those of the first when packed",
        "sinks is dropped when the cache is read",
        "softmax_scale is dropped when the cache is read",
        "bias is dropped when the cache is read",
        "mask is dropped when the cache is read",
    ],
    every=2,
)
def test_a_mistake_is_wrong_in_its_features(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name].apply(monkeypatch)
    outcome = check_cache(VANILLA, MUTANTS[name].found_by.split(" + "))
    assert outcome.status is Status.WRONG, f"{name} is {outcome.status} in {outcome.name}"
    assert not outcome.raised, outcome.detail  # by its values


@pytest.mark.slow
@pytest.mark.parametrize("names", sorted({mutant.found_by for mutant in MUTANTS.values()}))
@pytest.mark.tier(every=2)
def test_what_has_no_mistake_is_right(names: str) -> None:
    outcome = check_cache(VANILLA, names.split(" + "))
    assert outcome.status is Status.RIGHT, outcome.detail


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.where not in READS])
@pytest.mark.tier(every=3)
def test_a_mistake_is_wrong_in_place_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name].apply(monkeypatch)
    outcome = check_cache(FLASH, MUTANTS[name].found_by.split(" + "))
    assert outcome.status is Status.WRONG, f"{name} is {outcome.status} in {outcome.name}"


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.slow
def test_a_mistake_of_flash_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    IN_PLACE[name].apply(monkeypatch)
    attention._compiled.clear_cache()
    outcome = check_cache(FLASH, IN_PLACE[name].found_by.split(" + "))
    attention._compiled.clear_cache()
    assert outcome.status is Status.WRONG, f"{name} is {outcome.status} in {outcome.name}"
    assert not outcome.raised, outcome.detail
