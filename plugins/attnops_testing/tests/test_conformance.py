"""The suite as pytest classes: what `refuses` means for behaviours, and kernels that call back to the host."""

import functools
import sys
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnops_testing
from attnops import Limits, OperationMetadata, OperationOutput
from attnops.operations.vanilla import VanillaAttention
from attnops_testing import OperationConformance, attention
from attnops_testing.behaviours import BEHAVIOURS
from attnops_testing.runner import NothingToCheckError, Status, Subject, attempt


class OnTheHost(VanillaAttention):
    """A kernel in numpy, by a callback, which JAX can't export; forward only."""

    limits: ClassVar = {"cpu": Limits(dtypes={"float32"}, differentiable=False)}

    @classmethod
    def get_impl_name(cls):
        return "on_the_host"

    def forward_cpu(self, query, key, value):
        def run(*arrays):
            return np.asarray(attention(*map(np.asarray, arrays)).out, np.float32)

        shape = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), jnp.float32)
        return OperationOutput(jax.pure_callback(run, shape, query, key, value, vmap_method="sequential"))


class Raises(VanillaAttention):
    """One whose export raises, and whose values are right."""

    @classmethod
    def get_impl_name(cls):
        return "raises"

    def forward_cpu(self, query, key, value, *, mask=None):
        if exporting:
            raise RuntimeError("no such target")
        return self.forward_native(query, key, value, mask=mask)


exporting: list[bool] = []


def suite(**attributes):
    return type("Suite", (OperationConformance,), attributes)()


@pytest.mark.slow
def test_a_callback_is_not_exported_and_nothing_else_is_wrong():
    subject = Subject(operation=OnTheHost, mode="prefill")
    assert subject.check([]).status is Status.RIGHT
    outcomes = {
        name: attempt(name, functools.partial(BEHAVIOURS[name], subject)) for name in ("export", "deterministic")
    }
    assert outcomes["export"].status is Status.NOT_RUN
    assert "host_callback" in outcomes["export"].detail
    assert outcomes["deterministic"].status is Status.RIGHT
    suite(operation=OnTheHost, mode="prefill", refuses=frozenset({"export"})).test_behaviour("export")


@pytest.mark.slow
def test_a_behaviour_that_is_refused_may_raise_and_must_not_be_right(monkeypatch):
    monkeypatch.setitem(globals(), "exporting", [True])
    suite(operation=Raises, refuses=frozenset({"export"})).test_behaviour("export")
    with pytest.raises(AssertionError, match="RuntimeError: no such target"):
        suite(operation=Raises).test_behaviour("export")
    monkeypatch.setitem(globals(), "exporting", [])
    with pytest.raises(AssertionError, match="export: is in `refuses`, but is right: take it out"):
        suite(operation=Raises, refuses=frozenset({"export"})).test_behaviour("export")


@pytest.mark.slow
def test_a_wrong_value_is_wrong_though_the_behaviour_is_refused():
    class Wrong(VanillaAttention):
        def forward_cpu(self, query, key, value, *, mask=None):
            return self.forward_native(query, key, value * 1.01, mask=mask)

    with pytest.raises(AssertionError, match="attention_outputs"):
        suite(operation=Wrong, refuses=frozenset({"eager"})).test_behaviour("eager")


def test_the_core_is_not_checked_in_place_of_a_kernel():
    with pytest.raises(NothingToCheckError, match="no installed plugin overrides forward_tpu for 'vanilla'"):
        suite(operation="vanilla", platform="tpu", interpret=True).subject()
    with pytest.raises(ValueError, match=r"metadata\.platform='tpu', but platform=None is checked"):
        suite(operation="attnops:vanilla", metadata=OperationMetadata(platform="tpu")).subject()


def test_of_slow_cases_each_nth_is_not_exhaustive():
    class Some(OperationConformance):
        operation = "flash"
        every: ClassVar = {"test_all_pairs": 4}

    given = []
    metafunc = SimpleNamespace(
        function=Some.test_all_pairs, fixturenames=["row"], parametrize=lambda name, cases, ids: given.extend(cases)
    )
    Some().pytest_generate_tests(metafunc)
    kept = [i for i, case in enumerate(given) if [mark.name for mark in case.marks] == ["slow"]]
    assert kept == list(range(0, len(given), 4))
    assert all({mark.name for mark in case.marks} == {"slow", "exhaustive"} for i, case in enumerate(given) if i % 4)


def test_without_pytest_the_suite_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest", None)
    monkeypatch.delitem(sys.modules, "attnops_testing.conformance")
    monkeypatch.delattr(attnops_testing, "conformance")
    with pytest.raises(ModuleNotFoundError, match="OperationConformance needs pytest: pip install 'attnops-testing"):
        attnops_testing.OperationConformance  # noqa: B018
