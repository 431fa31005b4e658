"""The command line: what each command prints, and its exit status."""

from __future__ import annotations

import builtins
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from typer.testing import CliRunner, Result

import attnops
from attnops import OperationMetadata, OperationRegistry, cli
from attnops.cli import doctor
from attnops.cli.known_bad import known_problems
from attnops.cli.masks import parse_mask, parse_shape
from attnops.masks import Causal, Dense
from attnops.operations.vanilla import VanillaAttention

CORE = {"attnops:auto", "attnops:sdpa", "attnops:vanilla"}


@pytest.fixture(autouse=True)
def _core_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whatever else is installed here is not what is tested."""
    monkeypatch.setenv("ATTNOPS_NO_AUTOLOAD", "1")
    registered = OperationRegistry._registered[:]
    yield
    OperationRegistry._registered[:] = registered
    monkeypatch.undo()
    OperationRegistry.refresh()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.make_app(), list(arguments))


def run_json(*arguments: str, status: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def register(**body: Any) -> None:
    """Register an operation "zeta" of a distribution "acme"."""
    name = {"get_impl_name": classmethod(lambda cls: "zeta"), "__module__": "acme.zeta"}
    OperationRegistry.register(type("Zeta", (VanillaAttention,), name | body))


def forward(self: Any, query: Any, key: Any, value: Any) -> Any:
    """A forward without options."""


def core_of(plugins: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {plugin["name"]: plugin for plugin in plugins if plugin["distribution"] == "attnops"}


# main


def test_every_command_is_there() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in cli.COMMANDS:
        assert f" {command} " in result.output
        assert run(command, "--help").exit_code == 0


def test_version_is_printed() -> None:
    assert (run("--version").exit_code, run("--version").output) == (0, f"{attnops.__version__}\n")


def test_without_its_libraries_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without_typer(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_typer)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    # A string as the status is printed to stderr, and the status is 1.
    assert caught.value.code == "The attnops command needs typer, which is not installed: pip install 'attnops[cli]'"


def test_python_m_attnops_and_what_import_needs() -> None:
    code = (
        "import sys, attnops; "
        "loaded = [m for m in sys.modules if m.startswith(('typer', 'rich', 'attnops.cli', 'attnops.operations'))]; "
        "assert not loaded, loaded; sys.argv = ['attnops', 'list', '--no-load']; "
        "import runpy; runpy.run_module('attnops', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].split() == [
        "operation",
        "computes",
        "platforms",
        "distribution",
        "version",
        "state",
    ]
    assert f"vanilla ? ? attnops {attnops.__version__} discovered" in " ".join(done.stdout.split())


# list


def test_list_shows_what_is_known_without_an_import() -> None:
    found = core_of(run_json("list", "--no-load"))
    assert set(found) >= CORE
    assert found["attnops:vanilla"] == {
        "operation": "vanilla",
        "platforms": None,
        "computes": None,
        "distribution": "attnops",
        "version": attnops.__version__,
        "state": "discovered",
        "name": "attnops:vanilla",
        "target": "attnops.operations.vanilla:VanillaAttention",
        "priority": None,
        "cause": "",
        "traceback": "",
    }


def test_list_shows_what_serves_which_platform() -> None:
    register(forward_gpu=forward, priority=3)
    found = {plugin["name"]: plugin for plugin in run_json("list")}
    assert found["attnops:vanilla"]["state"] == "loaded"
    assert found["attnops:vanilla"]["platforms"] == ["any"]
    assert found["attnops:sdpa"]["platforms"] == ["cpu", "cuda", "rocm", "tpu", "tt"]
    assert (found["acme:zeta"]["platforms"], found["acme:zeta"]["priority"]) == (["cuda", "rocm"], 3)

    table = [line.split() for line in run("list").output.splitlines()]
    assert ["zeta", "attention", "cuda,", "rocm", "acme", "loaded"] in table


def test_list_does_not_count_what_is_the_cores() -> None:
    sdpa = OperationRegistry.get("sdpa", "cpu")
    name = {"get_impl_name": classmethod(lambda cls: "sdpa"), "__module__": "acme.sdpa", "forward_tpu": forward}
    OperationRegistry.register(type("Sdpa", (sdpa,), name))
    found = {plugin["name"]: plugin for plugin in run_json("list")}
    assert found["acme:sdpa"]["platforms"] == ["tpu"]


def test_list_gives_the_cause_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNOPS_DISABLE", "attnops:sdpa")
    result = run("list")
    assert result.exit_code == 0
    assert "attnops:sdpa is disabled: ATTNOPS_DISABLE names attnops:sdpa\n" in result.output
    assert core_of(run_json("list"))["attnops:sdpa"]["cause"] == "ATTNOPS_DISABLE names attnops:sdpa"


# explain


def test_explain_has_sensible_defaults() -> None:
    found = run_json("explain", "vanilla", "-T", "32", "-H", "6", "-D", "80")
    shape = ("batch", "query_length", "key_length", "heads", "kv_heads", "head_dim", "value_head_dim")
    assert [found["request"][name] for name in shape] == [1, 32, 32, 6, 6, 80, 80]
    assert (found["request"]["mode"], found["request"]["dtypes"]) == ("train", ["float32"] * 3)
    assert (found["chosen"]["name"], found["chosen"]["forward"]) == ("attnops:vanilla", "native")
    assert run_json("explain", "--query-length", "1")["request"]["mode"] == "decode"


def test_explain_knows_every_option() -> None:
    found = run_json(
        "explain", "vanilla", "--batch", "2", "--query-length", "16", "--key-length", "24", "--heads", "4",
        "--kv-heads", "2", "--head-dim", "8", "--value-head-dim", "12", "--dtype", "bfloat16", "--platform", "tpu",
        "--mode", "prefill", "--mask", "causal", "--bias", "2x1x16x24", "--soft-cap", "30", "--scale", "0.5",
        "--sinks", "--dropout", "0.25", "--return-lse", "--return-weights", "--interpret",
    )  # fmt: skip
    expected = {
        "platform": "tpu", "mode": "prefill", "interpret": True, "batch": 2, "query_length": 16, "key_length": 24,
        "heads": 4, "kv_heads": 2, "head_dim": 8, "value_head_dim": 12, "dtypes": ["bfloat16"] * 3,
        "mask_kinds": ["Causal"], "bias_kind": "array", "bias_shape": [2, 1, 16, 24], "bias_dtype": "bfloat16",
        "softmax_scale": 0.5, "logits_soft_cap": 30.0, "sinks": True, "dropout_prob": 0.25, "return_lse": True,
        "return_weights": True,
    }  # fmt: skip
    assert {name: found["request"][name] for name in expected} == expected


def test_explain_asks_what_the_library_asks() -> None:
    q = jax.numpy.zeros((1, 64, 8, 64))
    operation = OperationRegistry.create("sdpa", OperationMetadata(platform="cuda"))
    expected = str(attnops.explain(operation.request(q, q, q, mask=Causal()), "sdpa"))
    result = run("explain", "sdpa", "--query-length", "64", "--platform", "cuda", "--mask", "causal")
    assert (result.exit_code, result.output) == (0, expected + "\n")
    assert "although dtype=float32: must be one of ['bfloat16', 'float16']" in result.output


def test_explain_makes_no_array() -> None:
    """A million tokens, whose mask alone would be a terabyte."""
    found = run_json("explain", "--query-length", str(2**20), "--mask", f"1x1x{2**20}x{2**20}")
    assert found["request"]["mask_shape"] == [1, 1, 2**20, 2**20]


def test_explain_gives_every_reason_of_a_refusal() -> None:
    arguments = ("explain", "sdpa", "--sinks", "--soft-cap", "30", "--platform", "cpu", "--strict")
    result = run(*arguments)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[0].startswith("attnops:sdpa can't serve B1 T1024 S1024 H8 K8 D64 Dv64 float32 train on cpu with ")
    assert lines[1:3] == [
        "  - logits_soft_cap=30.0: forward_cpu has no such option",
        "  - sinks=True: forward_cpu has no such option",
    ]
    assert "attnops:vanilla: could serve it" in lines[3:]

    found = run_json(*arguments, status=1)
    assert (found["chosen"], found["error"]) == (None, lines[0])
    assert [(reason["argument"], reason["value"]) for reason in found["reasons"]] == [
        ("logits_soft_cap", "30.0"),
        ("sinks", "True"),
    ]
    assert "attnops:vanilla" in {other["name"] for other in found["others"] if other["serves"]}


def test_explain_keeps_what_plugins_print_out_of_its_output() -> None:
    register(preference=classmethod(lambda cls, request: print("hello")))
    assert run_json("explain", "vanilla")["chosen"]["name"] == "attnops:vanilla"
    assert run("explain", "vanilla").stderr == "hello\n"


def test_explain_gives_the_reasons_of_the_others() -> None:
    register(forward_cpu=forward)
    result = run("explain", "vanilla", "--mask", "causal", "--return-lse")
    assert "\nacme:zeta: can't serve it\n  - mask=" in result.output
    assert "\n  - return_lse=True: forward_cpu has no such option" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["vanila"], "impl_name='vanila' is not an installed operation; installed are "),
        (["vanila"], "did you mean 'vanilla'"),
        (["--platform", "abacus"], "platform='abacus' is unknown; use one of "),
        (["--mode", "idle"], "mode='idle' is not a runtime mode; use one of "),
        (["--dtype", "float33"], "dtype='float33' is unknown; use float32, bfloat16 or float16"),
        (["--dtype", "float64"], "dtype='float64', but attention takes float32, bfloat16 and float16"),
        (["--dtype", "int8"], "query has dtype int8, but must be floating-point; cast it"),
        (["--heads", "8", "--kv-heads", "3"], "query has 8 heads and key has 3: the kv heads must divide the heads"),
        (["--mask", "caussal"], "mask='caussal' is unknown; write an expression of Causal"),
        (["--mask", "7x1024"], "mask has shape (7, 1024), but must be 4-D"),
        (["--bias", "wide"], "bias='wide' is no shape; write it as 4x1x128x128"),
        (["--dropout", "1.5"], "dropout_prob=1.5 must lie in [0, 1); use 0.0 for no dropout"),
        (["--soft-cap", "-1"], "logits_soft_cap=-1.0 must be positive, from"),
    ],
)
def test_explain_prints_an_error_as_a_sentence(arguments: list[str], sentence: str) -> None:
    result = run("explain", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("attnops: ")
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_masks_are_read_as_expressions() -> None:
    assert parse_shape("bias", "(4, 1,8)") == parse_shape("bias", "4x1x8") == (4, 1, 8)
    assert parse_mask("causal") == parse_mask("Causal()") == Causal()
    assert parse_mask("causal(offset=3)") == parse_mask("Causal(3)") == Causal(3)
    assert parse_mask("Causal((2,))").offset.shape == (2,)
    assert parse_mask("1x1x2x3").shape == (1, 1, 2, 3)
    assert isinstance(parse_mask("Dense((1, 1, 2, 3))"), Dense)
    for text in ("Causal(", "__import__('os')", "Causal(print)", "1 + 2", "Causal(1, 2, 3, 4)"):
        with pytest.raises(ValueError, match=r"^mask="):
            parse_mask(text)


# doctor


def test_doctor_on_a_sound_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DEVICE_FILES", {})
    found = run_json("doctor")
    assert found["problems"] == [dataclasses.asdict(problem) for problem in known_problems(found["versions"])]
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["attnops"] == attnops.__version__
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (found["backend"], found["devices"]) == ("cpu", [str(device) for device in jax.devices()])
    assert found["requirement_checker"] == "packaging.requirements"
    assert {plugin["state"] for plugin in core_of(found["installed"]).values()} == {"loaded"}
    monkeypatch.setattr(doctor, "known_problems", lambda versions: [])
    assert run("doctor").exit_code == 0
    assert run("doctor").output.endswith("Nothing is wrong.\n")


def test_doctor_names_ambiguity_once() -> None:
    for module in ("acme.zeta", "other.zeta"):
        register(forward_gpu=forward, __module__=module, get_impl_name=classmethod(lambda cls: "vanilla"))
    found = run_json("doctor", status=1)
    assert [problem["what"] for problem in found["problems"]] == [
        "'vanilla' on cuda is served by acme:vanilla and other:vanilla with the same priority=0; ask for one of them "
        "by that name, or switch one off with ATTNOPS_DISABLE (likewise on rocm)"
    ]
    result = run("doctor")
    assert result.exit_code == 1
    assert "\nWrong\n- 'vanilla' on cuda is served by acme:vanilla and other:vanilla" in result.output
    assert "'vanilla' on cuda is served by acme:vanilla and other:vanilla" in run("list").output


def test_a_distribution_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "acme_nameless-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[attnops.operations]\nzeta = acme:Zeta\n")
    monkeypatch.syspath_prepend(tmp_path)
    result = run("list")
    assert result.exit_code == 0
    assert "acme_nameless-1.0.dist-info can't be read, so its operations are missing" in result.output
    (problem,) = run_json("doctor", status=1)["problems"]
    assert (result.output.splitlines()[-1], problem["install"]) == (
        problem["what"],
        "pip uninstall it and install it again",
    )


def test_doctor_says_that_jax_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_start() -> None:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "default_backend", cannot_start)
    found = run_json("doctor", status=1)
    assert [problem["what"] for problem in found["problems"]] == [
        "JAX can't start: Unable to initialize backend 'cuda'"
    ]
    assert (found["backend"], found["devices"]) == ("", [])


def test_doctor_says_that_requirements_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attnops.dispatch.plugins, "requirement_parser", lambda: attnops.dispatch.plugins._Unchecked)
    found = run_json("doctor", status=1)
    assert {"what": "what distributions require is not checked", "install": "pip install packaging"} in found[
        "problems"
    ]
    assert found["requirement_checker"] == ""


class Device:
    """A device, as far as its platform goes."""

    client = None

    def __init__(self, platform: str) -> None:
        self.platform = platform


@pytest.mark.parametrize(
    ("devices", "installed", "commands"),
    [
        (["cpu"], {"attnops"}, []),
        (["cuda"], {"attnops"}, ["pip install attnops-triton"]),
        (["rocm", "rocm"], {"attnops", "attnops-triton"}, ["pip install attnops-ring"]),
        (["tpu"] * 4, {"attnops"}, ["pip install attnops-tpu", "pip install attnops-ring"]),
        (["tpu"], {"attnops", "attnops-tpu"}, []),
    ],
)
def test_doctor_suggests_what_serves_this_machine(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], installed: set[str], commands: list[str]
) -> None:
    monkeypatch.setattr(doctor, "DEVICE_FILES", {})
    found = doctor._suggestions([Device(platform) for platform in devices], installed)
    assert [suggestion.install for suggestion in found] == commands


def test_doctor_sees_an_accelerator_that_jax_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    files = {
        str(tmp_path / "nvidiactl"): ("cuda", "an NVIDIA GPU", "pip install 'jax[cuda13]'"),
        "/absent": ("tpu",) * 3,
    }
    monkeypatch.setattr(doctor, "DEVICE_FILES", files)
    (found,) = doctor._suggestions([Device("cpu")], {"attnops"})
    assert (found.what, found.install) == (
        "this machine has an NVIDIA GPU, which JAX does not use",
        "pip install 'jax[cuda13]'",
    )
    assert [s.install for s in doctor._suggestions([Device("cuda")], {"attnops-triton"})] == []


SOUND = {"python": "3.12.4", "jax": "0.11.2", "jaxlib": "0.11.2", "triton": "3.9.0", "jax-triton": "0.4.1"}


@pytest.mark.parametrize(
    ("versions", "problem", "install"),
    [
        ({}, None, None),
        ({"jax": "0.12.0.1", "jaxlib": "0.12.0.1"},
         "jax 0.12.0.1 and jax-triton 0.4.1 do not work together: every traced triton_call fails",
         "pip install 'jax>=0.11.1,<0.12'"),
        ({"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "jax-triton": "0.4.2"}, None, None),
        ({"jax": "0.11.0"}, "python 3.12.4, jax 0.11.0 and jax-triton 0.4.1 do not work together: jax-triton 0.4 needs",
         "pip install 'jax>=0.11.1,<0.12'"),
        ({"python": "3.11.7"}, "python 3.11.7 and jax-triton 0.4.1 do not work together: on this Python",
         "pip install jax-triton==0.3.1"),
        ({"python": "3.11.7", "jax": "0.10.2", "jaxlib": "0.10.2", "jax-triton": "0.3.1"}, None, None),
        ({"triton": "3.6.0"}, "triton 3.6.0 and jax-triton 0.4.1 do not work together: jax-triton 0.4 can't lower",
         "pip install 'triton>=3.7', or pip install jax-triton==0.3.1"),
        ({"triton": "3.6.0", "jax-triton": "0.3.1"}, None, None),
        ({"jaxlib": "0.10.2"}, "jax 0.11.2 and jaxlib 0.10.2 do not work together: the minor versions must be equal",
         "pip install 'jaxlib==0.11.2'"),
        ({"jax-cuda13-plugin": "0.10.0"}, "jaxlib 0.11.2 and jax-cuda13-plugin 0.10.0 do not work together",
         "pip install 'jax-cuda13-plugin==0.11.2'"),
    ],
)  # fmt: skip
def test_known_bad_combinations(versions: dict[str, str], problem: str | None, install: str | None) -> None:
    found = known_problems(SOUND | versions)
    if problem is None:
        assert found == []
    else:
        (only,) = found
        assert only.what.startswith(problem)
        assert only.install == install
