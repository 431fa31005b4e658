"""The command ``attnops``; distributions declare its subcommands by entry points."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import io
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from attnops_cli._version import __version__

if TYPE_CHECKING:
    import typer

# Former spellings of options, which still work; --help does not show them.
RENAMED: Final = {"--T": "--query-length", "--S": "--key-length", "--b": "--batch", "--h": "--head"}


# Device files that Linux has if there is a TPU.
TPU_FILES: Final = ("/dev/accel*", "/dev/vfio/*")
# These keep libtpu from asking the network for a description of the machine, and from printing that it failed.
QUIET_LIBTPU: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def main() -> None:
    """Run the command line."""
    leave_libtpu_alone()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale that lacks a character must not make a command fail
    make_app()(prog_name="attnops")


def leave_libtpu_alone() -> None:
    """Keep JAX from trying libtpu if there is no TPU: libtpu prints dozens of lines before it gives up.

    Settings of the user are not changed.
    """
    if any(glob.glob(path) for path in TPU_FILES) or "JAX_FORCE_TPU_INIT" in os.environ:
        return
    if importlib.util.find_spec("libtpu") is None:
        return
    import jax

    if jax.config.jax_platforms is not None:  # type: ignore[attr-defined]
        return
    if importlib.util.find_spec("jax_plugins") is None and not importlib.metadata.entry_points(group="jax_plugins"):
        jax.config.update("jax_platforms", "cpu")
        return
    # There is a plugin of another platform, so that jax_platforms can't be set: libtpu is tried, and kept quiet.
    for name, value in QUIET_LIBTPU.items():
        os.environ.setdefault(name, value)


def make_app() -> typer.Typer:
    """The application, with every command that is installed."""
    import typer
    import typer.core
    import typer.main

    from attnops_cli import commands
    from attnops_cli.output import fail

    declared = commands.installed()
    context_settings = {"help_option_names": ["-h", "--help"]}

    class Group(typer.core.TyperGroup):
        def get_params(self, ctx: Any) -> list[Any]:
            return _without_types(super().get_params(ctx))

        def list_commands(self, ctx: Any) -> list[str]:
            return [*declared]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:  # for --help, which shows why one can't be used
            try:
                return make_command(cmd_name)
            except commands.CommandError as error:
                return typer.core.TyperCommand(cmd_name, help=str(error))

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            try:
                return args[0], make_command(args[0]), args[1:]
            except commands.CommandError as error:
                fail(error, 2)

    class Command(typer.core.TyperCommand):
        def get_params(self, ctx: Any) -> list[Any]:
            return _without_types(super().get_params(ctx))

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return super().parse_args(ctx, [_renamed(argument) for argument in args])

    def make_command(name: str) -> Any:
        def make(function: Any) -> Any:
            single = typer.Typer(add_completion=False, context_settings=context_settings)
            single.command(name, cls=Command)(function)
            return typer.main.get_command(single)

        return commands.load(name, declared, make)

    app = typer.Typer(
        cls=Group,
        help="attnops: pluggable attention for JAX.",
        no_args_is_help=True,
        add_completion=False,
        context_settings=context_settings,
        pretty_exceptions_show_locals=False,
    )

    @app.callback(invoke_without_command=True)
    def options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        if version:
            typer.echo(__version__)
            raise typer.Exit

    return app


def _without_types(params: list[Any]) -> list[Any]:
    """The parameters. Flags lose their type, which typer would print as "<bool>"."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def _renamed(argument: str) -> str:
    """The current spelling of an option of `RENAMED`, such as "--T" or "--T=8"; other arguments do not change."""
    name, equals, value = argument.partition("=")
    return RENAMED.get(name, name) + equals + value
