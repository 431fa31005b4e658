"""The command line: one file a command, whose function ``command`` it runs. Needs the extra ``cli``."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, Final

from attnops._version import __version__

if TYPE_CHECKING:
    import typer

# The commands, each a module beside this one, in the order in which --help shows them.
COMMANDS: Final = ("list", "explain", "show", "bench", "check", "doctor", "demo")
# Options that were spelled otherwise, which still work; --help does not show them.
RENAMED: Final = {"--T": "--query-length", "--S": "--key-length", "--b": "--batch", "--h": "--head"}


def main() -> None:
    """Run the command line; where its libraries are missing, say what to install and exit with status 1."""
    try:
        import packaging.specifiers  # noqa: F401
        import rich.console  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f"The attnops command needs {error.name}, which is not installed: pip install 'attnops[cli]'")
    make_app()(prog_name="attnops")


def make_app() -> typer.Typer:
    """The application, with every command of `COMMANDS`."""
    import typer
    import typer.core

    app = typer.Typer(
        help="attnops: pluggable attention for JAX.",
        no_args_is_help=True,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_show_locals=False,
    )

    @app.callback(invoke_without_command=True)
    def options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        if version:
            typer.echo(__version__)
            raise typer.Exit

    class Command(typer.core.TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return super().parse_args(ctx, [_renamed(argument) for argument in args])

    for name in COMMANDS:
        app.command(name, cls=Command)(importlib.import_module(f"attnops.cli.{name}").command)
    return app


def _renamed(argument: str) -> str:
    """The option of today for one of `RENAMED`, as "--T 8" or "--T=8"; anything else as it is."""
    name, equals, value = argument.partition("=")
    return RENAMED.get(name, name) + equals + value
