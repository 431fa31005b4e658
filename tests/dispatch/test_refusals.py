"""What the registry refuses or reports rather than ignore: names, arguments, environment variables, metadata files."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from attnops import OperationMetadata, OperationRegistry, PluginError, PluginWarning, explain
from attnops.dispatch.plugins import State
from attnops.errors import DuplicateOperationError
from attnops.operations.vanilla import VanillaAttention

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """A function that installs a distribution "acme" with these entry points."""
    before = OperationRegistry._registered[:]
    for variable in ("ATTNOPS_DISABLE", "ATTNOPS_NO_AUTOLOAD"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(tmp_path)

    def write(entry_points: str, name: str = "acme") -> None:
        info = tmp_path / "acme-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.3\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        OperationRegistry.refresh()

    yield write
    OperationRegistry._registered[:] = before
    monkeypatch.undo()
    OperationRegistry.refresh()


def texts() -> list[str]:
    OperationRegistry.refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [trouble.what for trouble in OperationRegistry.troubles()]


def operation(*names: Any, **members: Any) -> type[VanillaAttention]:
    name = classmethod(lambda cls: names if len(names) > 1 else names[0])
    return type("Zeta", (VanillaAttention,), {"get_impl_name": name, "__module__": "acme.zeta"} | members)


class TestNames:
    @pytest.mark.parametrize("name", ["", "a:b", "a b", "a,b", None, 3, ()])
    def test_what_is_no_name_is_refused(self, write: Write, name: Any) -> None:
        before = OperationRegistry.list_implementations()
        with pytest.raises(TypeError, match=r"has a get_impl_name that (returned|gave) "):
            OperationRegistry.register(operation(name))
        assert OperationRegistry.list_implementations() == before

    def test_a_get_impl_name_that_raises(self, write: Write) -> None:
        def raising(cls: Any) -> Any:
            raise KeyError("oops")

        text = "has a get_impl_name that gave no name, but KeyError: 'oops'"
        with pytest.raises(TypeError, match=text):
            OperationRegistry.register(operation("zeta", get_impl_name=classmethod(raising)))

    @pytest.mark.parametrize("second", ["taken", "a:b"])
    def test_all_names_are_registered_or_none(self, write: Write, second: str) -> None:
        OperationRegistry.register(operation("taken"))
        rival = operation("free", second, __module__="acme.rival")
        with pytest.raises((DuplicateOperationError, TypeError)):
            OperationRegistry.register(rival)
        assert "free" not in OperationRegistry.list_implementations()
        OperationRegistry.register(operation("free", "other", __module__="acme.rival"))
        assert {"free", "other", "taken"} <= set(OperationRegistry.list_implementations())

    @pytest.mark.parametrize("entry", ["a:b", "a b"])
    def test_an_entry_points_name_harms_no_other(self, write: Write, entry: str) -> None:
        write(f"[attnops.operations]\n{entry} = attnops.operations.vanilla:VanillaAttention\n")
        (plugin,) = (p for p in OperationRegistry.plugins(load=True) if p.distribution == "acme")
        assert plugin.state == State.FAILED
        assert f"its entry point's name is {entry!r}, but must be a string of at least one char" in plugin.cause
        q = jnp.ones((1, 4, 2, 8))
        found = explain(OperationRegistry.create("auto").request(q, q, q))
        assert [c.problem for c in found.others if c.name == f"acme:{entry}"] == [f"failed: {plugin.cause}"]
        assert (OperationRegistry.create("auto")(q, q, q).attention_outputs == 1).all()
        with pytest.raises(PluginError, match="its entry point's name is"):
            OperationRegistry.get(f"acme:{entry}")


class TestArguments:
    @pytest.mark.parametrize("name", [None, 3, VanillaAttention])
    def test_a_name_that_is_no_string(self, name: Any) -> None:
        with pytest.raises(TypeError, match=r"impl_name=.* must be a string, the name of an operation such as 'flash'"):
            OperationRegistry.create(name)

    def test_metadata_of_another_type(self) -> None:
        text = "metadata is a dict, but must be an attnops.OperationMetadata; write OperationMetadata(**metadata)"
        with pytest.raises(TypeError, match=re.escape(text)):
            OperationRegistry.create("vanilla", {"platform": "cpu"})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"metadata is a str, but must be an attnops.OperationMetadata$"):
            OperationRegistry.create("vanilla", "cpu")  # type: ignore[arg-type]
        assert OperationRegistry.create("vanilla", OperationMetadata(platform="cpu"))


class TestDisable:
    def test_what_is_not_installed_is_reported_and_warned_of_once(
        self, write: Write, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ATTNOPS_DISABLE", "vanilla, nowhere:flash,attnops:sdpa")
        monkeypatch.setattr(OperationRegistry, "_warned", set())
        OperationRegistry.refresh()
        with pytest.warns(PluginWarning) as seen:
            OperationRegistry.plugins()
        assert [str(warning.message).partition(";")[0] for warning in seen] == [
            "ATTNOPS_DISABLE names 'vanilla', which is not an installed distribution with operations",
            "ATTNOPS_DISABLE names 'nowhere:flash', which is not an installed distribution with operations",
        ]
        assert "write distribution:operation, attnops:vanilla" in str(seen[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            OperationRegistry.refresh()
            assert len(OperationRegistry.troubles()) == 2

    def test_what_is_installed_is_not(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ATTNOPS_DISABLE", "attnops:sdpa,")
        assert texts() == []


class TestEntryPoints:
    @pytest.mark.parametrize(
        ("text", "trouble"),
        [
            ("[attnops.operations\nzeta = acme:Zeta\n", "acme has the entry-point group [attnops.operations, so its o"),
            ("[attnops.operation]\nzeta = acme:Zeta\n", "acme has the entry-point group [attnops.operation], so its o"),
            ("[ attnops.operations ]\nzeta = acme:Zeta\n", "acme has the entry-point group [ attnops.operations ], so"),
            ("\ufeff[attnops.operations]\nzeta = acme:Zeta\n", "acme has the entry-point group \ufeff[attnops.operati"),
            ("[attnops.operations]\nzeta acme:Zeta\n", "dist-info can't be read, so its operations are missing: "),
        ],
    )  # fmt: skip
    def test_what_is_malformed_is_reported(self, write: Write, text: str, trouble: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write(text)
        (found,) = texts()
        assert trouble in found
        assert "zeta" not in OperationRegistry.list_implementations()

    @pytest.mark.parametrize(
        "text",
        [
            "[attnops.operations]\n",
            "[console_scripts]\nacme = attnops.operations:main\n",
            "[attnops.commands]\nzeta = acme:zeta\n",
            "# [attnops.operation]\n",
            "[other]\nx = [attnops]\n",
        ],
    )
    def test_what_is_sound_is_not(self, write: Write, text: str) -> None:
        write(text)
        assert texts() == []

    @pytest.mark.slow
    def test_a_folder_that_another_name_stands_in_harms_no_other(self, write: Write) -> None:
        write("[attnops.operations]\nzeta = acme:Zeta\n", name="emca")
        (found,) = texts()
        assert "can't be read, so its operations are missing" in found
        assert OperationRegistry.get("vanilla", "cpu") is VanillaAttention
