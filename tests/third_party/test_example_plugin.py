"""The README's plugin, `examples/plugin`, passes the README's command: from its sources, and as an installed wheel."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fast_compile import XLA_FLAGS
from typer.testing import CliRunner

import attnops_cli
from attnops import OperationRegistry
from attnops_testing.corners import CORNERS
from attnops_testing.runner import Status, Subject, attempt

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"
COMMAND = ("vanilla", "--platform", "tpu", "--interpret")


@pytest.fixture
def registered():
    before = OperationRegistry._registered[:]
    spec = importlib.util.spec_from_file_location("attnops_mykernel", PLUGIN / "attnops_mykernel.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["attnops_mykernel"] = module
    spec.loader.exec_module(module)
    OperationRegistry.register(module.MyAttention)
    yield
    del sys.modules["attnops_mykernel"]
    OperationRegistry._registered[:] = before
    OperationRegistry.refresh()


@pytest.mark.slow
def test_some_features_from_its_sources(registered):
    features = ("GQA + SlidingWindow", "bfloat16 + NaN behind a window", "odd lengths")
    options = (part for feature in features for part in ("--feature", feature))
    result = CliRunner(env={"COLUMNS": "200"}).invoke(attnops_cli.make_app(), ["check", *COMMAND, *options])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        "attnops-mykernel:vanilla: attnops_mykernel.MyAttention.forward_tpu on tpu, interpr"
    )
    assert result.stdout.endswith("2 right, 1 refused, 0 wrong, 0 not run\n")


@pytest.mark.slow
@pytest.mark.parametrize("corner", ["vmap of some arguments", "mesh"])
def test_corners_are_of_lengths_that_it_serves(registered, corner):
    subject = Subject(operation="vanilla", platform="tpu", interpret=True)
    outcome = attempt(corner, functools.partial(CORNERS[corner], subject))
    assert outcome.status is Status.RIGHT, outcome.detail


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """A function that runs the command where the plugin's wheel is installed."""
    folder = tmp_path_factory.mktemp("plugin")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, PLUGIN], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    path = os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS}

    def run(*options, **changes):
        command = [sys.executable, "-m", "attnops", "check", *COMMAND, *options]
        done = subprocess.run(command, capture_output=True, text=True, env=env | changes, cwd=folder, check=False)
        assert done.returncode == 2 or f"{folder / 'site' / 'attnops_mykernel.py'}:" in done.stdout
        return done

    return run


@pytest.mark.slow
def test_a_feature_on_its_wheel(check):
    done = check("--feature", "GQA + SlidingWindow")
    assert (done.returncode, "GQA + SlidingWindow  right" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.slow
def test_without_it_the_command_fails(check):
    done = check(ATTNOPS_DISABLE="attnops-mykernel")
    assert (done.returncode, "overrides forward_tpu for 'vanilla'" in done.stderr) == (2, True)
    assert "attnops-mykernel:vanilla is disabled: ATTNOPS_DISABLE names attnops-mykernel" in done.stderr


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_command_of_the_readme_on_its_wheel(check):
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ right, \d+ refused, 0 wrong, ", done.stdout.splitlines()[-1])
    right = {line.rsplit("right", 1)[0].strip() for line in done.stdout.splitlines() if line.rstrip().endswith("right")}
    features = {"Causal", "head_dim 256", "T < S", "negative scale"}
    assert features | {"layout BHTD", "deterministic", "vmap", "shard_map", "checkpoint"} <= right
