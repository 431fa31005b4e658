"""Plugins that `attnops new` writes, installed next to the core's wheel: `pip install -e . && pytest` passes."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from fast_compile import XLA_FLAGS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that runs a program in an environment with the core's wheel and the libraries of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST_", "ATTNOPS_"))}
    env |= {
        "JAX_PLATFORMS": "cpu",
        "COLUMNS": "200",
        "XLA_FLAGS": XLA_FLAGS,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "ATTNOPS_DISABLE": "attnops-cpu,attnops-ring,attnops-splash,attnops-tpu,attnops-triton",
    }

    def run(program, *arguments, cwd=folder, **changes):
        command = [folder / "bin" / program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=env | changes, cwd=cwd, check=False)

    plugins = [str(ROOT / "plugins" / name) for name in ("attnops_caches", "attnops_cli", "attnops_testing")]
    install(run, "--no-deps", str(ROOT), *plugins)
    return run


def install(run, *arguments, cwd=None):
    options = ("--quiet", "--disable-pip-version-check", "install", "--no-build-isolation", "--ignore-installed")
    done = run("python", "-m", "pip", *options, *arguments, **({} if cwd is None else {"cwd": cwd}))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "platform", "options"),
    [
        ("flash", "cpu", ("--operation", "flash")),
        ("ffi", "cpu", ("--ffi",)),
        *(pytest.param(name, name, (), marks=pytest.mark.exhaustive) for name in ("tpu", "cuda")),
    ],
    ids=["cpu", "ffi", "tpu", "cuda"],
)
def test_a_new_plugin_is_green(run, tmp_path, kind, platform, options):
    name = f"attnops-acme-{kind}"
    operation = "flash" if "flash" in options else f"acme_{kind}"
    made = run("attnops", "new", name, "--platform", platform, *options, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    folder = tmp_path / name
    install(run, "--no-deps", "-e", str(folder))

    listed = run("attnops", "list").stdout
    assert re.search(rf"^{operation} +attention +{platform} +{name} +0\.1\.0 +loaded *$", listed, re.M)
    done = run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d\d passed, \d+ deselected", done.stdout, re.M)

    if "--ffi" in options:
        # The rest of what `check` runs is what plain pytest ran; see test_planted_faults.py.
        behaviours = ("--feature", "vmap", "--feature", "shard_map", "--feature", "export")
        done = run("attnops", "check", f"{name}:{operation}", "--platform", "cpu", *behaviours)
        assert (done.returncode, " 0 wrong, " in done.stdout) == (0, True), done.stdout + done.stderr
        assert re.search(r"^(vmap|shard_map) +right", done.stdout, re.M)
        assert re.search(r"^export +refused +exportable=False", done.stdout, re.M)
        done = run(
            "attnops", "check", f"{name}:{operation}", "--feature", "GQA", "--shrink", "0", CXX="no-such-compiler"
        )
        said = f"RuntimeError: {name} needs a C++ compiler, and no-such-compiler is missing: install g++ or set CXX"
        assert (done.returncode, said in done.stdout) == (1, True), done.stdout + done.stderr
        return
    kernel = folder / "src" / f"attnops_acme_{kind}" / "kernel.py"
    kernel.write_text(kernel.read_text().replace(">= band[0]", "> band[0]"))  # without the diagonal
    done = run("attnops", "check", f"{name}:{operation}", "--platform", platform, "--interpret",
               "--feature", "Causal", "--shrink", "0")  # fmt: skip
    assert (done.returncode, "\nCausal   wrong " in done.stdout) == (1, True), done.stdout + done.stderr
