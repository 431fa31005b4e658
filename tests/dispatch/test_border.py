"""A class that breaks the rules of the border: named where it is asked for, and without effect on any other."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest

from attnops import (
    Limits,
    OperationMetadata,
    OperationOutput,
    OperationRegistry,
    PluginError,
    Rank,
    Reason,
    UnsupportedError,
    explain,
)
from attnops.operations.vanilla import VanillaAttention
from attnops_cli.asked import find_details, find_faults, find_reasons

Q = jnp.ones((1, 4, 2, 8))


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    before = OperationRegistry._registered[:]
    yield
    OperationRegistry._registered[:] = before
    OperationRegistry.refresh()


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("not for you")

    __repr__ = __str__


def register(**members: Any) -> type[VanillaAttention]:
    """An operation "zeta" of a distribution "acme", with a forward for tt and a rank above all others."""

    def forward_tt(self: Any, query: Any, key: Any, value: Any) -> OperationOutput:
        return OperationOutput(jnp.full_like(query, 7))

    body = {
        "get_impl_name": classmethod(lambda cls: "zeta"),
        "rank": classmethod(lambda cls, request: Rank.EXCHANGES_KEYS),
        "forward_tt": forward_tt,
        "__module__": "acme.zeta",
        "__qualname__": "Zeta",
    }
    return OperationRegistry.register(type("Zeta", (VanillaAttention,), body | members))


def raising(*args: Any) -> Any:
    raise KeyError("oops")


class Panic(BaseException):
    """As pyo3's PanicException, an exception of another language."""


def panicking(*args: Any) -> Any:
    raise Panic("at the disco")


def cancelled(*args: Any) -> Any:
    raise asyncio.CancelledError("late")


def leaving(*args: Any) -> Any:
    raise GeneratorExit("gone")


class Panicking:
    """A key, or a limit, that raises wherever it is used."""

    __hash__ = panicking
    reasons = panicking


def yields_text(self: Any, request: Any) -> Any:
    yield "too long"


def sets_nothing(self: Any, metadata: Any) -> None:
    pass


FAULTS = {
    "a reason that is a str": ({"unsupported": yields_text}, "unsupported gave 'too long' (str), but must give attnop"),
    "a str of reasons": ({"unsupported": lambda self, r: "long"}, "unsupported returned 'long', but must return or yi"),
    "None": ({"unsupported": lambda self, request: None}, "unsupported returned None, but must return or yield"),
    "raises": ({"unsupported": raising}, "unsupported raised KeyError: 'oops'"),
    "unhashable": ({"environment_key": lambda self: ["sm_90"]}, "environment_key returned a list, but must return a h"),
    "key raises": ({"environment_key": raising}, "environment_key raised KeyError: 'oops'"),
    "no metadata": ({"__init__": sets_nothing}, "__init__ left metadata unset; it must call super().__init__(metadata"),
    "no argument": ({"__init__": lambda self: None}, "__init__ raised TypeError: "),
    "exits": ({"unsupported": lambda self, request: (_ for _ in ()).throw(SystemExit(3))}, "unsupported raised System"),
    "panics": ({"unsupported": panicking}, "unsupported raised Panic: at the disco"),
    "is cancelled": ({"unsupported": cancelled}, "unsupported raised CancelledError: late"),
    "leaves": ({"unsupported": leaving}, "unsupported raised GeneratorExit: gone"),
    "key panics": ({"environment_key": panicking}, "environment_key raised Panic: at the disco"),
    "key can't be hashed": ({"environment_key": lambda self: Panicking()}, "environment_key returned a Panicking, but"),
    "init panics": ({"__init__": panicking}, "__init__ raised Panic: at the disco"),
}  # fmt: skip


@pytest.mark.parametrize(("members", "text"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_and_harms_no_other(members: dict[str, Any], text: str) -> None:
    cls = register(**members)
    metadata = OperationMetadata(platform="tt")
    found = explain(OperationRegistry.create("vanilla", metadata).request(Q, Q, Q))
    (faulty,) = (c for c in found.others if c.name == "acme:zeta")
    assert faulty.problem.startswith(f"failed: acme.zeta:Zeta.{text}")
    assert found.chosen.name.startswith("attnops")
    out = OperationRegistry.create("auto", metadata)(Q, Q, 3 * Q).attention_outputs
    assert jnp.allclose(out, 3.0, atol=1e-5)
    with pytest.raises(PluginError, match=re.escape(f"acme.zeta:Zeta.{text}")):
        OperationRegistry.create("zeta", metadata)(Q, Q, Q)
    (plugin,) = (p for p in OperationRegistry.plugins() if p.operation_class is cls)
    faults = find_faults(plugin)
    assert len(faults) == 1
    assert faults[0].startswith(f"acme.zeta:Zeta.{text}")


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (classmethod(raising), "rank raised KeyError: 'oops'"),
        (classmethod(panicking), "rank raised Panic: at the disco"),
        (
            classmethod(lambda cls, request: 9.0),
            "rank returned 9.0, but must return an attnops.Rank, or None for never",
        ),
        (classmethod(lambda cls, request: "KERNEL"), "rank returned KERNEL, but must return an attnops.Rank, or None"),
    ],
)
def test_a_faulty_rank_is_named_and_harms_no_other(rank: Any, text: str) -> None:
    cls = register(rank=rank)
    metadata = OperationMetadata(platform="tt")
    found = explain(OperationRegistry.create("vanilla", metadata).request(Q, Q, Q))
    (faulty,) = (c for c in found.others if c.name == "acme:zeta")
    assert text in faulty.problem
    assert found.chosen.name.startswith("attnops")
    (plugin,) = (p for p in OperationRegistry.plugins() if p.operation_class is cls)
    assert [text in fault for fault in find_faults(plugin)] == [True]
    # Asked for by name it isn't compared with any other.
    assert (OperationRegistry.create("zeta", metadata)(Q, Q, Q).attention_outputs == 7).all()


@pytest.mark.parametrize(
    ("details", "text"),
    [
        (raising, "details raised"),
        (panicking, "details raised Panic: at the disco"),
        (lambda self, request: "a line", "details returned a line, but must return or yield strings"),
        (lambda self, request: [1], "details returned [1], but must return or yield strings"),
        (lambda self, request: None, "details returned None, but must return or yield strings"),
    ],
)
def test_faulty_details_are_named_and_good_ones_printed(details: Any, text: str) -> None:
    cls = register(details=details)
    request = OperationRegistry.create("vanilla", OperationMetadata(platform="tt")).request(Q, Q, Q)
    (faulty,) = (c for c in explain(request).others if c.name == "acme:zeta")
    assert text in faulty.problem
    cls.details = lambda self, request: ["runs on seven cores"]  # type: ignore[assignment]
    assert "\n  runs on seven cores\n" in str(explain(request, "zeta"))


def test_a_reason_whose_value_cannot_be_printed() -> None:
    reason = Reason("pages", Unprintable(), "must be even")
    assert str(reason) == "pages=<a Unprintable, whose printing raised RuntimeError>: must be even"
    register(unsupported=lambda self, request: [reason])
    metadata = OperationMetadata(platform="tt", on_unsupported="error")
    found = explain(OperationRegistry.create("vanilla", metadata).request(Q, Q, Q))
    assert f"acme:zeta: can't serve it\n  - {reason}" in str(found)
    with pytest.raises(UnsupportedError, match="pages=<a Unprintable, whose printing raised RuntimeError>: must be ev"):
        OperationRegistry.create("zeta", metadata)(Q, Q, Q)


@pytest.mark.parametrize("method", ["__eq__", "__hash__", "both"])
def test_an_operation_that_cannot_be_compared_runs(method: str) -> None:
    members = {name: raising for name in ("__eq__", "__hash__") if method in (name, "both")}
    cls = register(**({"__hash__": VanillaAttention.__hash__} | members))
    metadata = OperationMetadata(platform="tt")
    for _ in range(2):
        assert (OperationRegistry.create("zeta", metadata)(Q, Q, Q).attention_outputs == 7).all()
        assert (OperationRegistry.create("auto", metadata)(Q, Q, Q).attention_outputs == 7).all()
    assert (cls(metadata)(Q, Q, Q).attention_outputs == 7).all()


class PanickingLimits(Limits):
    reasons = panicking


def test_limits_that_panic_harm_no_other() -> None:
    cls = register(limits={"tt": PanickingLimits()})
    metadata = OperationMetadata(platform="tt")
    assert OperationRegistry.create("auto", metadata)(Q, Q, 3 * Q).attention_outputs.max() < 3.1
    (plugin,) = (p for p in OperationRegistry.plugins() if p.operation_class is cls)
    assert find_faults(plugin) == ["asking it raised Panic: at the disco"]
    assert (find_reasons(plugin, "tt"), find_details(plugin, "tt")) == ([], ())


def test_control_c_is_not_caught() -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    register(unsupported=interrupted)
    with pytest.raises(KeyboardInterrupt):
        OperationRegistry.create("auto", OperationMetadata(platform="tt"))(Q, Q, Q)


def test_an_init_may_refuse_its_metadata() -> None:
    def refuse(self: Any, metadata: Any) -> None:
        raise ValueError("takes no block_q")

    cls = register(__init__=refuse)
    with pytest.raises(ValueError, match=r"^takes no block_q$"):
        OperationRegistry.create("zeta", OperationMetadata(platform="tt"))
    (plugin,) = (p for p in OperationRegistry.plugins() if p.operation_class is cls)
    assert find_faults(plugin) == []


def test_no_installed_operation_is_faulty() -> None:
    assert [fault for plugin in OperationRegistry.plugins(load=True) for fault in find_faults(plugin)] == []
