"""The suite's table, and the devices that it makes for meshes."""

import threading
from types import SimpleNamespace

import pytest

from attnops_testing import OperationConformance, limit, suite


@pytest.mark.parametrize(
    ("number", "flags", "updates"),
    [(-1, "", [("jax_num_cpu_devices", 4)]), (2, "", []), (-1, "--xla_force_host_platform_device_count=2", [])],
    ids=["unset", "set", "flags"],
)
def test_the_cpu_is_four_devices_unless_the_user_says_otherwise(monkeypatch, number, flags, updates):
    found = []
    config = SimpleNamespace(jax_num_cpu_devices=number, update=lambda *pair: found.append(pair))
    monkeypatch.setattr(suite, "jax", SimpleNamespace(config=config))
    monkeypatch.setenv("XLA_FLAGS", flags)
    suite.make_cpu_devices()
    assert found == updates


def test_a_part_of_the_suite_is_a_test_of_pytest():
    tests = {name for name in dir(OperationConformance) if name.startswith("test_")}
    assert tests == {f"test_{name}" for name in suite.SUITE}
    for name in suite.SUITE:
        assert getattr(OperationConformance, f"test_{name}").__name__ == f"test_{name}"


def test_what_a_person_debugs_is_not_ended(monkeypatch):
    ended, asked = [], threading.Event()
    monkeypatch.setattr(limit.os, "_exit", ended.append)
    for name in ("/lib/pdb.py", "/lib/it.py"):
        asked.clear()
        monkeypatch.setattr(limit.traceback, "format_stack", lambda frame, name=name: [asked.set() or name])
        with limit.limited("it", 0.01, lambda outcome: ended.append(outcome.traceback)):
            asked.wait()
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert ended == ["/lib/it.py", 1]


def test_a_group_that_is_refused_names_every_case():
    part = suite.SuitePart(lambda: ["one"], lambda subject, case: [suite.attempt(case, lambda: None)], group="caches")
    assert [x.detail for x in part.check(None, "one", {"caches"})] == ["is in `refuses`, but is right: take it out"]
    assert [x.status for x in part.check(None, "one", {"other"})] == ["right"]
