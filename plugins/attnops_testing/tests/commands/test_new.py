"""`attnops new`: what it writes, and what it refuses. `third_party/test_new_plugin.py` installs what it writes."""

import contextlib
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from attnops_testing.commands.new import BASES, PLATFORMS, substitutions

ROOT = Path(__file__).parents[4]
CHOICES = [(kind, operation) for kind in PLATFORMS for operation in (None, *BASES)]


def options(kind):
    """The options of a kernel of one of `PLATFORMS`."""
    return ("--platform", PLATFORMS[kind].platform, *(["--ffi"] if kind == "ffi" else []))


@pytest.fixture
def new(run, tmp_path):
    """A function that runs the command in an empty folder, and returns its result and the plugin's folder."""

    def new(name, *options):
        return run("new", name, "--folder", str(tmp_path), *options), tmp_path / name

    return new


@pytest.mark.parametrize(("kind", "operation"), CHOICES)
def test_files_are_complete_and_well_formed(new, kind, operation):
    platform = PLATFORMS[kind].platform
    chosen = () if operation is None else ("--operation", operation)
    result, folder = new("attnops-acme.fast", *options(kind), *chosen)
    assert result.exit_code == 0, result.output
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert set(files) == {
        "pyproject.toml", "README.md", "LICENSE", ".gitignore", ".github/workflows/test.yml",
        "src/attnops_acme_fast/__init__.py", "src/attnops_acme_fast/operation.py", "src/attnops_acme_fast/kernel.py",
        "src/attnops_acme_fast/py.typed", "tests/test_conformance.py",
        *(["src/attnops_acme_fast/kernel.cpp"] if kind == "ffi" else []),
    }  # fmt: skip
    project = tomllib.loads(files["pyproject.toml"].read_text())["project"]
    name = operation or "acme_fast"
    assert project["entry-points"] == {"attnops.operations": {name: "attnops_acme_fast:AcmeFastAttention"}}
    assert files["LICENSE"].read_bytes() == (ROOT / "LICENSE").read_bytes()
    source = files["src/attnops_acme_fast/operation.py"].read_text()
    assert (f"def forward_{platform}(" in source, 'return "acme_fast"' in source) == (True, operation is None)
    unreplaced = [name for name, path in files.items() if "$" in path.read_text().replace("${{ matrix.python }}", "")]
    assert unreplaced == []
    assert f"pytest\n  attnops check attnops-acme.fast:{name} --platform {platform}" in result.stdout


def test_code_is_formatted_as_this_repository(new, tmp_path):
    for kind in PLATFORMS:
        new(f"attnops-acme-{kind}", *options(kind))
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["--select", "E,F,I,B,UP,RUF", "--ignore", "RUF001,RUF002"]
    for arguments in (["check", *rules], ["format", "--check"]):
        done = subprocess.run(
            [*ruff, *arguments, "--isolated", "--line-length", "120", "."], capture_output=True, text=True,
            check=False,
            cwd=tmp_path,  # where no folder is first-party
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("attnops-a b",), "can't be a distribution's"),
        (("../attnops-x",), "can't be a distribution's"),
        (("attnops-",), "can't be a distribution's"),
        (("attnops",), "installed already; choose another"),
        (("json",), "installed already; choose another"),
        (("class",), "can't import; try attnops-class"),
        (("3d",), "can't import; try attnops-3d"),
        (("attnops-x", "--operation", "a:b"), "operation='a:b' must be letters"),
        (("attnops-3d",), "operation='3d' must be letters"),
        (("attnops-x", "--operation", "auto"), "picks among operations"),
        (("attnops-x", "--operation", "ring"), "'ring' is an operation of attnops-ring"),
        (("attnops-x", "--platform", "abacus"), "abacus"),
        (("attnops-x", "--ffi"), "--ffi is given, but --platform is tpu: add --platform cpu, or leave --ffi out"),
    ],
)
def test_names_that_no_plugin_can_have_are_refused(new, tmp_path, arguments, text):
    result, _ = new(*arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.output.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_as_it_is(new, tmp_path):
    (tmp_path / "attnops-x").mkdir()
    (tmp_path / "attnops-x" / "mine").touch()
    result, folder = new("attnops-x")
    assert (result.exit_code, [path.name for path in folder.iterdir()]) == (2, ["mine"])
    assert f"{folder} exists: choose another name, state another --folder, or move it away" in result.stderr


def test_a_folder_that_is_missing_is_refused(run, tmp_path):
    result = run("new", "attnops-x", "--folder", str(tmp_path / "none"))
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "is not a folder: create it first" in result.stderr


def test_nothing_is_left_where_writing_fails(new, tmp_path, monkeypatch):
    monkeypatch.setitem(PLATFORMS, "cpu", PLATFORMS["cpu"])
    monkeypatch.setattr(
        "attnops_testing.commands.new.FILES", {"pyproject.toml.tmpl": "pyproject.toml", "none.tmpl": "none"}
    )
    result, _ = new("attnops-x", "--platform", "cpu")
    assert (result.exit_code, "none.tmpl" in result.stderr, list(tmp_path.iterdir())) == (2, True, [])


def test_names_are_derived():
    values = substitutions("attnops-Flash_Attention", "cpu")
    assert (values["package"], values["operation"]) == ("attnops_flash_attention", "flash_attention")
    assert values["class_name"] == "FlashAttention"


def on_a_gpu():
    """A context in which Pallas compiles for an H100; since JAX 0.12 it asks for the GPU."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@pytest.mark.parametrize(
    ("platform", "call"), [("tpu", "tpu_custom_call"), ("cuda", "__gpu$xla.gpu.triton")], ids=["tpu", "cuda"]
)
@pytest.mark.tier(slow=["cuda"])
def test_kernels_are_lowered_for_their_platform(new, platform, call, monkeypatch):
    _, folder = new(f"attnops-acme-{platform}", "--platform", platform)
    monkeypatch.syspath_prepend(str(folder / "src"))
    assert importlib.util.find_spec(f"attnops_acme_{platform}").origin.startswith(str(folder))
    kernel = importlib.import_module(f"attnops_acme_{platform}.kernel")
    shape = jax.ShapeDtypeStruct((1, 256, 4, 64), "bfloat16")
    function = jax.jit(lambda q, k, v: kernel.attend(q, k, v, (0, None), 0.125, False))
    checks = [jax.export.DisabledSafetyCheck.custom_call(call)]
    with on_a_gpu():
        exported = jax.export.export(function, platforms=[platform], disabled_checks=checks)(shape, shape, shape)
    assert f"@{call}" in exported.mlir_module()
    for name in [name for name in sys.modules if name.startswith("attnops_acme")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "operation", "expected"),
    [
        ("attnops-4bit", "fourbit", "My4bitAttention"),
        ("attnops-flash", "flash", "MyFlashAttention"),
        ("attnops-acme", None, "AcmeAttention"),
    ],
)
def test_the_class_has_a_name_of_its_own(name, operation, expected):
    found = substitutions(name, "cpu", operation)
    assert found["class_name"] == expected
    assert found["class_name"].isidentifier()
    assert found["class_name"] != found["base"]
