"""What `list`, `doctor` and `explain` say of faulty plugins, and how commands start on a machine without a TPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import attnops_cli
from attnops import OperationImpl, Reason
from attnops_cli import doctor

pytestmark = pytest.mark.usefixtures("core_alone")


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("not for you")

    __repr__ = __str__

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not for you")


FAULT = "acme.zeta:Zeta.unsupported returned None, but must return or yield attnops.Reason; return () for none"


def test_list_doctor_and_explain_name_a_fault(run: Any, register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register("forward_cpu", unsupported=lambda self, request: None)
    assert f"\nacme:zeta is faulty: {FAULT}\n" in run("list").stdout
    monkeypatch.setattr(doctor, "known_problems", lambda versions: [])
    result = run("doctor")
    assert result.exit_code == 1
    assert (
        f"- acme:zeta is faulty: {FAULT}\n    report it to its author; to disable it set ATTNOPS_DISABLE="
        in result.stdout
    )
    assert f"acme:zeta: can't serve it\n  - failed: {FAULT}\n" in run("explain", "--platform", "cpu").stdout
    named = run("explain", "zeta", "--platform", "cpu")
    assert named.exit_code == 1
    assert f"acme:zeta can't serve B1 T1024 S1024 H8 K8 D64 Dv64 float32 train on cpu: failed: {FAULT}" in named.stdout


def test_explain_prints_a_reason_whose_value_cannot_be_printed(run: Any, run_json: Any, register: Any) -> None:
    register("forward_cpu", unsupported=lambda self, request: [Reason("pages", Unprintable(), "must be even")])
    text = "<a Unprintable, whose printing raised RuntimeError>"
    assert f"pages={text}: must be even" in run("explain", "--platform", "cpu").stdout
    found = run_json("explain", "--platform", "cpu")
    (other,) = (other for other in found["others"] if other["name"] == "acme:zeta")
    assert other["reasons"] == [{"argument": "pages", "value": text, "limit": "must be even", "hint": ""}]


def test_list_shows_what_computes_attention(run: Any, run_json: Any, register: Any) -> None:
    register("forward_cpu", "forward_native", base=OperationImpl)
    rows = {tuple(line.split()[:2]) for line in run("list").stdout.splitlines() if line}
    assert {("zeta", "other"), ("vanilla", "attention"), ("sdpa", "attention")} <= rows
    found = run_json("list")
    assert {x["operation"]: x["computes"] for x in found if x["state"] == "loaded"}["zeta"] == "other"


def test_what_the_environment_disables_in_vain_is_reported(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNOPS_DISABLE", "vanilla")
    text = "ATTNOPS_DISABLE names 'vanilla', which is not an installed distribution with operations"
    assert text in run("list").stdout
    assert f"- {text}\n    write distribution:operation, attnops:vanilla" in run("doctor").stdout


@pytest.mark.slow
def test_show_in_an_ascii_locale() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    command = [sys.executable, "-m", "attnops", "show", "causal", "--T", "4", "--block-q", "2"]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode("ascii").splitlines()
    assert lines[1:5] == ["# . . .", "# # . .", "# # # .", "# # # #"]
    assert lines[-3:] == ["+ .", "# +", ". EMPTY: not visited   + PARTIAL: masked   # FULL: not masked"]


class TestWithoutTPU:
    @pytest.fixture
    def started(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
        """What is set in `jax.config`, on a machine with libtpu and without a TPU, whatever this one is."""
        updates: list[Any] = []
        monkeypatch.delenv("JAX_FORCE_TPU_INIT", raising=False)
        for name in attnops_cli.QUIET_LIBTPU:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(attnops_cli, "TPU_FILES", ("/dev/no-such-device*",))
        monkeypatch.setattr(
            attnops_cli.importlib.util, "find_spec", lambda name: object() if name == "libtpu" else None
        )
        monkeypatch.setattr(attnops_cli.importlib.metadata, "entry_points", lambda **_: ())
        monkeypatch.setattr(jax.config, "update", lambda *pair: updates.append(pair))
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        monkeypatch.setattr(type(jax.config), "jax_platforms", None, raising=False)
        yield updates
        monkeypatch.undo()
        assert jax.config.jax_platforms == platforms  # type: ignore[attr-defined]

    def test_jax_is_told_to_try_the_cpu_alone(self, started: list[Any]) -> None:
        attnops_cli.leave_libtpu_alone()
        assert started == [("jax_platforms", "cpu")]
        assert not set(attnops_cli.QUIET_LIBTPU) & set(os.environ)

    def test_where_another_platform_may_be_libtpu_is_quiet(
        self, started: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(attnops_cli.importlib.metadata, "entry_points", lambda **_: ("cuda",))
        monkeypatch.setenv("TPU_MIN_LOG_LEVEL", "0")
        for name in attnops_cli.QUIET_LIBTPU:
            if name != "TPU_MIN_LOG_LEVEL":
                monkeypatch.setenv(name, "")  # so that it is restored
                monkeypatch.delenv(name)
        attnops_cli.leave_libtpu_alone()
        assert started == []
        assert {name: os.environ[name] for name in attnops_cli.QUIET_LIBTPU} == attnops_cli.QUIET_LIBTPU | {
            "TPU_MIN_LOG_LEVEL": "0"
        }

    @pytest.mark.parametrize("case", ["a TPU", "no libtpu", "platforms set", "forced"])
    def test_otherwise_nothing_is_touched(
        self, started: list[Any], monkeypatch: pytest.MonkeyPatch, case: str, tmp_path: Any
    ) -> None:
        if case == "a TPU":
            (tmp_path / "accel0").touch()
            monkeypatch.setattr(attnops_cli, "TPU_FILES", (str(tmp_path / "accel*"),))
        elif case == "no libtpu":
            monkeypatch.setattr(attnops_cli.importlib.util, "find_spec", lambda name: None)
        elif case == "platforms set":
            monkeypatch.setattr(type(jax.config), "jax_platforms", "tpu")
        else:
            monkeypatch.setenv("JAX_FORCE_TPU_INIT", "1")
        attnops_cli.leave_libtpu_alone()
        assert started == []
        assert not set(attnops_cli.QUIET_LIBTPU) & set(os.environ)
