"""The options that a signature names."""

from __future__ import annotations

import typing
from typing import Unpack

import pytest

from attnops import AttentionOptions, FlashOptions, OperationMetadata, OperationRegistry, ScoreOptions, forward_for
from attnops.dispatch.forwards import keyword_options

CONTRACT = {"mask", "bias", "softmax_scale", "logits_soft_cap", "sinks", "dropout_key", "return_lse", "return_weights"}


class Own(ScoreOptions, total=False):
    order: str


def one_by_one(self, query, key=None, *, mask=None): ...  # type: ignore[no-untyped-def]
def kwargs(query: object, **options: object) -> None: ...
def unpacked(query: object, **options: Unpack[FlashOptions]) -> None: ...
def both(query: object, *, mode: str = "", **options: Unpack[Own]) -> None: ...


def evaluated(query: object, **options: object) -> None: ...


evaluated.__annotations__["options"] = Unpack[AttentionOptions]  # as without `from __future__ import annotations`


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (one_by_one, {"key", "mask"}),
        (kwargs, set()),
        (unpacked, CONTRACT - {"return_weights"}),
        (both, CONTRACT - {"return_weights", "return_lse", "dropout_key"} | {"mode", "order"}),
        (evaluated, CONTRACT),
    ],
)
def test_options_are_those_that_the_signature_names(function: typing.Any, names: set[str]) -> None:
    assert keyword_options(function) == names


def missing(query: object, **options: Unpack[Elsewhere]) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def test_an_annotation_that_is_not_imported_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"missing of .*test_forwards has \*\*options: Unpack\[Elsewhere\], but name 'Els"
    ):
        keyword_options(missing)


@pytest.mark.parametrize("name", ["vanilla", "attnops:flash"])
def test_the_core_serves_the_whole_contract(name: str) -> None:
    cls = type(OperationRegistry.create(name, OperationMetadata(platform="cpu")))
    assert keyword_options(getattr(cls, f"forward_{forward_for(cls, 'cpu')}")) == CONTRACT
