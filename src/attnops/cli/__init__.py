"""The command line: one file a command, whose function ``command`` it runs. Needs the extra ``cli``."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Final

from attnops._version import __version__

if TYPE_CHECKING:
    import typer

# The commands, each a module beside this one, in the order in which --help shows them.
COMMANDS: Final = ("list", "explain", "show", "bench", "check", "doctor", "demo")


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

    app = typer.Typer(
        help="attnops: pluggable attention for JAX.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
    )

    @app.callback(invoke_without_command=True)
    def options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        if version:
            typer.echo(__version__)
            raise typer.Exit

    for name in COMMANDS:
        app.command(name)(importlib.import_module(f"attnops.cli.{name}").command)
    return app
