"""Distributions that the core does not know: each state that one may be in, and that none harms another.

The distributions are written into a folder of sys.path.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from attnops import OperationMetadata, OperationRegistry
from attnops.dispatch.plugins import Plugin, State
from attnops.errors import PluginError, PluginWarning

# The source of a module that records its import.
OPERATION = Path(__file__).with_name("zeta.py").read_text()

Install = Callable[..., None]


def imported() -> list[str]:
    return sys.imported_by_test  # type: ignore[attr-defined, no-any-return]


def plugin(name: str) -> Plugin:
    (found,) = (p for p in OperationRegistry.plugins() if p.name == name)
    return found


def assert_core_unharmed() -> None:
    q = jnp.ones((1, 3, 2, 4))
    out = OperationRegistry.create("vanilla", OperationMetadata(platform="cpu"))(q, q, 2 * q)
    assert jnp.allclose(out.attention_outputs, 2.0)


def test_listed_without_import_and_imported_when_asked_for(install: Install) -> None:
    install("acme-attention")
    assert "zeta" in OperationRegistry.list_implementations()
    found = plugin("acme-attention:zeta")
    assert (found.state, found.version, found.target) == (State.DISCOVERED, "1.0", "acme_attention:Operation")
    assert imported() == []

    cls = OperationRegistry.get("zeta", "cpu")
    assert (cls.__module__, cls.__name__) == ("acme_attention", "Operation")
    assert OperationRegistry.get("acme-attention:zeta", "tpu") is cls
    assert (found.state, imported()) == (State.LOADED, ["acme_attention"])


@pytest.mark.parametrize(
    ("source", "target", "state", "cause", "raised"),
    [
        ("raise RuntimeError('oops')", None, "failed", "importing broken:Operation raised RuntimeError: oops",
         RuntimeError),
        ("raise SystemExit(3)", None, "failed", "importing broken:Operation raised SystemExit: 3", SystemExit),
        ("import asyncio; raise asyncio.CancelledError('late')", None, "failed",
         "importing broken:Operation raised CancelledError: late", asyncio.CancelledError),
        ("raise GeneratorExit('gone')", None, "failed", "importing broken:Operation raised GeneratorExit: gone",
         GeneratorExit),
        ("import libacme_that_is_not_there", None, "failed", "No module named 'libacme_that_is_not_there'",
         ModuleNotFoundError),
        ("", None, "failed", "raised AttributeError: module 'broken' has no attribute 'Operation'", AttributeError),
        ("def Operation(metadata): ...", None, "failed", "broken:Operation is not a subclass of attnops.BaseOperation",
         None),
        (OPERATION, "absent:Operation", "failed", "raised ModuleNotFoundError: No module named 'absent'",
         ModuleNotFoundError),
        (OPERATION.replace("VanillaAttention)", "__import__('attnops').OperationImpl)"), None, "failed",
         "broken:Operation does not implement forward_native", None),
        (OPERATION.replace("api_version = 2", "api_version = 99"), None, "incompatible",
         "broken:Operation has api_version=99, but this attnops has api_version=2; upgrade attnops", None),
        (OPERATION.replace("api_version = 2", "api_version = 0"), None, "incompatible",
         "has api_version=0, but this attnops has api_version=2; upgrade the plugin", None),
        (OPERATION.replace("api_version = 2", "_reasons = lambda *_: ['no']; cached_tpu = None"), None, "incompatible",
         "has _reasons, cached_tpu of api_version=1, which api_version=2 does not call; upgrade the plugin", None),
        (OPERATION.replace("api_version = 2", "readers = {'tpux': 3}"), None, "failed",
         "broken:Operation has readers={'tpux': 3}, which must map forwards to readers; forwards are", None),
        (OPERATION.replace("api_version = 2", "api_version = '3'"), None, "failed",
         "broken:Operation has api_version='3', which must be an int", None),
        (OPERATION.replace("api_version = 2", "priority = 'high'"), None, "failed",
         "broken:Operation has priority='high', which must be an int", None),
        (OPERATION.replace("api_version = 2", "limits = {'tpux': None}"), None, "failed",
         "broken:Operation has limits for 'tpux', which is not a forward; use one of", None),
    ],
)  # fmt: skip
def test_a_broken_one_raises_its_cause_when_asked_for(
    install: Install, source: str, target: str | None, state: str, cause: str, raised: type[BaseException] | None
) -> None:
    install("acme-broken", source, module="broken", entry_points={"zeta": target or "broken:Operation"})
    install("acme-good", entry_points={"eta": "acme_good:Operation"})
    for _ in range(2):  # the cause is kept
        with pytest.raises(PluginError) as caught:
            OperationRegistry.get("zeta", "cpu")
        assert str(caught.value).startswith(f"'zeta' can't be used:\n  - acme-broken:zeta is {state}: ")
        assert cause in str(caught.value)
        assert (caught.value.__cause__ and type(caught.value.__cause__)) is raised
    found = plugin("acme-broken:zeta")
    assert (found.state, bool(found.traceback)) == (state, raised is not None)
    assert OperationRegistry.get("eta", "cpu").__module__ == "acme_good"
    assert_core_unharmed()


def test_a_broken_one_warns_where_another_serves(install: Install) -> None:
    install("acme-broken", "raise RuntimeError('no libacme')")
    install("acme-good")
    with pytest.warns(PluginWarning, match=r"acme-broken:zeta can't be used: .*RuntimeError: no libacme"):
        assert OperationRegistry.get("zeta", "cpu").__module__ == "acme_good"


@pytest.mark.parametrize(
    ("requires", "cause"),
    [
        (("numpy>=999",), "requires numpy>=999, but "),
        (
            ("acme-nowhere>=2; python_version >= '3'",),
            "requires acme-nowhere>=2, which is not installed; pip install 'acme-",
        ),
        (("acme-nowhere>=2",), "requires acme-nowhere>=2, which is not installed; pip install 'acme-nowhere>=2'"),
        (
            ("numpy", "not a requirement at all"),
            "requires 'not a requirement at all', which is not a valid requirement: ",
        ),
    ],
)
def test_unmet_requirements_are_named(install: Install, requires: tuple[str, ...], cause: str) -> None:
    install("acme-unmet", requires=requires)
    assert plugin("acme-unmet:zeta").state == State.INCOMPATIBLE
    with pytest.raises(PluginError) as caught:
        OperationRegistry.get("zeta", "cpu")
    assert f"acme-unmet:zeta is incompatible: {cause}" in str(caught.value)
    assert imported() == []


def test_requirements_of_other_machines_and_extras_do_not_count(install: Install) -> None:
    install(
        "acme-attention", requires=("acme-nowhere; extra == 'gpu'", "acme-nowhere; python_version < '3'", "numpy>=1")
    )
    assert OperationRegistry.get("zeta", "cpu").__module__ == "acme_attention"


def test_unreadable_metadata_hides_no_other(install: Install, tmp_path: Path) -> None:
    install("acme-attention")
    install("acme-nameless")
    (tmp_path / "site" / "acme_nameless-1.0.dist-info" / "METADATA").unlink()
    OperationRegistry.refresh()
    with pytest.warns(PluginWarning, match=r"metadata of .*acme_nameless.* can't be read, so its operations are miss"):
        OperationRegistry.plugins()
    assert OperationRegistry.get("zeta", "cpu").__module__ == "acme_attention"
    assert_core_unharmed()


@pytest.mark.parametrize("value", ["acme-attention", "Acme_Attention:zeta", "other, acme.attention:zeta ,"])
def test_what_is_disabled_is_not_imported_and_reported(
    install: Install, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("ATTNOPS_DISABLE", value)
    install("acme-attention", entry_points={"zeta": "acme_attention:Operation", "eta": "acme_attention:Operation"})
    with pytest.raises(
        PluginError, match="'zeta' can't be used:\n  - acme-attention:zeta is disabled: ATTNOPS_DISABLE"
    ):
        OperationRegistry.get("zeta", "cpu")
    assert imported() == []
    if ":" in value:
        assert OperationRegistry.get("eta", "cpu").__module__ == "acme_attention"
    assert_core_unharmed()


def test_disabled_one_is_listed_and_does_not_warn(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNOPS_DISABLE", "acme-one")
    install("acme-one")
    install("acme-two")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert OperationRegistry.get("zeta", "cpu").__module__ == "acme_two"


def test_without_autoload_no_plugin_is_imported(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNOPS_NO_AUTOLOAD", "1")
    install("acme-attention", OPERATION + "\nOperationRegistry.register(Operation)\n")
    with pytest.raises(PluginError, match="acme-attention:zeta is disabled: ATTNOPS_NO_AUTOLOAD is set"):
        OperationRegistry.get("zeta", "cpu")
    assert imported() == []
    assert_core_unharmed()

    module = __import__("acme_attention")  # it registers itself: that is the user's own doing, so it counts
    assert OperationRegistry.get("zeta", "cpu") is module.Operation
    assert OperationRegistry.get("acme-attention:zeta", "cpu") is module.Operation


def test_another_projects_unreadable_entry_points_have_no_effect(install: Install, tmp_path: Path) -> None:
    install("acme-attention")
    install("acme-garbled")
    (tmp_path / "site" / "acme_garbled-1.0.dist-info" / "entry_points.txt").write_bytes(b"[console_scripts]\n\xff = x")
    OperationRegistry.refresh()
    with pytest.warns(PluginWarning, match=r"metadata of .* can't be read, so its operations are missing"):
        OperationRegistry.plugins()
    assert OperationRegistry.get("zeta", "cpu").__module__ == "acme_attention"


def test_of_one_distribution_twice_the_first_counts(install: Install, tmp_path: Path) -> None:
    """Of one distribution in two folders of sys.path the first counts, whatever it offers."""
    behind = tmp_path / "behind"
    install("acme-one", version="2.0")
    install("Acme.One", version="1.0", module="acme_one", folder=behind)
    install("acme-two", entry_points={})
    install("acme-two", version="0.9", entry_points={"eta": "acme_two:Operation"}, folder=behind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(behind)])
        OperationRegistry.refresh()
        assert plugin("acme-one:zeta").version == "2.0"
        assert "eta" not in OperationRegistry.list_implementations()


def test_import_by_many_threads_at_once(install: Install) -> None:
    """The module registers itself while other threads ask for it: one class, one import, no deadlock."""
    install("acme-attention", OPERATION + "\nimport time; time.sleep(0.2)\nOperationRegistry.register(Operation)\n")
    start = threading.Barrier(8)
    got: list[Any] = []

    def ask() -> None:
        start.wait()
        got.append(OperationRegistry.get("zeta", "cpu"))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(got) == 8
    assert len(set(got)) == 1
    assert imported() == ["acme_attention"]
    assert plugin("acme-attention:zeta").state == State.LOADED


def test_a_module_that_registers_its_entry_points_class_from_elsewhere(install: Install) -> None:
    """The entry point names a re-export, so that its target and the class's own differ: still one plugin."""
    install("acme-inner", OPERATION + "\nOperationRegistry.register(Operation)\n", entry_points={})
    install("acme-attention", "from acme_inner import Operation", entry_points={"zeta": "acme_attention:Operation"})
    cls = OperationRegistry.get("zeta", "cpu")
    assert cls.__module__ == "acme_inner"
    # The class of another package is that package's, even where its import came about through this one.
    assert [p.name for p in OperationRegistry.plugins() if p.operation_class is cls] == [
        "acme-attention:zeta",
        "acme-inner:zeta",
    ]


def test_a_package_that_registers_a_re_exported_class_is_listed_once(install: Install, tmp_path: Path) -> None:
    install("acme", "", entry_points={"zeta": "acme:Operation"}, module="acme_module")
    package = tmp_path / "site" / "acme"
    package.mkdir()
    (package / "__init__.py").write_text("from acme.inner import Operation")
    (package / "inner.py").write_text(OPERATION + "\nOperationRegistry.register(Operation)\n")
    assert OperationRegistry.get("zeta", "cpu").__module__ == "acme.inner"
    assert plugin("acme:zeta").target == "acme:Operation"


def test_auto_imports_plugins_when_created_and_not_in_a_call_that_may_be_traced(install: Install) -> None:
    install("acme-attention")
    OperationRegistry.create("vanilla")
    assert imported() == []
    OperationRegistry.create("auto")
    assert imported() == ["acme_attention"]


def test_a_plugin_may_create_auto_while_it_is_imported(install: Install) -> None:
    install("acme-attention", OPERATION + "\n\nAUTO = OperationRegistry.create('auto')\n")
    assert plugin("acme-attention:zeta").load() is not None
