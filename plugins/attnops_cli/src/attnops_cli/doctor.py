"""`attnops doctor`: what is installed, what is wrong with it, and what to install."""

from __future__ import annotations

import dataclasses
import platform as host
from pathlib import Path
from typing import Annotated, Final

import importlib_metadata
import jax
import typer

from attnops.dispatch import plugins
from attnops.dispatch.platforms import canonicalize_platform, platform_of
from attnops.dispatch.plugins import CORE, Plugin, State
from attnops_cli.asked import find_chosen, find_details, find_reasons
from attnops_cli.installed import FOR_PLATFORM, Installed, describe, find
from attnops_cli.known_bad import Problem, known_problems
from attnops_cli.noise import find_devices
from attnops_cli.output import fail, print_heading, print_json, print_table, print_text

# The distributions whose versions matter; JAX's plugins are looked up by their entry points.
SHOWN: Final = ("attnops", "jax", "jaxlib", "libtpu", "triton", "numpy")

FOR_SEVERAL_DEVICES: Final = "attnops-ring"

# By platform, the distribution whose kernels are examined if it is installed; kernels for CPUs are not suggested.
KERNELS: Final = FOR_PLATFORM | {"cpu": "attnops-cpu"}

# By platform: a prefix of the names of JAX's distributions for it, and what installs them.
JAX_PLUGINS: Final = {
    "cuda": ("jax-cuda", "pip install 'jax[cuda13]'"),
    "rocm": ("jax-rocm", "pip install 'jax[rocm7-local]'"),
    "tpu": ("libtpu", "pip install 'jax[tpu]'"),
}

# Device files of accelerators: JAX's platform for them, and what they are.
DEVICE_FILES: Final = {"/dev/nvidiactl": ("cuda", "an NVIDIA GPU"), "/dev/accel0": ("tpu", "a TPU")}


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of `doctor`.

    Attributes:
        versions: versions by distribution, "python" first.
        backend: JAX's default backend; empty if JAX can't start.
        devices: JAX's devices.
        installed: the distributions, each imported.
        kernels: lines that say what serves a long call on this machine, or on the given platform, and how.
        problems: what is wrong.
        suggestions: what could be installed in addition.
    """

    versions: dict[str, str]
    backend: str
    devices: list[str]
    installed: Installed
    kernels: list[str]
    problems: list[Problem]
    suggestions: list[Problem]


def command(
    platform: Annotated[
        str | None, typer.Option(help="cpu, cuda, rocm, gpu, tpu or tt.", show_default="this machine's")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show tracebacks, and what libraries print.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every field.")] = False,
) -> None:
    """Examine the installation: versions, devices, each distribution, and what to install.

    With --platform it answers for a machine of another platform. Imports every distribution, one by one. Exits with 1
    if something is wrong.
    """
    find_devices()
    try:
        report = examine(verbose, None if platform is None else canonicalize_platform(platform))
    except ValueError as error:
        fail(error, 2)
    if json:
        described = [describe(plugin, report.installed.plugins) for plugin in report.installed.plugins]
        fields = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
        for name in ("problems", "suggestions"):
            fields[name] = [dataclasses.asdict(problem) for problem in fields[name]]
        print_json(fields | {"installed": described})
    else:
        _print(report, verbose)
    raise typer.Exit(int(bool(report.problems)))


def examine(verbose: bool = False, platform: str | None = None) -> Report:
    """Collect the report for a platform; None for the platforms of this machine's devices."""
    versions = _versions()
    problems = known_problems(versions)
    backend, devices = "", []
    try:
        backend, devices = jax.default_backend(), jax.devices()
    except RuntimeError as error:
        problems.append(Problem(f"JAX can't start: {error}", "set JAX_PLATFORMS, or install what it names"))
    installed = find(True, verbose)
    problems += _plugin_problems(installed.plugins)
    problems += [
        Problem(f"{name} is faulty: {fault}", f"report it to its author; to disable it set ATTNOPS_DISABLE={name}")
        for name, fault in installed.faults
    ]
    problems += [Problem(*trouble) for trouble in installed.troubles]
    problems += [Problem(text, "pip uninstall or disable one of them") for text in installed.ambiguous]
    platforms = [*dict.fromkeys(map(platform_of, devices))] if platform is None else [platform]
    problems += _machine_problems(platforms, installed.plugins)
    kernels = _kernels(platforms, installed.plugins)
    names = {plugin.distribution for plugin in installed.plugins}
    suggestions = _suggestions(platforms, 0 if platform else len(devices), names | versions.keys())
    return Report(versions, backend, [str(d) for d in devices], installed, kernels, problems, suggestions)


def _versions() -> dict[str, str]:
    names = list(SHOWN)
    names += [str(entry.dist.name) for entry in importlib_metadata.entry_points(group="jax_plugins") if entry.dist]
    versions = {"python": host.python_version()}
    for name in names:
        try:
            versions[plugins.normalize(name)] = importlib_metadata.version(name)
        except importlib_metadata.PackageNotFoundError:
            continue
    return versions


def _plugin_problems(operations: tuple[Plugin, ...]) -> list[Problem]:
    """One problem for each distribution and cause, with the names of all operations that have it."""
    broken: dict[tuple[str, str, str], list[str]] = {}
    for plugin in operations:
        if plugin.state in (State.FAILED, State.INCOMPATIBLE):
            broken.setdefault((plugin.distribution, plugin.state, plugin.cause), []).append(plugin.name)
    return [
        Problem(
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {state}: {cause}",
            # Upgrade both, since either may be too old for the other.
            f"pip install --upgrade {CORE} {distribution}; to disable it pip uninstall {distribution}, or set "
            f"ATTNOPS_DISABLE={distribution}"
            if distribution != CORE
            else f"pip install --force-reinstall {CORE}",
        )
        for (distribution, state, cause), names in broken.items()
    ]


def _machine_problems(platforms: list[str], operations: tuple[Plugin, ...]) -> list[Problem]:
    """Why the kernels for some platforms can't run there."""
    problems = []
    for platform in platforms:
        for plugin in operations:
            if plugin.distribution == KERNELS.get(platform):
                problems += [
                    Problem(
                        f"{plugin.name} can't run on {platform}: {dataclasses.replace(reason, hint='')}", reason.hint
                    )
                    for reason in find_reasons(plugin, platform)
                ]
    return problems


def _kernels(platforms: list[str], operations: tuple[Plugin, ...]) -> list[str]:
    lines = []
    for platform in platforms:
        lines.append(f"on {platform} auto runs {find_chosen(platform)}")
        kernels = [plugin for plugin in operations if plugin.distribution == KERNELS.get(platform)]
        lines += [f"{plugin.name}: {line}" for plugin in kernels for line in find_details(plugin, platform)]
    return lines


def _suggestions(platforms: list[str], devices: int, distributions: set[str]) -> list[Problem]:
    """What to install for platforms. ``devices`` is the number of JAX's devices; 0 if JAX may lack the platform."""
    problems = []
    for path, (platform, what) in DEVICE_FILES.items():
        if platform not in platforms and Path(path).exists():
            problems.append(Problem(f"this machine has {what}, which JAX does not use", JAX_PLUGINS[platform][1]))
    for platform in platforms:
        prefix, install = JAX_PLUGINS.get(platform, ("", ""))
        if not devices and not any(name.startswith(prefix) for name in distributions):
            problems.append(Problem(f"JAX needs {prefix} to run on {platform}", install))
        wanted = FOR_PLATFORM.get(platform, CORE)
        if wanted not in distributions:
            problems.append(Problem(f"{wanted} has kernels for {platform}", f"pip install {wanted}"))
    if devices > 1 and FOR_SEVERAL_DEVICES not in distributions:
        what = f"{FOR_SEVERAL_DEVICES} shards long sequences over these {devices} devices"
        problems.append(Problem(what, f"pip install {FOR_SEVERAL_DEVICES}"))
    return problems


def _print(report: Report, verbose: bool) -> None:
    print_table(("version of", ""), report.versions.items())
    print_text("")
    print_table(
        ("machine", ""),
        (
            ("backend", report.backend or "none"),
            ("devices", ", ".join(report.devices) or "none"),
        ),
    )
    print_text("")
    operations = report.installed.plugins
    rows = ((plugin.name, plugin.version, str(plugin.state), plugin.cause) for plugin in operations)
    print_table(("operation", "version", "state", "cause"), rows)
    if verbose:
        for plugin in operations:
            if plugin.traceback:
                print_heading(f"{plugin.name}, traceback")
                print_text(plugin.traceback.rstrip())
    if report.kernels:
        print_heading("Attention of 4096 tokens, D 128, bfloat16")
        print_text("\n".join(f"- {line}" for line in report.kernels))
    for heading, problems in (("Could be installed", report.suggestions), ("Wrong", report.problems)):
        if problems:
            print_heading(heading)
            for problem in problems:
                print_text(f"- {problem.what}\n    {problem.install}")
    if not report.problems:
        print_heading("Nothing is wrong.")
