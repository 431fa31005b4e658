"""Distributions that the core does not know: each state that one may be in, and that none harms another.

First the state machine, in process, with distributions written into a folder of sys.path. Then, slow, the real
distributions under `third_party/`, built as wheels and pip-installed into an environment of their own.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import attnops
from attnops import OperationMetadata, OperationRegistry
from attnops.dispatch.plugins import Plugin, State
from attnops.errors import AmbiguousOperationError, DuplicateOperationError, PluginError, PluginWarning
from attnops.operations.vanilla import VanillaAttention

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = REPOSITORY / "tests" / "third_party"

# A module with one operation, which records that it was imported.
OPERATION = """
import sys
from attnops import OperationMetadata, OperationRegistry
from attnops.operations.vanilla import VanillaAttention

sys.imported_by_test.append(__name__)


class Operation(VanillaAttention):
    api_version = 1

    @classmethod
    def get_impl_name(cls):
        return "zeta"
"""
TPU = "\n    def forward_tpu(self, query, key, value):\n        return self.forward_native(query, key, value)\n"
CUDA = TPU.replace("tpu", "cuda")

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Install]:
    """A function that installs a distribution with one module; all of it is gone after the test."""
    site = tmp_path / "site"
    registered = OperationRegistry._registered[:]

    def install(
        name: str,
        source: str = OPERATION,
        *,
        module: str | None = None,
        entry_points: dict[str, str] | None = None,
        version: str = "1.0",
        requires: tuple[str, ...] = (),
        folder: Path = site,
    ) -> None:
        module = name.replace("-", "_") if module is None else module
        entry_points = {"zeta": f"{module}:Operation"} if entry_points is None else entry_points
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source)
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {text}" for text in requires)]
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.3", *lines, ""]))
        entries = [f"{entry} = {target}" for entry, target in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[attnops.operations]", *entries, ""]))
        OperationRegistry.refresh()

    with pytest.MonkeyPatch.context() as patch:
        for variable in ("ATTNOPS_DISABLE", "ATTNOPS_NO_AUTOLOAD"):
            patch.delenv(variable, raising=False)
        patch.setattr(sys, "imported_by_test", [], raising=False)
        patch.syspath_prepend(site)
        before = set(sys.modules)
        yield install
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
                del sys.modules[name]
    OperationRegistry._registered[:] = registered
    OperationRegistry.refresh()


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
        ("import libacme_that_is_not_there", None, "failed", "No module named 'libacme_that_is_not_there'",
         ModuleNotFoundError),
        ("", None, "failed", "raised AttributeError: module 'broken' has no attribute 'Operation'", AttributeError),
        ("def Operation(metadata): ...", None, "failed", "broken:Operation is not a subclass of attnops.BaseOperation",
         None),
        (OPERATION, "absent:Operation", "failed", "raised ModuleNotFoundError: No module named 'absent'",
         ModuleNotFoundError),
        (OPERATION.replace("VanillaAttention)", "__import__('attnops').OperationImpl)"), None, "failed",
         "broken:Operation does not implement forward_native", None),
        (OPERATION.replace("api_version = 1", "api_version = 99"), None, "incompatible",
         "broken:Operation has api_version=99, but this attnops has api_version=1; upgrade attnops", None),
        (OPERATION.replace("api_version = 1", "api_version = 0"), None, "incompatible",
         "has api_version=0, but this attnops has api_version=1; upgrade the plugin", None),
        (OPERATION.replace("api_version = 1", "api_version = '2'"), None, "failed",
         "broken:Operation has api_version='2', which must be an int", None),
        (OPERATION.replace("api_version = 1", "priority = 'high'"), None, "failed",
         "broken:Operation has priority='high', which must be an int", None),
        (OPERATION.replace("api_version = 1", "limits = {'tpux': None}"), None, "failed",
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


def test_two_that_serve_one_platform_are_ambiguous_there_only(install: Install) -> None:
    install("acme-one", OPERATION + TPU)
    install("acme-two", OPERATION + TPU)
    install("acme-three", OPERATION + CUDA)
    with pytest.raises(AmbiguousOperationError) as caught:
        OperationRegistry.get("zeta", "tpu")
    assert str(caught.value) == (
        "'zeta' on tpu is served by acme-one:zeta and acme-two:zeta with the same priority=0; use one of these "
        "names, or disable one with ATTNOPS_DISABLE"
    )
    assert OperationRegistry.get("acme-two:zeta", "tpu").__module__ == "acme_two"
    assert OperationRegistry.get("zeta", "cuda").__module__ == "acme_three"


def test_the_higher_priority_wins(install: Install) -> None:
    install("acme-one", OPERATION + TPU)
    install("acme-two", OPERATION.replace("api_version = 1", "priority = 1") + TPU)
    assert OperationRegistry.get("zeta", "tpu").__module__ == "acme_two"


def test_the_core_serves_where_no_other_has_a_forward_of_its_own(install: Install) -> None:
    install(
        "acme-attention",
        OPERATION.replace("zeta", "vanilla") + TPU,
        entry_points={"vanilla": "acme_attention:Operation"},
    )
    assert OperationRegistry.get("vanilla", "tpu").__module__ == "acme_attention"
    assert OperationRegistry.get("vanilla", "cuda") is VanillaAttention
    assert OperationRegistry.get("attnops:vanilla", "tpu") is VanillaAttention
    assert_core_unharmed()


def test_an_unknown_name_lists_near_ones(install: Install) -> None:
    install("acme-attention")
    with pytest.raises(ValueError, match=r"impl_name='zetta' is not an installed operation; .*did you mean 'zeta'"):
        OperationRegistry.get("zetta")
    with pytest.raises(ValueError, match=r"did you mean .*zeta"):
        OperationRegistry.get(":zeta")
    with pytest.raises(ValueError, match="did you mean 'acme-attention:zeta'"):
        OperationRegistry.get("acme-atention:zeta")


def test_another_projects_unreadable_entry_points_have_no_effect(install: Install, tmp_path: Path) -> None:
    install("acme-attention")
    install("acme-garbled")
    (tmp_path / "site" / "acme_garbled-1.0.dist-info" / "entry_points.txt").write_bytes(b"[console_scripts]\n\xff = x")
    OperationRegistry.refresh()
    with pytest.warns(PluginWarning, match=r"metadata of .* can't be read, so its operations are missing"):
        OperationRegistry.plugins()
    assert OperationRegistry.get("zeta", "cpu").__module__ == "acme_attention"


def test_a_class_of_a_script_has_a_name(install: Install) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(OPERATION.replace("sys.imported_by_test", "[]"), namespace)
    OperationRegistry.register(namespace["Operation"])
    assert plugin("main:zeta").operation_class is namespace["Operation"]


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


def test_a_second_class_for_one_name_and_platform_is_refused_unless_it_overrides(install: Install) -> None:
    class Zeta(VanillaAttention):
        __module__ = "acme_attention.first"

        @classmethod
        def get_impl_name(cls) -> str:
            return "zeta"

        def forward_tpu(self, query: Any, key: Any, value: Any) -> Any: ...

    class Second(Zeta):
        __module__ = "acme_attention.second"

    class OnCuda(VanillaAttention):
        __module__ = "acme_attention.third"
        get_impl_name = Zeta.get_impl_name

        def forward_cuda(self, query: Any, key: Any, value: Any) -> Any: ...

    OperationRegistry.register(Zeta)
    with pytest.raises(DuplicateOperationError) as caught:
        OperationRegistry.register(Second)
    assert "acme-attention already has acme_attention.first:" in str(caught.value)
    assert "for the same platform; register with override=True to replace it" in str(caught.value)
    OperationRegistry.register(OnCuda)  # another platform
    assert OperationRegistry.get("zeta", "tpu") is Zeta
    assert OperationRegistry.get("zeta", "cuda") is OnCuda

    OperationRegistry.register(override=True)(Second)
    assert OperationRegistry.get("zeta", "tpu") is Second


def test_a_class_by_hand_leaves_the_entry_points_platforms_alone(install: Install) -> None:
    install("acme-attention", OPERATION + TPU)
    hand: dict[str, Any] = {}
    exec(OPERATION.replace("sys.imported_by_test", "[]") + CUDA, {"__name__": "acme_attention.cuda"}, hand)
    OperationRegistry.register(hand["Operation"])
    assert OperationRegistry.get("zeta", "cuda") is hand["Operation"]
    assert OperationRegistry.get("zeta", "tpu").__module__ == "acme_attention"

    hand["Operation"].forward_tpu = hand["Operation"].forward_cuda
    OperationRegistry.refresh()
    with pytest.raises(DuplicateOperationError, match=r"acme-attention has .* for 'zeta' on tpu; register .*override="):
        OperationRegistry.get("zeta", "tpu")
    OperationRegistry.register(override=True)(hand["Operation"])
    assert OperationRegistry.get("zeta", "tpu") is hand["Operation"]


@pytest.mark.parametrize("method", ["rank(cls, request)", "unsupported(self, request)", "__init__(self, metadata)"])
def test_one_that_raises_when_asked_is_not_chosen_and_others_are(install: Install, method: str) -> None:
    decorator = "@classmethod\n    " if "cls" in method else ""
    source = OPERATION + CUDA + f"\n    {decorator}def {method}:\n        raise KeyError('oops')\n"
    install("acme-attention", source)
    q = jnp.ones((1, 3, 2, 4))
    operation = OperationRegistry.create("auto", OperationMetadata(platform="cuda"))
    explanation = attnops.explain(operation.request(q, q, q))
    (other,) = (c for c in explanation.others if c.name == "acme-attention:zeta")
    assert not other.serves
    name = method.partition("(")[0]
    assert other.problem == f"failed: acme_attention:Operation.{name} raised KeyError: 'oops'"
    assert explanation.chosen.name.startswith("attnops")


def test_auto_breaks_ties_by_priority(install: Install) -> None:
    for name, priority in (("acme-one", 0), ("acme-two", 1)):
        body = (
            "\n    @classmethod\n    def rank(cls, request):\n        return __import__('attnops').Rank.TILED_KERNEL\n"
        )
        source = OPERATION.replace("api_version = 1", f"priority = {priority}") + CUDA + body
        install(name, source, entry_points={name: f"{name.replace('-', '_')}:Operation"})
    q = jnp.ones((1, 3, 2, 4))
    request = OperationRegistry.create("auto", OperationMetadata(platform="cuda")).request(q, q, q)
    assert attnops.explain(request).chosen.name == "acme-two:acme-two"


def test_auto_prefers_a_subclass_of_vanilla_where_it_has_a_kernel_and_the_core_elsewhere(install: Install) -> None:
    source = OPERATION.replace("api_version = 1", "api_version, priority = 1, 10") + TPU
    install("acme-attention", source, entry_points={"vanilla": "acme_attention:Operation"})
    q = jnp.ones((1, 3, 2, 4))
    request = OperationRegistry.create("auto", OperationMetadata(platform="tpu")).request(q, q, q)
    assert attnops.explain(request).chosen.name == "acme-attention:vanilla"
    elsewhere = attnops.explain(request.replace(platform="cpu"))
    order = [candidate.name for candidate in (elsewhere.chosen, *elsewhere.others)]
    assert order.index("attnops:vanilla") < order.index("acme-attention:vanilla")


def test_explaining_what_is_not_attention_teaches(install: Install) -> None:
    source = OPERATION.replace("VanillaAttention)", "__import__('attnops').BaseOperation)")
    install("acme-attention", source + "\n    def forward_native(self, x):\n        return x\n")
    q = jnp.ones((1, 3, 2, 4))
    request = OperationRegistry.create("auto").request(q, q, q)
    with pytest.raises(ValueError, match="operation='zeta' is not attention of query, key and value"):
        attnops.explain(request, "zeta")
