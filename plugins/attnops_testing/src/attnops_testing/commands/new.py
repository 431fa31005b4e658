"""`attnops new`: writes a plugin that is ready to publish."""

from __future__ import annotations

import dataclasses
import importlib.resources
import importlib.util
import keyword
import os
import re
import string
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from attnops._version import __version__
from attnops.dispatch.operation import API_VERSION
from attnops.dispatch.plugins import CORE
from attnops.dispatch.registry import ELSEWHERE, OperationRegistry
from attnops_cli.output import fail, print_text

PlatformName = Literal["tpu", "cuda", "cpu"]

# The classes of the core's operations, by name; operations of other names are subclasses of the first.
BASES: Final = {
    "vanilla": "attnops.operations.vanilla:VanillaAttention",
    "flash": "attnops.operations.flash:FlashAttention",
    "sdpa": "attnops.operations.sdpa:ScaledDotProductAttention",
}
# The files of a plugin, by template; $package in their names is replaced.
FILES: Final = {
    "pyproject.toml.tmpl": "pyproject.toml",
    "README.md.tmpl": "README.md",
    "LICENSE": "LICENSE",
    "gitignore.tmpl": ".gitignore",
    "workflow.yml.tmpl": ".github/workflows/test.yml",
    "__init__.py.tmpl": "src/$package/__init__.py",
    "operation.py.tmpl": "src/$package/operation.py",
    "conformance.py.tmpl": "tests/test_conformance.py",
}

_DISTRIBUTION: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_OPERATION: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

_CONSTANTS: Final = {
    "tpu": """
BLOCK = 128  # queries that a program of the kernel computes
MAX_KEYS = 4096  # keys and values of a head must fit into vector memory
""",
    "cuda": """
BLOCK = 64  # queries that a program of the kernel computes, and keys a step of its loop; a power of two for Triton
""",
}
_MULTIPLE: Final = """\
            if length % BLOCK:
                yield Reason(name, length, f"must be a multiple of {BLOCK}", "use attnops.kernels.pad_to_multiple")
"""
_UNSUPPORTED: Final = {
    "tpu": """\
        for name, length in (("T", request.query_length), ("S", request.key_length)):
"""
    + _MULTIPLE
    + """\
        if request.key_length > MAX_KEYS:
            yield Reason("S", request.key_length, f"must be at most {MAX_KEYS}", "loop over blocks of keys")
""",
    "cuda": """\
        for name, length in (("T", request.query_length), ("S", request.key_length)):
"""
    + _MULTIPLE
    + """\
        for name, size in (("D", request.head_dim), ("Dv", request.value_head_dim)):
            if size < 16 or size & (size - 1):
                yield Reason(name, size, "must be a power of two of at least 16", "pad it with zeros")
""",
}
_EXPORTABLE: Final = "            exportable=False,  # JAX serialises no call through jax.ffi\n"


@dataclasses.dataclass(frozen=True)
class Platform:
    """What differs between the platforms of a new plugin.

    Attributes:
        platform: the platform's name.
        language: the language of the kernel.
        title: the platform's name for people to read.
        dtypes: the dtypes that the kernel serves, as Python source.
        interpret: whether tests interpret the kernel.
    """

    platform: PlatformName
    language: str
    title: str
    dtypes: str
    interpret: bool


PLATFORMS: Final = {
    "tpu": Platform("tpu", "Pallas", "TPUs", '{"float32", "bfloat16"}', True),
    "cuda": Platform("cuda", "Pallas through Triton", "NVIDIA GPUs", '{"float32", "bfloat16", "float16"}', True),
    "cpu": Platform("cpu", "plain JAX", "CPUs", '{"float32", "bfloat16", "float16"}', False),
    "ffi": Platform("cpu", "C++ through jax.ffi", "CPUs", '{"float32"}', False),
}


def command(
    name: Annotated[str, typer.Argument(help="The distribution, such as attnops-mykernel.")],
    platform: Annotated[PlatformName, typer.Option(help="The platform of the kernel.")] = "tpu",
    ffi: Annotated[bool, typer.Option("--ffi", help="Write the kernel in C++, with --platform cpu.")] = False,
    operation: Annotated[
        str | None,
        typer.Option(
            help="What the kernel computes: flash, vanilla or sdpa, for calls of that name on the platform; or another "
            "name.",
            metavar="NAME",
            show_default="NAME without attnops-",
        ),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where the plugin's folder is created.", metavar="FOLDER")] = Path(),
) -> None:
    """Write a plugin: a small kernel that passes its tests, what it serves, a README, a licence and a CI workflow.

    The kernel is written in Pallas for TPUs, in Pallas through Triton for NVIDIA GPUs, and in plain JAX, or C++, for
    CPUs; its tests interpret it on a CPU. Exits with 2, and writes nothing, if a name can't be used or the folder
    exists.
    """
    place = folder / name
    try:
        if ffi and platform != "cpu":
            raise ValueError(f"--ffi is given, but --platform is {platform}: add --platform cpu, or leave --ffi out")
        kind = "ffi" if ffi else platform
        values = substitutions(name, kind, operation)
        if place.exists():
            raise FileExistsError(f"{place} exists: choose another name, state another --folder, or move it away")
        if not folder.is_dir():
            raise FileNotFoundError(f"--folder {folder} is not a folder: create it first, or state another")
        write(place, kind, values)
    except (ValueError, OSError) as error:
        fail(error, 2)
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    subject = f"{values['name']}:{values['operation']} --platform {platform}{values['flag']}"
    print_text(
        f"{place} is a plugin that serves {values['operation']!r} on {platform}, in {values['language']}:\n  "
        + "\n  ".join(files)
        + f"\n\nNow run\n  cd {place}\n  pip install -e '.[test]'\n  pytest\n  attnops check {subject}"
    )


def substitutions(name: str, kind: str, operation: str | None = None) -> dict[str, str]:
    """The values of the templates' variables, for a kernel of one of `PLATFORMS`.

    Raises:
        ValueError: a name can't be a distribution's, a package's or an operation's, or is taken.
    """
    package = _package(name)
    words = [word for word in package.removeprefix("attnops_").split("_") if word]
    operation = "_".join(words).lower() if operation is None else operation
    _check_operation(operation)
    module, _, base = BASES.get(operation, BASES["vanilla"]).partition(":")
    class_name = "".join(word[:1].upper() + word[1:] for word in words).removesuffix("Attention") + "Attention"
    if not class_name.isidentifier():
        class_name = f"My{class_name}"  # the name begins with a digit
    if class_name == base:
        class_name = f"My{class_name}"  # the module imports a class of that name
    get_impl_name = f'\n    @classmethod\n    def get_impl_name(cls) -> str:\n        return "{operation}"\n'
    details = PLATFORMS[kind]
    return {
        "name": name,
        "package": package,
        "operation": operation,
        "class_name": class_name,
        "base": base,
        "base_module": module,
        "get_impl_name": "" if operation in BASES else get_impl_name,
        "platform": details.platform,
        "platform_name": details.title,
        "language": details.language,
        "dtypes": details.dtypes,
        "interpret": str(details.interpret),
        "constants": _CONSTANTS.get(kind, ""),
        "flag": " --interpret" if details.interpret else "",
        "unsupported": _UNSUPPORTED.get(kind, ""),
        "exportable": _EXPORTABLE if kind == "ffi" else "",
        "version": __version__,
        "api_version": str(API_VERSION),
    }


def write(place: Path, kind: str, values: dict[str, str]) -> None:
    """Write all of the plugin's files, or none if one can't be written."""
    templates = importlib.resources.files("attnops_testing.commands") / "template"
    files = FILES | {f"kernel_{kind}.py.tmpl": "src/$package/kernel.py"}
    files |= {"kernel.cpp": "src/$package/kernel.cpp"} if kind == "ffi" else {}
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".attnops-new-") as temporary:
        plugin = Path(temporary) / "plugin"
        for template, target in files.items():
            path = plugin / string.Template(target).substitute(values)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (templates / template).read_text(encoding="utf-8")
            if template.endswith(".tmpl"):
                text = string.Template(text).substitute(values)
            path.write_text(text, encoding="utf-8")
        (plugin / "src" / values["package"] / "py.typed").touch()
        os.rename(plugin, place)


def _package(name: str) -> str:
    """The package of a distribution."""
    if not _DISTRIBUTION.fullmatch(name):
        raise ValueError(
            f"name={name!r} can't be a distribution's: letters, digits, '-', '_' and '.', the first and the last a "
            f"letter or a digit; such as attnops-mykernel"
        )
    package = re.sub(r"[-_.]+", "_", name).lower()
    if not package.isidentifier() or keyword.iskeyword(package):
        raise ValueError(f"name={name!r} makes the package {package!r}, which Python can't import; try attnops-{name}")
    if package in sys.stdlib_module_names or importlib.util.find_spec(package) is not None:
        raise ValueError(f"name={name!r} makes the package {package!r}, which is installed already; choose another")
    if not package.removeprefix("attnops_").strip("_"):
        raise ValueError(f"name={name!r} has nothing after attnops; such as attnops-mykernel")
    return package


def _check_operation(operation: str) -> None:
    if not _OPERATION.fullmatch(operation):
        raise ValueError(
            f"operation={operation!r} must be letters, digits, '-' and '_', the first no digit: state --operation"
        )
    if operation in BASES:
        return
    owners = [plugin.distribution for plugin in OperationRegistry.plugins() if plugin.operation == operation]
    if CORE in owners:
        raise ValueError(f"operation={operation!r} picks among operations, and computes nothing; state another name")
    if owner := next(iter(owners), ELSEWHERE.get(operation)):
        raise ValueError(f"operation={operation!r} is an operation of {owner}; state {', '.join(BASES)}, or a new name")
