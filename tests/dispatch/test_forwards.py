"""The options that a signature names."""

from __future__ import annotations

import functools
import typing
from typing import Generic, Required, TypedDict, TypeVar, Unpack
from typing import Unpack as Spread

import numpy as np
import pytest
import typing_extensions

from attnops import AttentionOptions, FlashOptions, OperationMetadata, OperationRegistry, ScoreOptions, forward_for
from attnops.dispatch.forwards import keyword_options

CONTRACT = {
    "mask", "bias", "softmax_scale", "logits_soft_cap", "sinks", "dropout_key", "return_lse", "return_weights",
    "return_max_logits",
}  # fmt: skip


class Own(ScoreOptions, total=False):
    order: str


def one_by_one(self, query, key=None, *, mask=None): ...  # type: ignore[no-untyped-def]
def kwargs(query: object, **options: object) -> None: ...
def unpacked(query: object, **options: Unpack[FlashOptions]) -> None: ...
def both(query: object, *, mode: str = "", **options: Unpack[Own]) -> None: ...


def evaluated(query: object, **options: object) -> None: ...


evaluated.__annotations__["options"] = Unpack[AttentionOptions]  # as without `from __future__ import annotations`

T = TypeVar("T")


class Typed(TypedDict, Generic[T], total=False):
    mask: Required[T]
    order: str


class Extended(typing_extensions.TypedDict, total=False):
    order: typing_extensions.NotRequired[str]


def generic(query: object, **options: Unpack[Typed[int]]) -> None: ...
def extended(query: object, **options: typing_extensions.Unpack[Extended]) -> None: ...
def renamed(query: object, **options: Spread[Extended]) -> None: ...
def quoted(query: object, **options: Unpack["Extended"]) -> None: ...  # noqa: UP037
def unknown(query: object, **options: Elsewhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@functools.wraps(unpacked)
def wrapped(*args: object, **kwargs: object) -> None: ...


def one_more(query: object, key: object, **options: Unpack[Extended]) -> None: ...


class Methods:
    of_part = functools.partialmethod(one_more, None)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (one_by_one, {"key", "mask"}),
        (kwargs, set()),
        (unpacked, CONTRACT - {"return_weights"}),
        (both, {x for x in CONTRACT if not x.startswith("return_")} - {"dropout_key"} | {"mode", "order"}),
        (evaluated, CONTRACT),
        (generic, {"mask", "order"}),
        (extended, {"order"}),
        (renamed, {"order"}),
        (quoted, {"order"}),
        (unknown, set()),
        (wrapped, CONTRACT - {"return_weights"}),
        (Methods.of_part, {"order"}),
        (functools.partial(extended, None), {"order"}),
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


@pytest.mark.parametrize(
    ("name", "run", "option"),
    [
        ("vanilla", lambda op: op.forward_native, "softmax_scal"),
        ("attnops:flash", lambda op: op.forward_native, "softmax_scal"),
        ("attnops:flash", lambda op: functools.partial(op.run_backend, "native"), "return_weights"),  # as a plugin does
        ("sdpa", lambda op: op.forward_cpu, "sinks"),
    ],
)
def test_a_forward_that_is_called_directly_refuses_what_it_does_not_name(
    name: str, run: typing.Any, option: str
) -> None:
    x = np.ones((1, 2, 2, 8), np.float32)
    with pytest.raises(TypeError, match=f"has no option '{option}'; it has .*'mask'"):
        run(OperationRegistry.create(name))(x, x, x, **{option: True})
